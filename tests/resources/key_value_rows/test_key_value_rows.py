"""Records in key-value tables: what is stored, races between writers, and what becomes of
entries when things fail.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
from collections.abc import Mapping
from datetime import date
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    KeyTooLongError,
    KeyValueTableExistsError,
    KeyValueTableNotFoundError,
    KeyValueTableSealedError,
    OutcomeUnknownError,
    SchemaMismatchError,
    ScopeNotFoundError,
    TableUnavailableError,
    ValueTooLongError,
)
from dagster_adjunct.resources.key_value.manager import KeyValueTableManager
from dagster_adjunct.resources.key_value.segment import (
    KeyValueTableConfiguration,
    ReplyLostError,
    SegmentLimits,
    register_segment_backend,
)
from dagster_adjunct.resources.key_value.serializers import JsonSerializer, TextSerializer
from dagster_adjunct.resources.key_value.table import KeyValueTable
from dagster_adjunct.resources.key_value_backends.sqlite import SqliteSegments
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.table_backends.columns import (
    describe_function,
    function_from_description,
)
from dagster_adjunct.resources.table_backends.key_value_rows import KeyValueRows
from dagster_adjunct.resources.tables.functions import is_record_rejected
from dagster_adjunct.resources.tables.operation import (
    Changes,
    Conditions,
    Mark,
    Operation,
    OperationKind,
    Outcomes,
    RowEntries,
    State,
    position_of,
)
from tests.resources.key_value.scripted_segments import Lose, ScriptedSegments
from tests.resources.table_backends import hammer
from tests.resources.table_backends.every_type import RECORD, TYPES, blocking

COLUMNS = {"id": "string", "n": "bigint", "text": "string"}
PLAIN, ONCE = Conditions(), Conditions(None, True)
_numbers = count()
register_segment_backend("scripted", ScriptedSegments)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake")


def rows(lake: Lake | str, key: Any = "id", **settings: Any) -> KeyValueRows:
    """Return a function over a table that is made when it is opened."""
    given = {"columns": COLUMNS, "create": True, "partitions": 2, **settings}
    return KeyValueRows(lake, "app", given.pop("table", "records"), key, **given)


def scripted(**settings: Any) -> tuple[KeyValueRows, ScriptedSegments]:
    """Return a function over a table of one partition that fails as a test says, and that
    table's backend.
    """
    backend = ScriptedSegments(**settings)
    return (
        rows(open_lake(f"memory://rows{next(_numbers)}"), stored_in=backend, partitions=1),
        backend,
    )


def stored(lake: Lake, table: str = "records") -> dict[tuple[str | None, str], Any]:
    """Return what the table holds, by family and key, as anybody reads it who knows that it is
    JSON.
    """

    async def all_of(opened: KeyValueTable[str, Any]) -> dict[tuple[str | None, str], Any]:
        return {
            (e.key.family, e.key.key): e.value
            async for page in opened.all_entries()
            for e in page.items
        }

    manager = KeyValueTableManager(lake)
    return asyncio.run(
        all_of(manager.open("app", table, key=TextSerializer(), value=JsonSerializer()))
    )


def adding(keys: list[str], conditions: Conditions = PLAIN, offset: int = 0) -> Operation[str]:
    """Return one more of `n` for each key, which begins at 0."""
    marks = (
        [Mark("s.0", position_of(0, offset, place)) for place in range(len(keys))]
        if conditions
        else None
    )
    values, defaults = [Changes(add={"n": 1})] * len(keys), [{"n": 0}] * len(keys)
    return Operation(
        OperationKind.UPDATE, RowEntries(keys, values, defaults, marks), conditions=conditions
    )


def putting(records: Mapping[str, dict[str, Any]]) -> Operation[str]:
    return Operation(OperationKind.PUT, RowEntries(list(records), list(records.values())))


def send(function: KeyValueRows, *operations: Operation[str]) -> list[Outcomes]:
    async def one_by_one() -> list[Outcomes]:
        await function.open()
        try:
            return [await function.send(operation) for operation in operations]
        finally:
            await function.close()

    return asyncio.run(one_by_one())


def numbers(function: KeyValueRows, *keys: str) -> list[int | None]:
    (got,) = send(function, Operation(OperationKind.GET, RowEntries(list(keys))))
    assert got.records is not None
    assert not got.problems
    return [None if record is None else record["n"] for record in got.records]


def test_every_type_of_value_comes_back_as_it_was_and_is_plain_json(lake: Lake) -> None:
    function = rows(lake, columns=TYPES)
    with blocking(function) as table:
        table.put(RECORD["id"], RECORD)
        table.put(2, {"id": 2})
        assert table.get_all([RECORD["id"], 2, 3]) == {
            RECORD["id"]: RECORD,
            2: {**dict.fromkeys(TYPES), "id": 2},
        }
    assert stored(lake) == {
        (None, str(-(2**63))): {
            "id": -(2**63),
            "s": RECORD["s"],
            "f": 0.1,
            "ok": True,
            "at": "2013-07-01T05:00:00.250000Z",
            "day": "2013-07-01",
            "price": "1234567890.0123456789",
            "raw": "AP8=",
            "small": -7,
        },
        (None, "2"): {"id": 2},
    }


def test_the_first_key_columns_may_be_the_family_and_the_rest_is_the_key(lake: Lake) -> None:
    columns = {
        "origin": "string",
        "day": "date",
        "price": "decimal(6,2)",
        "number": "int",
        "n": "bigint",
    }
    key = ["origin", "day", "price", "number"]
    one, several = (
        rows(lake, key, columns=columns, family="origin", table="one"),
        rows(lake, key, columns=columns, family=["origin", "day", "price"], table="several"),
    )
    keys: list[Any] = [
        ("LHR", date(2013, 7, 1), Decimal("12.5"), 7),
        ("LHR", date(2013, 7, 1), Decimal("-0.0"), -1),
    ]
    for function in (one, several):
        send(function, Operation(OperationKind.PUT, RowEntries(keys, [{"n": 1}, {"n": 2}])))
        assert numbers(function, *keys) == [1, 2]
        # an equal key
        assert numbers(function, ("LHR", date(2013, 7, 1), Decimal("12.500"), 7)) == [1]
    assert list(stored(lake, "one")) == [
        ("LHR", '["2013-07-01","0.00",-1]'),
        ("LHR", '["2013-07-01","12.50",7]'),
    ]
    assert set(stored(lake, "several")) == {
        ('["LHR","2013-07-01","0.00"]', "-1"),
        ('["LHR","2013-07-01","12.50"]', "7"),
    }


def test_a_record_whose_family_would_be_empty_has_none_and_is_matched_by_its_key_alone(
    lake: Lake,
) -> None:
    columns = {"site": "string", "machine": "string", "n": "bigint"}
    function = rows(lake, ["site", "machine"], columns=columns, family="site")
    keys: list[Any] = [("", "m"), ("", ""), ("\0", "m"), ("m", "m"), ("m", "")]
    send(
        function,
        Operation(OperationKind.PUT, RowEntries(keys, [{"n": place} for place in range(5)])),
    )
    assert numbers(function, *keys) == [0, 1, 2, 3, 4]
    assert set(stored(lake)) == {(None, "m"), (None, ""), ("\0", "m"), ("m", "m"), ("m", "")}
    send(function, Operation(OperationKind.DELETE, RowEntries(keys[:1])))
    assert numbers(function, *keys) == [None, 1, 2, 3, 4]


def test_writers_at_once_lose_no_increment(lake: Lake) -> None:
    function, keys = rows(lake), ["a", "b", "c"]
    send(function, putting({"a": {"n": 100}}))

    def work() -> None:
        own = pickle.loads(pickle.dumps(function))
        for outcomes in send(own, *[adding(keys) for _ in range(25)]):
            assert not outcomes.problems

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers(function, *keys) == [200, 100, 100]


@pytest.mark.long
def test_eight_processes_that_write_one_table_lose_nothing(lake: Lake) -> None:
    hammer.check(*hammer.run_all(rows(lake, columns=hammer.columns())))


def test_a_key_that_others_keep_changing_holds_up_no_other_key() -> None:
    function, backend = scripted()
    keys = ["hot", *(f"k{n}" for n in range(9))]
    send(function, adding(keys))
    (segment,) = backend.stored.values()
    hot = next(key for key in segment if key.endswith(b"hot"))
    before, races = backend.matched, iter(range(5))

    def matched(kind: str, partition: int, keys: int) -> Lose | None:
        if kind == "apply" and next(races, None) is not None:  # somebody else is faster
            segment[hot] = segment[hot]._replace(version=bytes([*range(15), len(backend.asked)]))
        return before(kind, partition, keys)

    backend.matched, backend.asked = matched, []  # type: ignore[method-assign]
    (outcomes,) = send(function, adding(keys))
    assert not outcomes.problems
    assert numbers(function, *keys) == [2] * 10
    written = [keys for kind, _, keys, _ in backend.asked if kind == "apply"]
    assert written[:3] == [10, 9, 1]  # all together, then the others without it
    assert set(written[2:]) == {1}


@pytest.mark.parametrize("after", [True, False], ids=["applied", "never applied"])
def test_a_lost_reply_is_settled_and_an_increment_done_once(after: bool) -> None:
    function, backend = scripted()
    send(function, putting({"a": {"n": 1}}))
    backend.script = [
        None,
        Lose(ReplyLostError("a cable"), after=after),
        Lose(ReplyLostError("a cable"), after=False),
    ]
    (outcomes,) = send(function, adding(["a"]))
    assert not outcomes.problems
    assert numbers(function, "a") == [2]


def test_what_is_unknown_and_what_did_nothing_are_distinguished() -> None:
    function, backend = scripted(horizon=0.2)
    send(function, putting({"a": {"n": 1}}))
    backend.script, backend.repeat = [None], Lose(ReplyLostError("a cable"), after=True)
    (outcomes,) = send(function, adding(["a"]))
    assert outcomes.problems[0].state is State.UNKNOWN
    assert isinstance(outcomes.problems[0].error, OutcomeUnknownError)
    backend.repeat = TableUnavailableError("closed", "Wait.")
    for operation in (
        adding(["a", "b"]),
        putting({"a": {"n": 7}}),
        Operation(OperationKind.GET, RowEntries(["a"])),
    ):
        (outcomes,) = send(function, operation)
        assert {problem.state for problem in outcomes.problems.values()} == {State.FAILED}
        assert len(outcomes.problems) == len(operation)


def test_entries_that_the_table_does_not_take_are_refused_by_themselves(lake: Lake) -> None:
    backend = ScriptedSegments(limits=SegmentLimits(key=20, value=200, changes=3, request=400))
    function = rows(open_lake("memory://refusing"), stored_in=backend, partitions=1)
    records = {f"k{n}": {"n": n} for n in range(8)} | {
        "k" * 21: {"n": 1},
        "large": {"text": "x" * 300},
    }
    (outcomes,) = send(function, putting(records))
    assert {place: type(problem.error) for place, problem in outcomes.problems.items()} == {
        8: KeyTooLongError,
        9: ValueTooLongError,
    }
    assert all(map(is_record_rejected, outcomes.problems.values()))
    assert numbers(function, *[f"k{n}" for n in range(8)]) == list(range(8))
    assert [keys for kind, _, keys, _ in backend.asked if kind == "apply"] == [3, 3, 2]
    (got,) = send(function, Operation(OperationKind.GET, RowEntries(["k1", "k" * 21])))
    assert not got.problems  # no record can have that key
    assert got.records is not None
    assert [record and record["n"] for record in got.records] == [1, None]


def test_what_is_no_record_is_reported_and_holds_up_no_other(lake: Lake) -> None:
    function = rows(lake)
    send(function, putting({"a": {"n": 1}}))
    table: KeyValueTable[str, str] = KeyValueTableManager(lake).open(
        "app", "records", key=TextSerializer(), value=TextSerializer()
    )
    asyncio.run(table.put("text", "no JSON"))
    asyncio.run(table.put("list", "[]"))
    asyncio.run(table.put("deep", "[" * 100_000 + "]" * 100_000))
    asyncio.run(table.put("day", '{"id": "day", "n": {"x": 1}}'))
    (got,) = send(function, Operation(OperationKind.GET, RowEntries(["text", "a", "list", "deep"])))
    assert set(got.problems) == {0, 2, 3}
    assert all(isinstance(problem.error, SchemaMismatchError) for problem in got.problems.values())
    (updated,) = send(function, adding(["text", "a", "day"]))
    assert set(updated.problems) == {0, 2}
    (replaced,) = send(function, putting({"text": {"n": 5}}))
    assert not replaced.problems
    assert numbers(function, "a", "text") == [2, 5]
    assert asyncio.run(function.forget(-1)) == 0
    for other in (
        '{"adjunct_at": "1"',
        '{"adjunct_at": "1"}',
        '["adjunct_at"]',
        '"adjunct_at"',
        "5",
    ):
        asyncio.run(table.put("other", other))
        assert asyncio.run(function.forget(-1)) == 0


def test_columns_of_others_are_left_alone_by_updates(lake: Lake) -> None:
    later = rows(lake, columns={**COLUMNS, "added": "array<date>"})
    send(
        later,
        Operation(
            OperationKind.PUT, RowEntries(["a"], [{"n": 1, "added": [date(2013, 7, 1), None]}])
        ),
    )
    send(rows(lake), adding(["a"]))
    assert stored(lake)[(None, "a")] == {"id": "a", "n": 2, "added": ["2013-07-01", None]}


def test_a_deleted_record_leaves_its_marks_until_they_are_forgotten(lake: Lake) -> None:
    function = rows(lake)
    deleting = Operation(
        OperationKind.DELETE,
        RowEntries(["a"], marks=[Mark("s.0", position_of(0, 5))]),
        conditions=ONCE,
    )
    again = adding(["a", "b"], ONCE, offset=4)
    first, _, late = send(function, adding(["a", "b"], ONCE, offset=4), deleting, again)
    assert not first.problems
    assert late.places(State.SKIPPED) == [0, 1]
    assert numbers(function, "a", "b") == [None, 1]
    assert stored(lake)[(None, "a")].keys() == {"adjunct_deleted", "adjunct_applied", "adjunct_at"}
    # Direct writes come and go over the marks, which stay.
    marked = Conditions(keeps_marks=True)
    send(function, Operation(OperationKind.PUT, RowEntries(["a"], [{"n": 7}]), conditions=marked))
    send(function, Operation(OperationKind.DELETE, RowEntries(["a"]), conditions=marked))
    assert send(function, again)[0].places(State.SKIPPED) == [0, 1]

    assert asyncio.run(function.forget(3600)) == 0
    assert asyncio.run(function.forget(-1)) == 2
    assert stored(lake) == {(None, "b"): {"id": "b", "n": 1}}
    assert not send(function, again)[0].problems
    assert numbers(function, "a", "b") == [1, 2]


@pytest.mark.parametrize("named", [False, True], ids=["where the lake keeps them", "in a file"])
def test_it_travels_and_is_described_without_connections_or_secrets(
    lake: Lake, tmp_path: Path, named: bool
) -> None:
    backend = SqliteSegments(tmp_path / "tables.sqlite") if named else None
    function = rows(lake, key=["id", "n"], family="id", stored_in=backend)
    send(function, Operation(OperationKind.PUT, RowEntries([("a", 1)], [{"text": "x"}])))
    described = json.loads(json.dumps(describe_function(function)))
    assert described["backend"] == "key-value"
    for other in (pickle.loads(pickle.dumps(function)), function_from_description(described)):
        assert isinstance(other, KeyValueRows)
        assert other.to_dict() == function.to_dict()
        (got,) = send(other, Operation(OperationKind.GET, RowEntries([("a", 1)])))
        assert got.records == [{"id": "a", "n": 1, "text": "x"}]


def test_a_relative_lake_travels_as_an_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert pickle.loads(pickle.dumps(rows("here"))).lake == str(tmp_path / "here")


def test_a_table_that_was_created_again_is_found_and_a_sealed_one_rejects_writes(
    lake: Lake,
) -> None:
    function, manager = rows(lake), KeyValueTableManager(lake)

    async def through_all() -> list[Any]:
        await function.open()
        await function.send(putting({"a": {"n": 1}}))
        manager.delete("app", "records")
        refused = await function.send(putting({"a": {"n": 2}}))
        again = await function.send(Operation(OperationKind.GET, RowEntries(["a"])))
        assert not (await function.send(putting({"b": {"n": 2}}))).problems
        manager.seal("app", "records")
        sealed = await function.send(putting({"a": {"n": 3}}))
        return [refused.problems[0], again.records, sealed.problems[0]]

    refused, again, sealed = asyncio.run(through_all())
    assert isinstance(refused.error, KeyValueTableNotFoundError)
    assert again == [None]
    assert isinstance(sealed.error, KeyValueTableSealedError)
    assert not is_record_rejected(refused)
    assert not is_record_rejected(sealed)


def test_a_table_that_has_got_limits_since_is_opened_as_it_is(lake: Lake) -> None:
    send(rows(lake), putting({"a": {"n": 1}}))
    KeyValueTableManager(lake).update(
        "app", "records", KeyValueTableConfiguration(2, longest_value=20)
    )
    (put,) = send(rows(lake), putting({"b": {"text": "x" * 20}}))
    assert isinstance(put.problems[0].error, ValueTooLongError)
    (put,) = send(rows(lake, partitions=3), putting({"b": {"n": 1}}))
    assert isinstance(put.problems[0].error, KeyValueTableExistsError)


def test_reading_makes_neither_a_lake_nor_a_table_nor_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    function = rows("lake")
    monkeypatch.chdir("/")
    with blocking(function) as table:
        assert (table.get("a"), list(tmp_path.iterdir())) == (None, [])
        table.put("a", {"n": 1})
        assert table.get("a")["n"] == 1
    assert {path.name for path in tmp_path.iterdir()} >= {"lake", "lake.key-values.sqlite"}


def test_without_create_a_missing_table_is_an_error(lake: Lake) -> None:
    lake.store.put("x", b"")  # there is a lake
    with blocking(rows(lake, create=False)) as table, pytest.raises(ScopeNotFoundError) as caught:
        table.get("a")
    assert caught.value.scope == "app"


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"family": "n"}, "family"),
        ({"family": ["id"]}, "family"),
        ({"columns": {"id": "double"}}, "id"),
        ({"columns": {"id": "decimal"}}, "id"),
        ({"columns": {**COLUMNS, "adjunct_at": "int"}}, "adjunct_at"),
        ({"partitions": 0}, "partitions"),
        ({"key": "missing"}, "missing"),
    ],
)
def test_what_can_not_work_is_refused_when_it_is_declared(
    settings: dict[str, Any], names: str
) -> None:
    with pytest.raises((ConfigurationError, SchemaMismatchError), match=names):
        rows("memory://never", **settings)


def test_a_table_of_another_number_of_partitions_is_refused_by_reads_too(lake: Lake) -> None:
    with blocking(rows(lake)) as table:
        table.put("a", {"n": 1})
    with blocking(rows(lake, partitions=3)) as table:
        for call in (lambda: table.get("a"), lambda: table.put("a", {"n": 2})):
            with pytest.raises(KeyValueTableExistsError):
                call()
