"""What `make test` hands out together is there, and is named as it lies."""

from __future__ import annotations

from tests.doc_blocks import ROOT
from tests.scheduling import ONE_AT_A_TIME, THE_MAIN_JOB, bundle


def test_the_files_that_do_not_go_by_file_exist() -> None:
    assert [file for file in (*ONE_AT_A_TIME, *THE_MAIN_JOB) if not (ROOT / file).exists()] == []


def test_pages_are_given_out_one_at_a_time_and_other_files_whole() -> None:
    assert bundle("tests/test_docs.py::test_page[a]") != bundle("tests/test_docs.py::test_page[b]")
    assert bundle("tests/assets/test_diff.py::test_a") == bundle("tests/assets/test_diff.py::test_b")
    assert {bundle(f"{file}::test_a") for file in THE_MAIN_JOB} == {"the main job"}
