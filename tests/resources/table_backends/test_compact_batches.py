"""Compact batches leave what other batches leave, in every backend, and reject the same entries."""

from __future__ import annotations

import asyncio
import random
from decimal import Decimal
from typing import Any

import pytest

from dagster_adjunct.resources.errors import ConfigurationError, TableAccessError, TableError
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.batching import BatchLayer, BatchProvider
from dagster_adjunct.resources.tables.compact import merge_updates
from dagster_adjunct.resources.tables.functions import TableWriteFunction
from dagster_adjunct.resources.tables.operation import (
    DIRECT,
    Changes,
    Conditions,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    RowEntries,
    State,
    UpdateContract,
)
from dagster_adjunct.resources.tables.retry import RetryPolicy
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.resources.table_backends.fresh_functions import TYPED_STORES, WHOLE_STORES, NewStore
from tests.rounds import rounds

KEYS = ["k1", "k2", "k3"]
PUT, DELETE, UPDATE = OperationKind.PUT, OperationKind.DELETE, OperationKind.UPDATE
ONCE = RetryPolicy(attempts=1)


@pytest.fixture(scope="module", params=WHOLE_STORES)
def new_store(request: Any, tmp_path_factory: pytest.TempPathFactory) -> NewStore:
    make: NewStore = request.param(request, tmp_path_factory.mktemp("compact"))
    return make


@pytest.fixture(scope="module", params=TYPED_STORES)
def new_typed_store(request: Any, tmp_path_factory: pytest.TempPathFactory) -> NewStore:
    make: NewStore = request.param(request, tmp_path_factory.mktemp("compact"))
    return make


def table_of(
    store: Any, *, compact: bool = True, size: int = 1000, **settings: Any
) -> BlockingTable[Any, Any, Any]:
    batches = BatchProvider(size=size, compact=compact)
    reads = {"read_function": store} if hasattr(store, "get_all") else {}
    return BlockingTable(
        RemoteTable("t", key="id", write_function=store, batches=batches, **reads, **settings)
    )


class Drawn:
    """Operations, drawn with a seed; some entries are `bad`: no backend takes them."""

    def __init__(self, seed: int, *, bad: bool) -> None:
        self.random, self.bad = random.Random(seed), bad

    def fields(self) -> dict[str, Any]:
        drawn: dict[str, Any] = {
            "a": self.random.randint(-9, 9),
            "b": self.random.choice(["", "x", None]),
            "tags": ["t"],
        }
        kept = {name: value for name, value in drawn.items() if self.random.random() < 0.7}
        if self.bad and self.random.random() < 0.2:
            kept["a"] = "no number"
        return kept

    def update(self) -> Any:
        if self.random.random() < 0.3:
            return self.fields()
        # Where sums may leave their type, they leave it for good: within a request one that comes
        # back is no error.
        numbers = [1, 5, None] if self.bad else [1, -2, 5, None]
        added = {"n": self.random.choice(numbers), "c": self.random.choice([0.5, -1.25])}
        parts: dict[str, Any] = {"set": {}, "add": {}, "append": {}}
        for name, number in added.items():
            if self.random.random() < 0.6:
                parts["add"][name] = number
        if self.random.random() < 0.4:
            parts["append"]["tags"] = self.random.choice([["x"], ["y", "z"], [], None])
        if self.random.random() < 0.4:
            parts["set"]["b"] = self.random.choice(["p", "q"])
        if self.random.random() < 0.1:
            parts["set"]["n"] = 7
            parts["add"].pop("n", None)
        remove = ["a"] if self.random.random() < 0.2 else []
        if self.bad and self.random.random() < 0.2:
            parts["add"]["n"] = "no number"
        if self.bad and self.random.random() < 0.1:
            parts["add"].pop("n", None)
            parts["set"]["n"] = 2**63 - 1
        return Changes(**parts, remove=remove)

    def operation(self) -> Operation[Any]:
        kind = self.random.choice([PUT, PUT, DELETE, UPDATE, UPDATE, UPDATE])
        keys = self.random.choices(KEYS, k=self.random.randint(1, 8))
        if kind is DELETE:
            return Operation(kind, RowEntries(keys))
        if kind is PUT:
            return Operation(
                kind, RowEntries(keys, [self.random.choice([None, self.fields()]) for _ in keys])
            )
        with_defaults = self.random.choice([0.0, 0.5, 1.0])
        defaults = [
            {"b": "begun", "n": 1} if self.random.random() < with_defaults else None for _ in keys
        ]
        contract = self.random.choice(list(UpdateContract))
        return Operation(
            kind, RowEntries(keys, [self.update() for _ in keys], defaults), contract=contract
        )


def answers_of(table: BlockingTable[Any, Any, Any], drawn: Drawn, turns: int) -> list[Any]:
    answers: list[Any] = []
    for _ in range(turns):
        outcomes = table.send(drawn.operation())
        answers.append({place: problem.state for place, problem in outcomes.problems.items()})
        answers.append((outcomes.defaults_put, table.get_all(KEYS)))
    return answers


