"""What each of several processes does to one table at once, to find out whether it stays whole."""

from __future__ import annotations

import pickle

from dagster_adjunct.resources.tables.metrics import TableMetrics
from dagster_adjunct.resources.tables.operation import UpdateContract, UpdateMessage
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.spawned import call_all, spawned

WRITERS, ROUNDS, KEYS = 8, 4, 61  # a prime, so that every stride visits every key


def hammer(declaration: bytes, writer: int) -> TableMetrics:
    """Update every key in each round, in an order of one's own, beginning those that aren't
    there.
    """
    table: RemoteTable = pickle.loads(declaration)
    with BlockingTable(table) as blocking:
        for turn in range(ROUNDS):
            numbers = [(n * (writer * 2 + 1) + turn) % KEYS for n in range(KEYS)]
            if writer % 2:
                numbers.reverse()
            messages = [
                (f"k{n}", UpdateMessage({f"w{writer}": turn}, {"id": f"k{n}", "begun_by": writer}))
                for n in numbers
            ]
            blocking.update_messages(messages, UpdateContract.UPDATE_WITH_DEFAULTS)
        return blocking.metrics


def columns() -> dict[str, str]:
    return {"id": "string", "begun_by": "int", **{f"w{writer}": "int" for writer in range(WRITERS)}}


def run_all(store) -> tuple[TableMetrics, dict]:
    """All writers at once on `store`; what they did together, and the records that they left."""
    table = RemoteTable(
        "hammered", key="id", read_function=store, write_function=store, batch_size=7
    )
    with spawned(WRITERS) as pool:
        counts = call_all(
            pool, hammer, [(pickle.dumps(table), writer) for writer in range(WRITERS)]
        )
    total = sum(counts, TableMetrics())
    with BlockingTable(table) as blocking:
        return total, blocking.get_all([f"k{n}" for n in range(KEYS)])


def check(total: TableMetrics, records: dict) -> None:
    """Every record was begun once and has the last value of every writer."""
    assert total.records.defaults_put == KEYS
    assert total.records.updates == WRITERS * ROUNDS * KEYS
    assert total.store.failures == 0
    assert len(records) == KEYS
    for record in records.values():
        assert record["begun_by"] in range(WRITERS)
        assert [record[f"w{writer}"] for writer in range(WRITERS)] == [ROUNDS - 1] * WRITERS
