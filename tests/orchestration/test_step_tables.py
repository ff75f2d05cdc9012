"""What a step does to remote tables: puts, deletes, updates, and what it refuses."""

from __future__ import annotations

import json
import math
import re
import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.table_updates import update_message
from dagster_adjunct.resources.errors import (
    AdjunctError,
    NullKeyError,
    PlanningError,
    RecordNotFoundError,
    SchemaMismatchError,
    TableError,
)
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.operation import (
    Operation,
    Outcomes,
    RowEntries,
    UpdateContract,
)
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.orchestration.asked_table import NotedTable
from tests.orchestration.step_world import StepWorld

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("either_engine")]


def changes(world: StepWorld) -> None:
    world.stream("changes", "k", 2, k="string", v="int")


def updating(
    world: StepWorld, contract: UpdateContract, *, default: bool, on_null_key: str = "fail"
) -> Application:
    app = Application("app")
    message = update_message(key="k", update=["v"], default={"w": "v * 100"} if default else None)
    app.input_stream("lake.changes").map(*message).send_to(
        app.table(world.table()),
        contract,
        on_null_key=on_null_key,  # type: ignore[arg-type]
    )
    return app


def test_without_a_contract_records_are_put_and_tombstones_delete_in_their_order(
    step_world: StepWorld,
) -> None:
    changes(step_world)
    step_world.send(
        "changes", ("a", 1), ("b", 2), ("c", 3), ("a", 4), deleted=[("b", None), ("c", None)]
    )
    step_world.send("changes", ("c", 5))
    app = Application("app")
    app.input_stream("lake.changes").map("k", "v", "v + 1 as w").send_to(
        app.table(step_world.table())
    )
    counters = step_world.run(app).counters["things"]
    assert step_world.records() == {"a": (4, 5), "c": (5, 6)}
    assert (counters["writes"], counters["deletes"]) == (5, 2)


def test_the_first_default_is_put_once_and_every_update_is_applied_in_source_order(
    step_world: StepWorld,
) -> None:
    changes(step_world)
    step_world.send("changes", *[(f"k{i % 5}", i) for i in range(200)])
    report = step_world.run(updating(step_world, UpdateContract.UPDATE_WITH_DEFAULTS, default=True))
    assert step_world.records() == {f"k{i}": (195 + i, i * 100) for i in range(5)}
    counters = report.counters["things"]
    assert (counters["updates"], counters["defaults_put"], counters["null_keys"]) == (200, 5, 0)


def test_an_update_of_a_missing_record_fails_clearly_and_leaves_the_batch_open(
    step_world: StepWorld,
) -> None:
    changes(step_world)
    step_world.send("changes", ("a", 1))
    app = updating(step_world, UpdateContract.UPDATE_ONLY, default=False)
    with pytest.raises(RecordNotFoundError) as caught:
        step_world.run(app)
    assert (caught.value.table, caught.value.keys) == ("things", ("a",))
    state = step_world.state(app)
    assert state.batch == 0
    assert state.open is not None
    # Whoever puts the record lets the same batch through.
    put = Application("put")
    step_world.stream("puts", "k", 1, k="string", v="int", w="int")
    step_world.send("puts", ("a", 0, 7))
    put.input_stream("lake.puts").send_to(put.table(step_world.table()))
    step_world.run(put)
    step_world.run(app, run="run-2")
    assert step_world.records() == {"a": (1, 7)}
    assert step_world.state(app).open is None


def test_a_null_key_fails_the_batch_or_is_counted_and_skipped(step_world: StepWorld) -> None:
    changes(step_world)
    step_world.send("changes", (None, 1), ("a", 2), (None, 3))
    app = updating(step_world, UpdateContract.UPDATE_WITH_DEFAULTS, default=True)
    with pytest.raises(
        NullKeyError,
        match=(
            r"have no k, the key of table things; the first is lake\.changes\.\d at offset"
            r" \d.*on_null_key"
        ),
    ):
        step_world.run(app)
    assert step_world.state(app).batch == 0
    patient = updating(
        step_world, UpdateContract.UPDATE_WITH_DEFAULTS, default=True, on_null_key="skip"
    )
    counters = step_world.run(patient).counters["things"]
    assert (counters["null_keys"], counters["updates"]) == (2, 1)
    assert step_world.records() == {"a": (2, 200)}


