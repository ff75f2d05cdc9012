"""What `make test` hands out together is there, and is named as it lies."""

from __future__ import annotations

from tests.doc_blocks import ROOT
from tests.scheduling import ONE_AT_A_TIME, TOGETHER, WAITING, bundle, spread


def test_the_files_that_do_not_go_by_file_exist() -> None:
    together = [place for places in TOGETHER.values() for place in places]
    waiting = [place for place in WAITING if place not in TOGETHER]
    assert [
        place for place in (*ONE_AT_A_TIME, *together, *waiting) if not (ROOT / place).exists()
    ] == []


def test_pages_are_given_out_one_at_a_time_and_other_files_whole() -> None:
    assert bundle("tests/test_docs.py::test_page[a]") != bundle("tests/test_docs.py::test_page[b]")
    assert bundle("tests/assets/test_diff.py::test_a") == bundle(
        "tests/assets/test_diff.py::test_b"
    )
    for name, places in TOGETHER.items():
        assert {bundle(f"{place}::test_a") for place in places} == {name}


def test_what_waits_is_spread_between_what_computes() -> None:
    waiting = ["kafka", "tests/resources/tables/test_0.py"]
    others = [f"tests/assets/test_{number}.py" for number in range(4)]
    spread_out = spread([*others, *waiting])
    assert sorted(spread_out) == sorted([*others, *waiting])
    assert [name in waiting for name in spread_out] == [False, True, False, False, True, False]
    assert spread(others) == others
