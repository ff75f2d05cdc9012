"""A run whose epoch is over writes nothing to a key-value table, wherever that is stored. No
user sees its fences.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from dagster_adjunct.resources.errors import RunLeaseLostError
from dagster_adjunct.resources.key_value.manager import KeyValueTableManager
from dagster_adjunct.resources.key_value.serializers import JsonSerializer, TextSerializer
from dagster_adjunct.resources.key_value.table import BlockingKeyValueTable, KeyValueTable
from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.table_backends.key_value_rows import KeyValueRows
from dagster_adjunct.resources.tables.operation import Changes
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from dagster_adjunct.resources.times import Deadline, read_clocks
from tests.resources.key_value_backends.segment_stores import SEGMENT_STORES, SegmentStore

Blocking = BlockingTable[Any, Any, Any]


@pytest.fixture(params=SEGMENT_STORES)
def segment_store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> SegmentStore:
    store: SegmentStore = request.param(request, tmp_path_factory.mktemp("fenced"))
    return store


@pytest.fixture
def lake() -> Lake:
    return open_lake("memory://fenced-rows")


@pytest.fixture
def rows(segment_store: SegmentStore, lake: Lake) -> Iterator[KeyValueRows]:
    """Return a function over a new table."""
    columns = {"id": "string", "n": "bigint"}
    backend = segment_store.backend()
    yield KeyValueRows(
        lake, "app", "fenced", "id", columns=columns, create=True, partitions=2, stored_in=backend
    )
    KeyValueTableManager(lake, backend).delete("app", "fenced")


def of_run(lake: Lake, rows: KeyValueRows, epoch: int, application: str = "counts") -> Blocking:
    """Return the table as a run of this epoch writes to it, which holds its lease for the next
    hour.
    """
    lease: dict[str, Any] = {"holder": f"h{epoch}", "run": f"run-{epoch}"}
    deadline = Deadline(read_clocks(), 3600)
    fence = Fence(
        lake.store, "run.json", application=application, epoch=epoch, deadline=deadline, **lease
    )
    function = pickle.loads(pickle.dumps(rows)) if rows.lake is not lake else rows
    return BlockingTable(
        RemoteTable("t", key="id", read_function=function, write_function=function).with_fence(
            fence
        )
    )


def test_an_earlier_run_writes_nothing_after_a_later_one(rows: KeyValueRows, lake: Lake) -> None:
    names = [f"k{n}" for n in range(40)]  # in both partitions
    with of_run(lake, rows, 7) as first, of_run(lake, rows, 8) as second:
        first.put_all([(name, {"id": name, "n": 1}) for name in names])
        first.update_all([(name, Changes(add={"n": 1})) for name in names])
        second.put_all([(name, {"id": name, "n": 10}) for name in names])
        for late in (
            lambda: first.put("k1", {"id": "k1", "n": 3}),
            lambda: first.put_all([(name, {"id": name, "n": 3}) for name in names]),
            lambda: first.update("k2", Changes(add={"n": 1})),
            lambda: first.delete_all(names),
        ):
            with pytest.raises(RunLeaseLostError) as refused:
                late()
            assert (refused.value.application, refused.value.run) == ("counts", "run-7")
        assert second.get_all(names) == {name: {"id": name, "n": 10} for name in names}


def test_a_later_run_that_announces_itself_stops_the_earlier_one_everywhere(
    rows: KeyValueRows, lake: Lake
) -> None:
    with of_run(lake, rows, 7) as first, of_run(lake, rows, 8) as second:
        first.put("k1", {"id": "k1", "n": 1})
        second._thread.run(second.table.announce())
        second._thread.run(second.table.announce())  # which changes nothing
        for n in range(40):
            with pytest.raises(RunLeaseLostError):
                first.put(f"k{n}", {"id": f"k{n}", "n": 2})
        assert second.get_all([f"k{n}" for n in range(40)]) == {"k1": {"id": "k1", "n": 1}}


def test_other_applications_and_plain_writers_are_not_fenced(
    rows: KeyValueRows, lake: Lake
) -> None:
    plain = BlockingTable(RemoteTable("t", key="id", read_function=rows, write_function=rows))
    with of_run(lake, rows, 8) as later, of_run(lake, rows, 7, "others") as other, plain:
        later.put("k1", {"id": "k1", "n": 1})
        other.put("k1", {"id": "k1", "n": 2})
        plain.put("k1", {"id": "k1", "n": 3})
        later.put("k2", {"id": "k2", "n": 4})
        assert other.get_all(["k1", "k2"]) == {
            "k1": {"id": "k1", "n": 3},
            "k2": {"id": "k2", "n": 4},
        }


def test_whoever_reads_the_table_sees_no_fences(
    rows: KeyValueRows, lake: Lake, segment_store: SegmentStore
) -> None:
    with of_run(lake, rows, 8) as later:
        later.put_all([(f"k{n}", {"id": f"k{n}", "n": n}) for n in range(20)])
    manager = KeyValueTableManager(lake, segment_store.backend())
    opened: KeyValueTable[str, object] = manager.open(
        "app", "fenced", key=TextSerializer(), value=JsonSerializer()
    )
    with BlockingKeyValueTable(opened) as table:
        assert sorted(key.key for page in table.all_keys() for key in page.items) == sorted(
            f"k{n}" for n in range(20)
        )