@pytest.mark.rounds
@pytest.mark.parametrize("seed", range(rounds(2, 40)))
def test_drawn_operations_leave_the_same_records_and_outcomes(
    new_store: NewStore, seed: int
) -> None:
    plain, compact = (
        table_of(new_store(), compact=False),
        table_of(new_store(), size=random.Random(seed).choice([3, 99])),
    )
    with plain, compact:
        assert answers_of(compact, Drawn(seed, bad=False), 12) == answers_of(
            plain, Drawn(seed, bad=False), 12
        )
        assert plain.metrics.records.compacted == 0
        assert compact.metrics.records.compacted > 0
        for count in ("writes", "deletes", "updates", "defaults_put"):
            assert compact.metrics.counts()[count] == plain.metrics.counts()[count], count


@pytest.mark.rounds
@pytest.mark.parametrize("seed", range(rounds(2, 40)))
def test_entries_that_are_rejected_are_the_same(new_typed_store: NewStore, seed: int) -> None:
    """Columns have types, so some values do not fit; sums leave the range of their type in one
    direction.
    """
    plain, compact = table_of(new_typed_store(), compact=False), table_of(new_typed_store())
    with plain, compact:
        assert answers_of(compact, Drawn(seed, bad=True), 12) == answers_of(
            plain, Drawn(seed, bad=True), 12
        )


def test_a_merged_update_that_overflows_is_sent_again_by_its_parts(
    new_typed_store: NewStore,
) -> None:
    with table_of(new_typed_store()) as table:
        table.put("k1", {"a": 2**31 - 3})
        outcomes = table.send(
            Operation(UPDATE, RowEntries(["k1"] * 4, [Changes(add={"a": 1})] * 4))
        )
        assert outcomes.places(State.REFUSED) == [2, 3]
        assert table.get("k1")["a"] == 2**31 - 1
        assert table.metrics.records.updates == 2


class Counting(TableWriteFunction[Any, Any, Any]):
    """A store with one request for each entry, which are kept; `refuses` says which values it
    rejects.
    """

    def __init__(self, refuses: Any = lambda value: None) -> None:
        self.sent: list[tuple[str, Any, Any]] = []
        self.refuses = refuses

    async def put(self, key: Any, value: Any, *args: object) -> None:
        self._take("put", key, value)

    async def update(self, key: Any, update: Any, *args: object) -> None:
        self._take("update", key, update)

    async def delete(self, key: Any, *args: object) -> None:
        self._take("delete", key, None)

    def _take(self, kind: str, key: Any, value: Any) -> None:
        if (error := self.refuses(value)) is not None:
            raise error
        self.sent.append((kind, key, value))


def test_the_last_put_or_delete_of_a_key_is_sent() -> None:
    store = Counting()
    with table_of(store) as table:
        entries = [
            ("a", {"n": 1}),
            ("b", {"n": 1}),
            ("a", None),
            ("b", None),
            ("a", {"n": 2}),
            ("c", None),
            ("c", {"n": 3}),
        ]
        table.put_all(entries)
        assert sorted(store.sent) == [
            ("delete", "b", None),
            ("put", "a", {"n": 2}),
            ("put", "c", {"n": 3}),
        ]
        assert (
            table.metrics.records.compacted,
            table.metrics.records.writes,
            table.metrics.records.deletes,
        ) == (4, 4, 3)


def test_calls_of_one_moment_are_merged_and_other_operations_are_between() -> None:
    store = Counting()

    async def all_at_once() -> None:
        async with table_of(store).table as table:
            calls = [table.put("a", {"n": 1}), table.delete("a"), table.put("a", {"n": 2})]
            calls += [
                table.update("a", {"n": 3}),
                table.update("a", {"m": 4}),
                table.put("a", {"n": 5}),
                table.delete("a"),
            ]
            await asyncio.gather(*calls)

    asyncio.run(all_at_once())
    assert store.sent == [
        ("put", "a", {"n": 2}),
        ("update", "a", {"n": 3, "m": 4}),
        ("delete", "a", None),
    ]


def test_a_rejected_last_put_leaves_the_one_before_it() -> None:
    store = Counting(lambda value: TableError("no 3.", "") if value == {"n": 3} else None)
    with table_of(store) as table:
        puts = RowEntries(
            ["a", "a", "a", "b", "b"], [{"n": 1}, {"n": 2}, {"n": 3}, {"n": 3}, {"n": 3}]
        )
        outcomes = table.send(Operation(PUT, puts))
    assert outcomes.places(State.REFUSED) == [2, 3, 4]
    assert store.sent == [("put", "a", {"n": 2})]


def test_a_table_that_can_not_be_used_fails_all_entries_after_one_request() -> None:
    asked: list[Any] = []

    def closed(value: Any) -> Exception:
        asked.append(value)
        return TableAccessError("closed.", "")

    with table_of(Counting(closed)) as table:
        assert len(table.send(Operation(PUT, RowEntries(["a"] * 5, [{"n": 1}] * 5))).problems) == 5
        assert (
            len(table.send(Operation(UPDATE, RowEntries(["a"] * 5, [{"n": 1}] * 5))).problems) == 5
        )
    assert len(asked) == 2


