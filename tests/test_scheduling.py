"""What `make test` hands out together is there, and is named as it lies."""

from __future__ import annotations

from tests.doc_blocks import ROOT
from tests.scheduling import ONE_AT_A_TIME, THE_MAIN_JOB, WAITING, bundle, spread


def test_the_files_that_do_not_go_by_file_exist() -> None:
    assert [file for file in (*ONE_AT_A_TIME, *THE_MAIN_JOB, *WAITING) if not (ROOT / file).exists()] == []


def test_pages_are_given_out_one_at_a_time_and_other_files_whole() -> None:
    assert bundle("tests/test_docs.py::test_page[a]") != bundle("tests/test_docs.py::test_page[b]")
    assert bundle("tests/assets/test_diff.py::test_a") == bundle("tests/assets/test_diff.py::test_b")
    assert {bundle(f"{file}::test_a") for file in THE_MAIN_JOB} == {"the main job"}


def test_what_waits_is_spread_between_what_computes() -> None:
    waiting = [f"{WAITING[0]}test_{number}.py" for number in range(2)]
    others = [f"tests/assets/test_{number}.py" for number in range(4)]
    spread_out = spread([*others, *waiting])
    assert sorted(spread_out) == sorted([*others, *waiting])
    assert [name in waiting for name in spread_out] == [False, True, False, False, True, False]
    assert spread(others) == others