def test_a_tombstone_deletes_under_every_contract(step_world: StepWorld) -> None:
    changes(step_world)
    step_world.send("changes", ("a", 1), ("b", 2), deleted=[("b", None), ("c", None)])
    step_world.send("changes", ("b", 3), deleted=[("a", None)])
    app = updating(step_world, UpdateContract.UPDATE_WITH_DEFAULTS, default=True)
    counters = step_world.run(app).counters["things"]
    assert step_world.records() == {"b": (3, 300)}
    assert (counters["updates"], counters["deletes"]) == (3, 3)


def test_an_empty_default_is_a_plain_upsert(step_world: StepWorld) -> None:
    changes(step_world)
    step_world.send("changes", ("a", 1), ("b", 2), ("a", 3))
    app = Application("app")
    message = update_message(key="k", update=["v"], default=[])
    app.input_stream("lake.changes").map(*message).send_to(
        app.table(step_world.table()), UpdateContract.UPDATE_WITH_DEFAULTS
    )
    step_world.run(app)
    assert step_world.records() == {"a": (3, None), "b": (2, None)}


def test_alternating_puts_and_deletes_are_few_requests_and_end_as_in_their_order(
    step_world: StepWorld,
) -> None:
    step_world.stream("changes", "k", 1, k="string", v="int")
    expected: dict[str, tuple[int, int | None]] = {}
    for number in range(6):
        step_world.send(
            "changes", (f"k{number % 3}", number), deleted=[(f"k{(number + 1) % 3}", None)]
        )
        expected[f"k{number % 3}"] = (number, None)
        expected.pop(f"k{(number + 1) % 3}", None)
    app = Application("app")
    app.input_stream("lake.changes").map("k", "v", "cast(null as int) as w").send_to(
        app.table(step_world.table())
    )
    counters = step_world.run(app).counters["things"]
    assert step_world.records() == expected
    assert (counters["writes"], counters["deletes"]) == (6, 6)
    assert counters["requests"] <= 8  # twelve runs of one kind


