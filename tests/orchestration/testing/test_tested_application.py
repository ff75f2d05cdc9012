"""`TestApplication`: what a run does, on records in memory, compared with plain Python."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct import Application, Schema, bounded_dataset, unbounded_dataset
from dagster_adjunct.errors import ConfigurationError, PlanningError
from dagster_adjunct.exchange import IcebergTable
from dagster_adjunct.orchestration.testing import arrow_table, stream_schema
from dagster_adjunct.sources import FileSource
from dagster_adjunct.tables import PostgresTable, RemoteTable, TableWriteFunction
from dagster_adjunct.testing import TestApplication, TestStream
from dagster_adjunct.windows import Count, Tumbling

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VISIT = Schema.of(visitor="string", shop="string", spent="double")
STREAMS = {
    "lake.visits": TestStream(VISIT, key="visitor", partitions=2),
    "lake.members": TestStream(
        Schema.of(visitor="string", level="string"), key="visitor", partitions=2
    ),
    "lake.shops": TestStream(Schema.of(shop="string", city="string"), key="shop"),
}
VISITS = [
    {"visitor": visitor, "shop": shop, "spent": spent}
    for visitor, shop, spent in [
        ("ann", "n", 3.5),
        ("bob", "s", 1.0),
        ("eve", "n", 2.0),
        ("ann", "s", 0.0),
    ]
]


def postgres(name: str, key: str, **columns: str) -> RemoteTable[Any, Any, Any]:
    store = PostgresTable(
        name, key, connect={"host": "nowhere.invalid"}, columns={key: "string", **columns}
    )
    return RemoteTable(name, key=key, read_function=store, write_function=store)


def known_visits(**options: Any) -> Application:
    app = Application("visits", **options)
    members = bounded_dataset("members", input="lake.members", key="visitor", partitions=2)
    shops = unbounded_dataset("shops", input="lake.shops", key="shop", broadcast=True)
    (
        app.input_stream("lake.visits")
        .filter("spent > 0")
        .join(app.table(members), on="visitor", how="left", select=["level"])
        .join(app.table(shops), on="shop", how="inner")
        .send_to(app.output_stream("lake.known", partitions=2, key="visitor"))
        .update(
            app.table(postgres("spending", "visitor", total="double")),
            add={"total": "spent"},
            if_missing=[],
        )
    )
    return app


def by_visitor(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(records, key=lambda record: (record["visitor"], record["spent"]))


def test_an_application_runs_on_records_of_the_test_and_goes_on_from_run_to_run(
    spark: SparkSession,
) -> None:
    with TestApplication(known_visits(), STREAMS) as test:
        test.dataset("members", [{"visitor": "ann", "level": "gold"}])
        test.dataset("shops", [{"shop": "n", "city": "Oslo"}, {"shop": "s", "city": "Rome"}])
        test.table("spending", {"eve": {"total": 10.0}})
        test.input("lake.visits", VISITS)
        first = test.run(spark)
        assert by_visitor(first.output("lake.known")) == [
            {"visitor": "ann", "shop": "n", "spent": 3.5, "level": "gold", "city": "Oslo"},
            {"visitor": "bob", "shop": "s", "spent": 1.0, "level": None, "city": "Rome"},
            {"visitor": "eve", "shop": "n", "spent": 2.0, "level": None, "city": "Oslo"},
        ]
        assert {key: record["total"] for key, record in first.table("spending").items()} == {
            "ann": 3.5, "bob": 1.0, "eve": 12.0,
        }  # fmt: skip
        assert first.counters["join-3-members"]["unmatched"] == 2
        test.dataset("members", [{"visitor": "bob", "level": "new"}])
        test.dataset("shops", [{"shop": "s", "city": "Kyiv"}], deleted=[{"shop": "n"}])
        test.input(
            "lake.visits",
            [
                {"visitor": "bob", "shop": "s", "spent": 4.0},
                {"visitor": "ann", "shop": "n", "spent": 9.0},
            ],
        )
        second = test.run(spark)
        assert second.output("lake.known") == [
            {"visitor": "bob", "shop": "s", "spent": 4.0, "level": "new", "city": "Kyiv"}
        ]
        assert second.table("spending")["bob"]["total"] == 5.0
        assert len(test.output("lake.known")) == 4
        assert test.run(spark).report.step.batches == 0
        folder = test._folder
    assert not folder.exists()


def test_undescribed_streams_get_the_columns_of_their_first_records(spark: SparkSession) -> None:
    app = Application("small")
    source = FileSource("/no/such/folder", "jsonl", Schema.of(k="string", v="bigint"))
    entries = bounded_dataset("entries", input=source, key="k", broadcast=True)
    joined = app.input_stream("kafka.things").join(app.table(entries), on="k", how="left")
    joined.send_to(app.output_stream("kafka.out", partitions=1))
    with TestApplication(app) as test:
        test.dataset("entries", [{"k": "a", "v": 7}])
        test.input("kafka.things", [{"k": "a", "n": 1}, {"k": "b", "n": 2}])
        assert test.run(spark).output("kafka.out") == [
            {"k": "a", "n": 1, "v": 7},
            {"k": "b", "n": 2, "v": None},
        ]


def test_small_batches_are_counted_and_a_limit_is_kept(spark: SparkSession) -> None:
    app = Application("batches", max_batch_records=2)
    app.input_stream("lake.visits").send_to(
        app.output_stream("lake.out", partitions=2, key="visitor")
    )
    with TestApplication(app, STREAMS) as test:
        test.input("lake.visits", VISITS)
        assert test.run(spark, max_batches=1).report.step.batches == 1
        assert len(test.output("lake.out")) == 2
        test.run(spark)
        assert by_visitor(test.output("lake.out")) == by_visitor(VISITS)


@pytest.mark.parametrize(
    "reported_by",
    [
        "name",
        *(pytest.param(other, marks=pytest.mark.long) for other in ("marker", "date=%Y-%m-%d")),
    ],
)
def test_versions_are_dated_by_the_test_whatever_reports_it_in_production(
    spark: SparkSession, reported_by: str
) -> None:
    def day(number: int) -> datetime:
        return datetime(2026, 1, number, tzinfo=UTC)

    app = Application("flown")
    planes = bounded_dataset(
        "planes", input="lake.planes", key="tail", partitions=2, valid_from=reported_by
    )
    flights = app.input_stream("lake.flights")
    flown = flights.join(app.table(planes), on="tail", how="left", select=["seats"], as_of="at")
    flown.send_to(app.output_stream("lake.flown", partitions=2, key="tail"))
    streams = {
        "lake.flights": TestStream(
            Schema.of(tail="string", at="timestamp"), key="tail", partitions=2
        ),
        "lake.planes": TestStream(Schema.of(tail="string", seats="int"), key="tail", partitions=2),
    }
    with TestApplication(app, streams) as test:
        test.dataset(
            "planes", [{"tail": "a", "seats": 5}, {"tail": "b", "seats": 1}], valid_from=day(5)
        )
        test.dataset("planes", [{"tail": "a", "seats": 3}], valid_from=day(3))
        test.input(
            "lake.flights",
            [{"tail": tail, "at": day(number)} for tail in "ab" for number in range(2, 7)],
        )
        result = test.run(spark)
        seats = {(row["tail"], row["at"].day): row["seats"] for row in result.output("lake.flown")}
        assert [seats["a", number] for number in range(2, 7)] == [None, 3, 3, 5, 5]
        assert [seats["b", number] for number in range(2, 7)] == [None, None, None, 1, 1]
        assert result.counters["join-2-planes"]["before_history"] == 2
        test.dataset("planes", [{"tail": "b", "seats": 4}], valid_from=day(4))
        test.input("lake.flights", [{"tail": tail, "at": day(4)} for tail in "ab"])
        assert {row["tail"]: row["seats"] for row in test.run(spark).output("lake.flown")} == {
            "a": None,
            "b": 4,
        }
        assert planes.valid_from == reported_by


def test_a_time_is_asked_for_where_versions_have_one_and_refused_elsewhere() -> None:
    app = Application("dated")
    dated = bounded_dataset("dated", input="lake.dated", key="k", partitions=1, valid_from="name")
    prices = unbounded_dataset(
        "prices", input="lake.prices", key="k", partitions=1, history="all", valid_from="since"
    )  # fmt: skip
    plain = bounded_dataset("plain", input="lake.plain", key="k", partitions=1)
    for dataset in (dated, prices, plain):
        app.table(dataset)
    now = datetime(2026, 1, 1, tzinfo=UTC)
    with TestApplication(app) as test:
        for name, valid_from, refused in [
            ("dated", None, "declares valid_from, but this version has no time"),
            (
                "dated",
                datetime(2026, 1, 1),
                "expected end_of_dataset, and a datetime with a time zone",
            ),
            ("prices", now, "is unbounded, but valid_from=.* is for bounded ones"),
            ("plain", now, "does not declare valid_from"),
        ]:
            with pytest.raises(ConfigurationError, match=refused):
                test.dataset(name, [{"k": "a"}], valid_from=valid_from)


class Service(TableWriteFunction[str, Any, Any]):
    """What only a server could do, and no test has."""

    async def put(self, key: str, value: Any, *args: object) -> None:
        raise AssertionError("the real function was called")

    async def delete(self, key: str, *args: object) -> None:
        raise AssertionError("the real function was called")


def test_a_users_table_function_is_not_called_but_its_limits_hold(spark: SparkSession) -> None:
    def reported(update: bool) -> Application:
        app = Application("told")
        table = app.table(RemoteTable("service", key="visitor", write_function=Service()))
        visits = app.input_stream("lake.visits").map("visitor", "shop")
        if update:
            visits.update(table, set=["shop"])
        else:
            visits.send_to(table)
        return app

    with TestApplication(reported(False), STREAMS) as test:
        test.input("lake.visits", VISITS[:2])
        assert {
            key: record["shop"] for key, record in test.run(spark).table("service").items()
        } == {"ann": "n", "bob": "s"}
    with TestApplication(reported(True), STREAMS) as test, pytest.raises(PlanningError) as failure:
        test.run(spark)
    assert failure.value.operator == "send-to-table-3-service"


def test_an_undescribed_stream_has_the_columns_of_all_its_first_records() -> None:
    schema = stream_schema(
        "lake.visits", TestStream(), [{"visitor": "ann"}, {"visitor": "bob", "spent": 1.0}]
    )
    assert schema == Schema.of(visitor="string", spent="double")
    with pytest.raises(
        ConfigurationError, match=r"'shop' has type 'null'.*describe the stream"
    ) as failure:
        stream_schema("lake.visits", TestStream(), [{"visitor": "ann", "shop": None}])
    assert failure.value.stream == "lake.visits"


def test_a_time_without_a_zone_in_first_records_gets_advice_for_python() -> None:
    rows = [{"visitor": "ann", "at": None}, {"visitor": "bob", "at": datetime(2026, 1, 1)}]
    with pytest.raises(ConfigurationError, match=r"'at' of row 1 .*time\.replace\(tzinfo="):
        stream_schema("lake.visits", TestStream(), rows)


def test_mistakes_are_reported_as_in_production_and_before_spark(tmp_path: Path) -> None:
    def no_session() -> SparkSession:
        raise AssertionError("Spark was asked for")

    app = Application("wrong")
    app.input_stream("lake.visits").partition_by("visiter")
    with TestApplication(app, STREAMS) as test:
        with pytest.raises(PlanningError) as failure:
            test.run(no_session)
        assert failure.value.operator == "partition-by-2"
        assert failure.value.column == "visiter"
        with pytest.raises(ConfigurationError) as failure:
            test.input("lake.visits", [VISITS[0], {"visitor": "a", "spend": 1.0}])
        assert failure.value.stream == "lake.visits"
        with pytest.raises(ConfigurationError) as failure:
            test.input("lake.visits", [{"visitor": "a", "spent": "much"}])
        assert failure.value.stream == "lake.visits"
        with pytest.raises(ConfigurationError) as failure:
            test.input("lake.visits", [{"spent": 1.0}, {"shop": "n"}])
        assert failure.value.stream == "lake.visits"
        with pytest.raises(ConfigurationError) as failure:
            test.dataset("members", [])
        assert failure.value.argument == "dataset"
        with pytest.raises(ConfigurationError) as failure:
            test.table("members", {})
        assert failure.value.argument == "remote table"
        with pytest.raises(ConfigurationError) as failure:
            test.output("lake.visits")
        assert failure.value.argument == "output"
        with pytest.raises(ConfigurationError) as failure:
            test.input("kafka.visits", [])
        assert failure.value.stream == "kafka.visits"
    with (
        TestApplication(known_visits(), STREAMS) as test,
        pytest.raises(ConfigurationError) as caught,
    ):
        test.dataset("members", [], deleted=[{"visitor": "ann"}])
    assert (caught.value.dataset, caught.value.argument) == ("members", "deleted")


def test_a_mistake_of_an_output_table_is_found_next_to_a_dataset_of_files() -> None:
    def no_session() -> SparkSession:
        raise AssertionError("Spark was asked for")

    app = Application("paid")
    source = FileSource("/no/such/folder", "jsonl", Schema.of(shop="string", city="string"))
    shops = bounded_dataset("shops", input=source, key="shop", broadcast=True)
    visits = app.input_stream("lake.visits").join(app.table(shops), on="shop", how="left")
    table = IcebergTable("shop.paid", "nowhere", partition_by=("day",))
    visits.send_to(app.output_table(table))
    with TestApplication(app, STREAMS) as test:
        test.dataset("shops", [{"shop": "n", "city": "Oslo"}])
        with pytest.raises(PlanningError) as failure:
            test.run(no_session)
        assert failure.value.column == "day"


def test_keys_and_records_that_can_not_be_are_refused_by_table_and_stream() -> None:
    app = Application("visits")
    key, columns = ["visitor", "shop"], {"visitor": "string", "shop": "string"}
    store = PostgresTable("visits", key, connect={"host": "nowhere.invalid"}, columns=columns)
    table = RemoteTable("visits", key=key, write_function=store)
    app.input_stream("lake.visits").send_to(app.table(table))
    with TestApplication(app) as test:
        with pytest.raises(ConfigurationError) as failure:
            test.table("visits", {("ann",): {"spent": 1.0}})
        assert failure.value.table == "visits"
        with pytest.raises(ConfigurationError) as failure:
            test.input("lake.visits", [{"visitor": 1}, {"visitor": "ann"}])
        assert failure.value.stream == "lake.visits"


def test_a_time_without_a_zone_in_a_record_of_the_test_is_refused_as_in_production() -> None:
    schema = Schema.of(at="timestamp")
    with pytest.raises(ConfigurationError) as failure:
        arrow_table("lake.seen", schema, [{"at": datetime(2026, 1, 1)}], [])
    assert failure.value.stream == "lake.seen"
    assert (
        arrow_table("lake.seen", schema, [{"at": datetime(2026, 1, 1, tzinfo=UTC)}], []).num_rows
        == 1
    )


def test_the_application_stays_as_it_was() -> None:
    app = known_visits()
    tables, datasets = dict(app.tables), app.datasets
    with TestApplication(app, STREAMS):
        assert dict(app.tables) == tables
        assert app.datasets == datasets


def test_deletions_differ_from_records_of_nulls_and_a_later_record_closes_a_window(
    spark: SparkSession,
) -> None:
    seen = Schema.of(visitor="string", shop="string", at="timestamp")
    app = Application("seen")
    stream = app.input_stream("lake.seen", event_time="at")
    stream.select("visitor", "shop").send_to(
        app.output_stream("lake.copy", partitions=1, key="visitor")
    )
    stream.window(
        Tumbling(timedelta(minutes=1)), by="visitor", name="w", aggregates={"n": Count()}
    ).send_to(app.output_stream("lake.counts", partitions=1, key="visitor"))
    with TestApplication(app, {"lake.seen": TestStream(seen, key="visitor", partitions=1)}) as test:
        noon = datetime(2026, 5, 1, 12, tzinfo=UTC)
        first = {"visitor": "ann", "shop": None, "at": noon}
        test.input("lake.seen", [first], deleted=[{"visitor": "bob"}])
        result = test.run(spark)
        assert result.output("lake.copy") == [{"visitor": "ann", "shop": None}]
        assert [row["visitor"] for row in result.deleted("lake.copy")] == ["bob"]
        assert result.output("lake.counts") == []
        test.input("lake.seen", [{**first, "at": noon + timedelta(minutes=2)}])
        (closed,) = test.run(spark).output("lake.counts")
        assert (closed["visitor"], closed["window_start"], closed["n"]) == ("ann", noon, 1)
        assert test.output("lake.copy") == [{"visitor": "ann", "shop": None}] * 2
