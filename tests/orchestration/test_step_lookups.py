"""Lookup joins on a few records: what they leave, what the table is asked, and what a batch that
is run again meets.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.assets.reading.dataset import DatasetTable
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.errors import SchemaMismatchError, TransientError
from dagster_adjunct.resources.objects.arrow_files import read_sealed_table, write_sealed_table
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.table_backends.http import HttpTable
from dagster_adjunct.resources.tables.cache import Cache
from dagster_adjunct.resources.tables.functions import TableReadFunction
from dagster_adjunct.resources.tables.rate import RateLimit
from dagster_adjunct.resources.tables.retry import RetryPolicy
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.faulty_store import Fault, FaultyStore
from tests.orchestration.asked_table import AskedTable
from tests.orchestration.step_world import StepWorld
from tests.servers.http_records import running_service

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("either_engine")]

COLUMNS = {"plane": "string", "seats": "int", "model": "text"}
PLANES = {
    "n1": {"plane": "n1", "seats": 100, "model": "A"},
    "n2": {"plane": "n2", "seats": 200, "model": None},
    "n3": {"plane": "n3", "seats": 300, "model": "C"},
}
FLIGHTS = [
    ("f1", "n1"),
    ("f2", "n2"),
    ("f3", "n1"),
    ("f4", "gone"),
    ("f5", None),
    ("f6", "n2"),
    ("f7", "n1"),
]


def table(function: TableReadFunction[Any, Any], **more: Any) -> RemoteTable[Any, Any, Any]:
    return RemoteTable("planes", key="plane", read_function=function, **more)


def application(world: StepWorld, planes: RemoteTable[Any, Any, Any], **join: Any) -> Application:
    app = Application("app")
    out = app.output_stream("lake.out", partitions=2, key="k")
    app.input_stream("lake.flights").join(app.table(planes), on="plane", **join).send_to(out)
    return app


def flights(world: StepWorld, *rows: tuple[Any, ...]) -> None:
    if not world.sequences.get("flights"):
        world.stream("flights", "k", 2, k="string", plane="string")
    world.send("flights", *rows)


def out(world: StepWorld) -> list[dict[str, Any]]:
    return sorted(world.rows("out"), key=lambda row: row["k"])


def joined(rows: list[tuple[str, str | None]], how: str) -> list[dict[str, Any]]:
    """What a lookup join leaves, in plain Python."""
    records = []
    for k, plane in rows:
        record: dict[str, Any] | None = PLANES.get(plane) if plane is not None else None
        if record is not None or how == "left":
            record = record or {}
            records.append(
                {"k": k, "plane": plane, "seats": record.get("seats"), "model": record.get("model")}
            )
    return sorted(records, key=lambda row: row["k"])


@pytest.mark.parametrize("how", [pytest.param("inner", marks=pytest.mark.long), "left"])
def test_records_meet_what_the_table_has_of_their_key_and_each_key_is_asked_once(
    step_world: StepWorld, how: str
) -> None:
    flights(step_world, *FLIGHTS)
    function = AskedTable(PLANES, COLUMNS)
    report = step_world.run(application(step_world, table(function), how=how))
    assert out(step_world) == joined(FLIGHTS, how)
    assert sorted(function.keys_asked) == ["gone", "n1", "n2"]
    assert len(function.asked) == 1
    assert report.counters["join-2-planes"] == {"rows": 7, "unmatched": 2}
    measured = report.measured["planes"]
    assert (measured.records.reads, measured.records.found, measured.store.requests) == (3, 2, 1)
    assert measured.attempts.read_seconds.count == 1


def test_answers_are_kept_over_batches_as_the_tables_cache_says(step_world: StepWorld) -> None:
    flights(step_world, ("f1", "n1"), ("f2", "n2"))
    function = AskedTable(PLANES, COLUMNS)
    app = Application("app", max_batch_records=2)
    sink = app.output_stream("lake.out", partitions=2, key="k")
    planes = app.table(table(function, cache=Cache(size=10)))
    app.input_stream("lake.flights").join(planes, on="plane", how="left").send_to(sink)
    flights(step_world, ("f3", "n2"), ("f4", "n3"))
    report = step_world.run(app)
    assert report.batches == 2
    assert sorted(function.keys_asked) == ["n1", "n2", "n3"]
    measured = report.measured["planes"]
    assert (measured.records.reads, measured.cache.hits, measured.cache.misses) == (4, 1, 3)
    assert [row["seats"] for row in out(step_world)] == [100, 200, 200, 300]


def test_a_batch_that_is_run_again_meets_the_answers_that_were_recorded_first(
    step_world: StepWorld,
) -> None:
    """Wherever it died: before its output had anything, and then before it was closed."""
    flights(step_world, *FLIGHTS)
    app = application(step_world, table(AskedTable(PLANES, COLUMNS)), how="left")
    step_world.killed_at(app, Fault("put_if_absent", 1, "crash-before", below="streams/out/"))
    later = AskedTable({"n1": {"seats": 1, "model": "later"}}, COLUMNS)
    step_world.killed_when(application(step_world, table(later), how="left"), "outputs")
    step_world.run(application(step_world, table(later), how="left"))
    assert out(step_world) == joined(FLIGHTS, "left")
    assert later.asked == []
    assert list(step_world.lake.store.list("applications/app/answers/")) == []


def test_what_was_not_recorded_is_asked_again(step_world: StepWorld) -> None:
    flights(step_world, *FLIGHTS)
    app = application(step_world, table(AskedTable({}, COLUMNS)), how="left")
    step_world.killed_at(
        app, Fault("put_if_absent", 1, "crash-before", below="applications/app/answers/")
    )
    step_world.run(application(step_world, table(AskedTable(PLANES, COLUMNS)), how="left"))
    assert out(step_world) == joined(FLIGHTS, "left")


class AnotherRun(FaultyStore):
    """A store in which another run of the batch, which had n1 alone to ask, has recorded its
    answer just before.
    """

    def put_if_absent(self, key: str, data: bytes) -> str:
        if key.startswith("applications/app/answers/1/") and not list(
            self.inner.list("applications/app/answers/")
        ):
            answers = read_sealed_table(data)
            asked = next(row for row in answers.to_pylist() if row["__key_0"] == "n1")
            others = pa.Table.from_pylist(
                [asked | {"0:seats": 9, "1:model": "other"}], schema=answers.schema
            )
            self.inner.put_if_absent(key, write_sealed_table(others))
        return super().put_if_absent(key, data)


def test_of_two_runs_of_a_batch_the_first_that_records_decides_for_both(
    step_world: StepWorld,
) -> None:
    flights(step_world, *FLIGHTS)
    function = AskedTable(PLANES, COLUMNS)
    raced = replace(step_world, lake=Lake(AnotherRun(step_world.lake.store), step_world.lake.id))
    report = raced.run(application(step_world, table(function), how="left"))
    assert [sorted(request) for request in function.asked] == [["gone", "n1", "n2"], ["gone", "n2"]]
    assert report.measured["planes"].records.reads == 5
    seats = {row["plane"]: (row["seats"], row["model"]) for row in out(step_world)}
    assert seats == {
        "n1": (9, "other"),
        "n2": (200, None),
        "gone": (None, None),
        None: (None, None),
    }


def test_a_table_that_is_not_well_is_asked_again_and_then_fails_the_batch_by_name(
    step_world: StepWorld,
) -> None:
    flights(step_world, *FLIGHTS)
    function = AskedTable(PLANES, COLUMNS)
    function.problems = [TransientError("busy.", ""), TransientError("busy.", "")]
    retry = RetryPolicy(attempts=3, first_wait=0.001)
    report = step_world.run(application(step_world, table(function, retry=retry), how="left"))
    assert report.measured["planes"].store.retries == 2
    assert out(step_world) == joined(FLIGHTS, "left")
    flights(step_world, ("f8", "n1"))
    function.problems = [TransientError("busy.", "") for _ in range(9)]
    with pytest.raises(TransientError, match=r"table planes: get of key 'n1' failed: busy"):
        step_world.run(application(step_world, table(function, retry=retry), how="left"))
    function.problems = []
    step_world.run(application(step_world, table(function, retry=retry), how="left"))
    assert len(out(step_world)) == 8


def test_a_value_of_another_type_fails_the_batch_and_names_key_and_column(
    step_world: StepWorld,
) -> None:
    flights(step_world, ("f1", "n1"), ("f2", "n2"))
    function = AskedTable({"n1": {"seats": 1}, "n2": {"seats": "many"}}, None)
    app = application(step_world, table(function), select={"seats as places": "int"})
    with pytest.raises(
        SchemaMismatchError,
        match=r"table planes: the record of key 'n2' has 'many' \(str\) in 'seats'",
    ):
        step_world.run(app)
    function.records["n2"] = {}
    step_world.run(app)
    assert [row["places"] for row in out(step_world)] == [1, None]


@pytest.mark.one_engine
def test_a_service_and_a_dataset_are_looked_up_in_as_other_tables(step_world: StepWorld) -> None:
    flights(step_world, *FLIGHTS, ("f8", "a/b"))
    step_world.stream("makers", "plane", 2, plane="string", maker="string")
    step_world.send("makers", ("n1", "Airbus"), ("a/b", "Boeing"), version="v1")
    step_world.advance(bounded_dataset("makers", input="lake.makers", key="plane", partitions=2))
    app = Application("app")
    with running_service() as service:
        service.records = {"/n2": {"seats": 200, "tags": ["x", 1]}, "/a%2Fb": {"seats": 7}}
        read = HttpTable(service.url, path="/{plane}", key="plane")
        stored: RemoteTable[Any, Any, Any] = RemoteTable(
            "stored", key="plane", read_function=DatasetTable(step_world.lake, "makers")
        )
        (
            app.input_stream("lake.flights")
            .join(
                app.table(table(read)),
                on="plane",
                how="left",
                select={"seats": "int", "tags": "string"},
            )
            .join(app.table(stored), on="plane", how="left", select={"maker": "string"})
            .send_to(app.output_stream("lake.out", partitions=2, key="k"))
        )
        step_world.run(app)
        assert sorted(path for _, path, _ in service.seen) == ["/a%2Fb", "/gone", "/n1", "/n2"]
    by_plane = {row["plane"]: (row["seats"], row["tags"], row["maker"]) for row in out(step_world)}
    assert by_plane == {
        "n1": (None, None, "Airbus"),
        "n2": (200, '["x", 1]', None),
        "gone": (None, None, None),
        None: (None, None, None),
        "a/b": (7, None, "Boeing"),
    }


def test_records_can_be_spread_by_what_was_looked_up(step_world: StepWorld) -> None:
    flights(step_world, *FLIGHTS)
    app = Application("app")
    stream = app.input_stream("lake.flights").join(
        app.table(table(AskedTable(PLANES, COLUMNS))), on="plane"
    )
    stream.partition_by("seats", partitions=2).send_to(
        app.output_stream("lake.out", partitions=2, key="seats")
    )
    step_world.run(app)
    assert out(step_world) == joined(FLIGHTS, "inner")


@pytest.mark.parametrize("either_engine", ["spark"], indirect=True)
@pytest.mark.parametrize("keys_a_task", [2, pytest.param(5_000, marks=pytest.mark.long)])
def test_a_store_is_asked_in_tasks_where_there_are_many_keys_and_under_its_rate(
    step_world: StepWorld, monkeypatch: pytest.MonkeyPatch, keys_a_task: int
) -> None:
    monkeypatch.setattr("dagster_adjunct.resources.tables.spark.MIN_KEYS_PER_TASK", keys_a_task)
    things = step_world.table()
    with BlockingTable(things) as blocking:
        blocking.put_all([(f"n{i}", {"k": f"n{i}", "v": i, "w": None}) for i in range(5)])
    things.rate_limit = RateLimit(reads_per_second=2_000)
    flights(step_world, *[(f"f{i}", f"n{i % 8}") for i in range(20)])
    app = Application("app")
    stream = app.input_stream("lake.flights").join(
        app.table(things), on={"plane": "k"}, how="left", select=["v"]
    )
    stream.send_to(app.output_stream("lake.out", partitions=2, key="k"))
    report = step_world.run(app)
    expected = {f"f{i}": i % 8 if i % 8 < 5 else None for i in range(20)}
    assert {row["k"]: row["v"] for row in out(step_world)} == expected
    measured = report.measured["things"]
    assert (measured.records.reads, measured.records.found) == (8, 5)
    assert measured.store.requests == (2 if keys_a_task == 2 else 1)
    assert report.counters["join-2-things"] == {
        "rows": 20,
        "unmatched": sum(v is None for v in expected.values()),
    }


def test_a_time_without_a_zone_from_a_tables_function_is_refused_with_its_key(
    step_world: StepWorld,
) -> None:
    flights(step_world, ("f1", "n1"))
    columns = {"plane": "string", "seen": "timestamp"}
    function = AskedTable({"n1": {"plane": "n1", "seen": datetime(2026, 1, 1, 12)}}, columns)
    with pytest.raises(SchemaMismatchError) as caught:
        step_world.run(application(step_world, table(function)))
    assert caught.value.column == "seen"
    assert "'n1'" in caught.value.problem
    function.records["n1"]["seen"] = datetime(2026, 1, 1, 12, tzinfo=UTC)
    step_world.run(application(step_world, table(function)))
    assert [row["seen"] for row in out(step_world)] == [datetime(2026, 1, 1, 12, tzinfo=UTC)]


def test_a_key_to_look_up_that_python_does_not_have_is_reported_by_its_column(
    step_world: StepWorld,
) -> None:
    flights(step_world, ("f1", "n1"))
    app = Application("app")
    planes = app.table(table(AskedTable(PLANES, COLUMNS)))
    bad = app.input_stream("lake.flights").map("k", "cast(unhex('ff') as string) as plane")
    bad.join(planes, on="plane").send_to(app.output_stream("lake.out", partitions=2, key="k"))
    with pytest.raises(SchemaMismatchError) as caught:
        step_world.run(app)
    assert (caught.value.table, caught.value.column) == ("planes", "plane")