def test_the_short_form_sets_adds_removes_and_begins_with_records_computed_once(
    step_world: StepWorld, tmp_path: Path
) -> None:
    changes(step_world)
    step_world.send("changes", ("a", 1), ("b", 5), ("a", 2), ("a", 4))
    log = tmp_path / "calls"
    log.touch()

    def doubled(frame: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        @F.udf("int")
        def twice(v: int) -> int:
            with log.open("a") as calls:
                calls.write("x")
            return 2 * v

        return frame.withColumn("twice", twice("v"))

    app = Application("app")
    out = app.output_stream("lake.out", partitions=2, key="k")
    table = app.table(step_world.table())
    sent = (
        app.input_stream("lake.changes")
        .map(doubled)
        .update(table, add={"w": "twice"}, if_missing={"v": "7"})
    )
    sent.send_to(out)
    step_world.run(app)
    assert step_world.records() == {"a": (7, 14), "b": (7, 10)}
    assert sorted((row["k"], row["v"], row["twice"]) for row in step_world.rows("out")) == [
        ("a", 1, 2), ("a", 2, 4), ("a", 4, 8), ("b", 5, 10)
    ]  # fmt: skip
    assert len(log.read_text()) == 4
    removing = Application("removing")
    step_world.stream("gone", "k", 1, k="string")
    step_world.send("gone", ("a",))
    removing.input_stream("lake.gone").update(removing.table(step_world.table()), remove=["v"])
    step_world.run(removing)
    assert step_world.records()["a"] == (None, 14)


def test_two_sends_to_one_table_add_their_counters_and_a_subclass_arrives_as_itself(
    step_world: StepWorld,
) -> None:
    class Prefixed(RemoteTable[Any, Any, Any]):
        """Puts a letter before each key."""

        def __init__(self, letter: str, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self.letter, self._behind = letter, "-"

        async def send(self, operation: Operation[Any]) -> Outcomes:
            entries = operation.entries
            keys = [f"{self.letter}{self._behind}{key}" for key in entries.keys]
            return await super().send(
                operation.with_entries(RowEntries(keys, entries.values, entries.defaults))
            )

    changes(step_world)
    step_world.send("changes", ("a", 1), ("b", 2), ("c", 3))
    app = Application("app")
    store = step_world.table().write_function
    table = app.table(Prefixed("x", "things", key="k", write_function=store))
    stream = app.input_stream("lake.changes")
    stream.update(table, set=["v"], if_missing=[])
    stream.filter("v > 1").update(table, set={"w": "v * 10"}, if_missing=[])
    counters = step_world.run(app).counters["things"]
    assert counters["updates"] == 5
    assert step_world.records() == {"x-a": (1, None), "x-b": (2, 20), "x-c": (3, 30)}


def of_doubles(folder: Path) -> RemoteTable[Any, Any, Any]:
    store = SqliteTable(
        folder / "d.sqlite", "doubles", "k", columns={"k": "string", "v": "double"}, create=True
    )
    return RemoteTable("doubles", key="k", write_function=store)


def read_all(folder: Path) -> dict[str, float]:
    with sqlite3.connect(folder / "d.sqlite") as connection:
        return dict(connection.execute("SELECT k, v FROM doubles"))


def test_what_a_table_refuses_for_good_goes_to_the_dead_letters_up_to_a_bound(
    step_world: StepWorld,
) -> None:
    step_world.stream("changes", "k", 2, k="string", v="double")
    step_world.send("changes", ("a", 1.0), ("b", math.nan), ("c", 3.0), ("d", math.nan))
    table = of_doubles(step_world.folder)

    def sending(name: str, at_most: int, few: int = 0) -> Application:
        app = Application(name, few_records=few)  # with 0, each partition's task refuses one
        letters = app.output_stream("lake.letters", partitions=1)
        app.input_stream("lake.changes").send_to(
            app.table(table), dead_letters=letters, at_most=at_most
        )
        return app

    reported = []
    for few in (0, 100):
        with pytest.raises(
            TableError, match=r"rejects more than 1 records of this batch"
        ) as raised:
            step_world.run(sending("narrow", 1, few))
        reported.append((raised.value.problem, raised.value.facts))
    assert reported[0] == reported[1]
    assert "letters" not in step_world.streams.list_streams()
    app = sending("app", 2)
    counters = step_world.run(app).counters
    assert read_all(step_world.folder) == {"a": 1.0, "c": 3.0}
    assert (counters["doubles"]["dead_letters"], counters["lake.letters"]["rows"]) == (2, 2)
    step_world.again(app)
    assert len(step_world.rows("letters")) == 2
    letters = {row["key"]: row for row in step_world.rows("letters")}
    assert sorted(letters) == ['"b"', '"d"']
    assert json.loads(letters['"b"']["record"])["v"] == "nan", "JSON has no NaN"
    assert (letters['"b"']["kind"], letters['"b"']["table"]) == ("put", "doubles")
    assert "'v'" in letters['"b"']["problem"]
    with sqlite3.connect(step_world.folder / "d.sqlite") as connection:
        connection.execute(
            "CREATE TRIGGER t BEFORE INSERT ON doubles BEGIN SELECT RAISE(ABORT, 'closed'); END"
        )
    with pytest.raises(
        TableError, match=r"retried, and table doubles rejects 2 record\(s\) that are not among"
    ):
        step_world.again(sending("app", 9))


def test_a_letter_of_an_update_says_as_json_what_it_would_have_done_to_which_columns(
    step_world: StepWorld,
) -> None:
    step_world.stream("changes", "k", 1, k="string", v="int", at="timestamp")
    at = datetime(2026, 3, 1, tzinfo=UTC)
    step_world.send("changes", ("a", 1, at), ("b", 2, at))
    columns = {
        "k": "string",
        "n": "int",
        "seen": "timestamp",
        "all": "array<int>",
        "note": "string",
    }
    store = SqliteTable(
        step_world.folder / "u.sqlite", "updated", "k", columns=columns, create=True
    )
    app = Application("app")
    app.input_stream("lake.changes").update(
        app.table(RemoteTable("updated", key="k", write_function=store)),
        set={"seen": "at"},
        add={"n": "v"},
        append={"all": "v"},
        remove=["note"],
        dead_letters=app.output_stream("lake.letters", partitions=1),
        at_most=2,
    )
    step_world.run(app)
    letters = {row["key"]: row for row in step_world.rows("letters")}
    refused = {
        "set": {"seen": "2026-03-01T00:00:00Z"},
        "add": {"n": 2},
        "append": {"all": [2]},
        "remove": ["note"],
    }
    assert (letters['"b"']["kind"], json.loads(letters['"b"']["record"])) == ("update", refused)


UNREADABLE = {
    "timestamp_micros(n)": (253_402_300_800_000_000, "+10000-01-01 00:00:00"),
    "date_from_unix_date(cast(n as int))": (-719_163, "0000-12-31"),
    "case when n = 1 then cast(x'636166e9' as string) else 'ok' end": (1, "caf\\xe9"),
    "array(named_struct('at', timestamp_micros(n)))": (
        253_402_300_800_000_000,
        [{"at": "+10000-01-01 00:00:00"}],
    ),
}
"""Expressions over n that make a value that Python does not have, and how letters write it."""


def received(world: StepWorld) -> RemoteTable[Any, Any, Any]:
    """A table whose function writes what it gets into a file, a line for each key."""
    return RemoteTable("things", key="k", write_function=NotedTable(str(world.folder / "noted")))


@pytest.mark.parametrize(
    "expression",
    [pytest.param(text, marks=[pytest.mark.long] * (at % 2)) for at, text in enumerate(UNREADABLE)],
)
def test_a_record_without_a_python_form_is_a_dead_letter_and_others_are_written(
    step_world: StepWorld, expression: str
) -> None:
    number, displayed = UNREADABLE[expression]
    step_world.stream("changes", "k", 1, k="string", n="bigint")
    step_world.send("changes", ("a", 0), ("b", number), ("c", 0), deleted=[("d", number)])

    def sending(name: str, **letters: Any) -> Application:
        app = Application(name)
        if letters:
            letters["dead_letters"] = app.output_stream("lake.letters", partitions=1)
        table = app.table(received(step_world))
        app.input_stream("lake.changes").map("k", f"{expression} as made").send_to(table, **letters)
        return app

    with pytest.raises(SchemaMismatchError) as caught:
        step_world.run(sending("strict"))
    assert (caught.value.table, caught.value.column) == ("things", "made")
    assert "lake.changes.0 at offset 1" in str(caught.value)
    counters = step_world.run(sending("app", at_most=2)).counters
    assert (step_world.folder / "noted").read_text().split() == ["a", "c"]
    assert (counters["things"]["dead_letters"], counters["lake.letters"]["rows"]) == (2, 2)
    letters = {row["key"]: row for row in step_world.rows("letters")}
    assert (letters['"b"']["kind"], json.loads(letters['"b"']["record"])) == (
        "put",
        {"k": "b", "made": displayed},
    )
    assert (letters['"d"']["kind"], letters['"d"']["record"]) == ("delete", "null")
    # The column, or the path of the value inside it.
    assert re.match(r"column 'made(\[\S*|\.\S*)?' is ", letters['"b"']["problem"])
    with pytest.raises(TableError, match="rejects more than 1 records of this batch"):
        step_world.run(sending("narrow", at_most=1))


def test_an_update_or_a_key_that_python_can_not_hold_is_a_dead_letter(
    step_world: StepWorld,
) -> None:
    step_world.stream("changes", "k", 1, k="string", n="bigint")
    step_world.send("changes", ("a", 0), ("b", 253_402_300_800_000_000), ("c", 0))
    app = Application("app")
    letters = app.output_stream("lake.letters", partitions=1)
    app.input_stream("lake.changes").update(
        app.table(received(step_world)),
        set={"seen": "timestamp_micros(n)"},
        dead_letters=letters,
        at_most=2,
    )
    step_world.run(app)
    assert (step_world.folder / "noted").read_text().split() == ["a", "c"]
    (letter,) = step_world.rows("letters")
    assert (letter["kind"], letter["key"]) == ("update", '"b"')
    assert json.loads(letter["record"]) == {"set": {"seen": "+10000-01-01 00:00:00"}}

    keyed = Application("keyed")
    letters = keyed.output_stream("lake.keys", partitions=1)
    table = keyed.table(received(step_world))
    keyed.input_stream("lake.changes").map("timestamp_micros(n) as k").send_to(
        table, dead_letters=letters, at_most=2
    )
    step_world.run(keyed)
    assert [row["key"] for row in step_world.rows("keys")] == ['"+10000-01-01 00:00:00"']


def test_members_of_a_struct_go_into_an_object_of_json(step_world: StepWorld) -> None:
    step_world.stream("changes", "k", 1, k="string", v="int", w="int")
    step_world.send("changes", ("a", 1, None), ("a", 2, 3), ("b", 4, None))
    store = SqliteTable(
        step_world.folder / "j.sqlite",
        "j",
        "k",
        columns={"k": "string", "doc": "json"},
        create=True,
    )
    table = RemoteTable("j", key="k", read_function=store, write_function=store)
    app = Application("app")
    documents = app.table(table)
    first = app.input_stream("lake.changes").update(
        documents, add={"doc": "named_struct('v', v, 'of', named_struct('w', w))"}, if_missing=[]
    )
    first.update(documents, add={"doc": "case when w = 3 then named_struct('seen', true) end"})
    step_world.run(app)
    with BlockingTable(table) as blocking:
        kept = {key: record["doc"] for key, record in blocking.get_all(["a", "b"]).items()}
    assert kept == {"a": {"v": 2, "of": {"w": 3}, "seen": True}, "b": {"v": 4, "of": {"w": None}}}


def test_a_failure_names_the_first_keys_and_how_many_there_are(step_world: StepWorld) -> None:
    step_world.stream("changes", "k", 1, k="string", v="double")
    step_world.send(
        "changes", *[(f"k{number}", math.inf if number % 2 else 1.0) for number in range(20)]
    )
    app = Application("app")
    app.input_stream("lake.changes").send_to(app.table(of_doubles(step_world.folder)))
    with pytest.raises(
        AdjunctError, match=r"rejected 10 records, the first with the keys 'k1', 'k3', 'k5'"
    ):
        step_world.run(app)


def test_more_rejected_records_than_dead_letters_allow_fail_naming_the_limit(
    step_world: StepWorld,
) -> None:
    step_world.stream("changes", "k", 1, k="string", v="double")
    step_world.send("changes", *[(f"k{number % 3}", math.inf) for number in range(12)])
    app = Application("app")
    letters = app.output_stream("lake.letters", partitions=1)
    table = app.table(of_doubles(step_world.folder))
    app.input_stream("lake.changes").send_to(table, dead_letters=letters, at_most=4)
    with pytest.raises(AdjunctError) as reported:
        step_world.run(app)
    assert "rejects more than 4 records of this batch" in reported.value.problem
    assert 'the first have the keys "k0", "k1", "k2": ' in reported.value.problem
    assert reported.value.next_step.endswith("at_most=….")


@pytest.mark.parametrize(
    ("map", "update", "says"),
    [
        (["k", "concat(k, 'x') as v"], None, r"has the column 'v' as int, and string is sent"),
        (["k", "v", "v + 1 as x"], None, r"has no column 'x'; it has k, v, w"),
        (None, {"set": {"w": "concat(k, 'x')"}}, r"has the column 'w' as int, and string is sent"),
    ],
)
def test_columns_that_the_store_does_not_have_are_refused_before_a_batch_is_begun(
    step_world: StepWorld, map: Any, update: Any, says: str
) -> None:
    changes(step_world)
    step_world.send("changes", ("a", 1))
    with sqlite3.connect(step_world.folder / "read.sqlite") as connection:
        connection.execute("CREATE TABLE things (k TEXT PRIMARY KEY, v INT, w INT)")
    undeclared = SqliteTable(step_world.folder / "read.sqlite", "things", "k")
    app = Application("app")
    table = app.table(RemoteTable("things", key="k", write_function=undeclared))
    stream = app.input_stream("lake.changes")
    if update is None:
        stream.map(*map).send_to(table)
    else:
        stream.update(table, **update)
    with pytest.raises(PlanningError, match=says):
        step_world.run(app)
    assert step_world.state(app).open is None