def test_a_merged_update_that_a_function_refuses_names_the_bad_one() -> None:
    store = Counting(lambda value: ValueError("no 3") if value.get("n") == 3 else None)
    with table_of(store) as table:
        outcomes = table.send(
            Operation(UPDATE, RowEntries(["a"] * 3, [{"n": 1}, {"m": 2}, {"n": 3}]))
        )
    assert outcomes.places(State.REFUSED) == [2]
    assert store.sent == [("update", "a", {"n": 1}), ("update", "a", {"m": 2})]


@pytest.mark.parametrize(
    ("updates", "merged"),
    [
        ([{"a": 1}, {"b": 2}, {"a": 3}], {"a": 3, "b": 2}),
        ([{"a": 1}, Changes(set={"a": 2})], Changes(set={"a": 2}, remove=())),
        ([Changes(add={"n": 2}), Changes(add={"n": -5})], Changes(add={"n": -3})),
        ([Changes(add={"n": Decimal("1e-30")}), Changes(add={"n": Decimal(10**30)})], None),
        (
            [Changes(add={"n": None}), Changes(add={"n": 1}), Changes(add={"n": None})],
            Changes(add={"n": 1}),
        ),
        (
            [Changes(add={"d": {"x": 1, "y": 1}}), Changes(add={"d": {"x": 2}})],
            Changes(add={"d": {"x": 2, "y": 1}}),
        ),
        (
            [Changes(append={"l": [1]}), Changes(append={"l": None}), Changes(append={"l": [2]})],
            Changes(append={"l": [1, 2]}),
        ),
        ([Changes(set={"a": 1}), Changes(remove=["a"])], Changes(remove=("a",))),
        ([Changes(remove=["a"]), Changes(set={"a": 1})], Changes(set={"a": 1})),
    ],
)
def test_updates_are_merged_in_their_order(updates: list[Any], merged: Any) -> None:
    found = merge_updates(updates)
    if merged is None:
        assert isinstance(found, Changes)
        assert found.add["n"] == Decimal(10**30) + 0 or str(found.add["n"]).endswith("1")
        return
    assert found == merged


@pytest.mark.parametrize(
    "updates",
    [
        [Changes(set={"n": 1}), Changes(add={"n": 1})],
        [Changes(add={"n": 1}), Changes(remove=["n"])],
        [Changes(append={"n": [1]}), Changes(set={"n": [2]})],
        [Changes(add={"n": 1}), Changes(add={"n": {"x": 1}})],
        [{"n": 1}, "a user's own update"],
    ],
)
def test_updates_that_change_a_column_in_several_ways_are_sent_as_they_are(
    updates: list[Any],
) -> None:
    assert merge_updates(updates) is None


@pytest.mark.parametrize(
    "settings", [{"newest_by": "at"}, {"idempotent": True}, {"newest_by": "at", "idempotent": True}]
)
def test_conditions_and_compact_batches_exclude_each_other(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        table_of(MemoryTable("excluded"), **settings)
    assert caught.value.argument == "batches"


def test_a_layer_leaves_operations_with_conditions_alone() -> None:
    sent: list[Operation[Any]] = []

    class Below:
        async def send(self, operation: Operation[Any]) -> Outcomes:
            sent.append(operation)
            return Outcomes(len(operation))

        async def close(self) -> None:
            pass

    marked = RowEntries(["a", "a"], [{"n": 1}, {"n": 2}], None, [DIRECT] * 2, [1, 2])
    layer = BatchLayer(Below(), batches=BatchProvider(compact=True))
    asyncio.run(layer.send(Operation(PUT, marked, conditions=Conditions("n"))))
    assert [len(operation) for operation in sent] == [2]


def test_a_request_that_fails_after_another_is_no_error_of_the_first() -> None:
    class Below:
        async def send(self, operation: Operation[Any]) -> Outcomes:
            if operation.kind is DELETE:
                raise ConfigurationError("no deletes.", "")
            return Outcomes(len(operation))

        async def close(self) -> None:
            pass

    layer = BatchLayer(Below(), batches=BatchProvider(compact=True))
    outcomes = asyncio.run(layer.send(Operation(PUT, RowEntries(["a", "b"], [{"n": 1}, None]))))
    assert outcomes.places(State.REFUSED) == [1]
    assert isinstance(outcomes.problems[1], Problem)


def test_a_trigger_that_drops_merged_records_names_each(tmp_path: Any) -> None:
    store = SqliteTable(
        tmp_path / "t.sqlite", "t", "id", columns={"id": "string", "n": "int"}, create=True
    )
    with table_of(store, retry=ONCE) as table:
        table.put("a", {"n": 0})
        import sqlite3

        with sqlite3.connect(tmp_path / "t.sqlite") as connection:
            connection.execute(
                "CREATE TRIGGER d BEFORE UPDATE ON t WHEN NEW.n > 2 BEGIN SELECT RAISE(IGNORE); END"
            )
        outcomes = table.send(Operation(UPDATE, RowEntries(["a"] * 4, [Changes(add={"n": 1})] * 4)))
        assert outcomes.places(State.REFUSED) == [2, 3]
        assert table.get("a") == {"id": "a", "n": 2}
