"""Blocking tables in DynamoDB, which wait in the thread of whoever asks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.resources.key_value_backends.blocking_counts import (
    Counts,
    count_up,
    count_up_in_a_child,
    counts_in,
)
from tests.resources.key_value_backends.segment_stores import SegmentStore, dynamodb

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def segment_store(request, tmp_path_factory) -> SegmentStore:
    return dynamodb(request, tmp_path_factory.mktemp("segments"))


@pytest.fixture
def counts(backend, table) -> Iterator[Counts]:
    with counts_in(backend, table) as counts:
        yield counts


def test_single_requests_start_no_thread(counts):
    threads = set(threading.enumerate())
    counts.put("k", 0, family="f")
    counts.put("k", 0)
    count_up(counts, "k")
    counts.remove("k", family="f")
    assert counts.get("k").value == 1
    assert set(threading.enumerate()) == threads


def test_threads_share_a_client_and_no_change_is_lost(counts):
    counts.put("k", 0)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: [count_up(counts, "k") for _ in range(5)], range(6)))
    assert counts.get("k").value == 30


def test_keys_and_families_beyond_one_request_are_asked_for_together(counts):
    expected = {f"{number:03d}": number for number in range(230)}
    for start in range(0, 230, 50):
        counts.put_all(
            [(key, expected[key]) for key in list(expected)[start : start + 50]], family="f"
        )
    for number in range(5):
        counts.put("k", number, family=f"g{number}")
    assert [entry.value for entry in counts.get_all(expected, family="f")] == list(
        expected.values()
    )
    entries = [entry for page in counts.all_entries(page_size=40) for entry in page.items]
    assert {(entry.key.family, entry.key.key): entry.value for entry in entries} == {
        **{("f", key): number for key, number in expected.items()},
        **{(f"g{number}", "k"): number for number in range(5)},
    }


def test_a_closed_table_is_opened_by_its_next_request(counts):
    counts.put("k", 1)
    counts.close()
    assert counts.get("k").value == 1
    count_up(counts, "k")
    assert counts.get("k").value == 2


def test_a_child_of_the_process_and_the_process_both_go_on(counts):
    counts.put("k", 1)
    count_up_in_a_child(counts, "k")
    assert counts.get("k").value == 2
    count_up(counts, "k")
    assert counts.get("k").value == 3
