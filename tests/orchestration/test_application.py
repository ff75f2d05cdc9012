"""`Application` and `MessageStream`: the graph that is described, and the declarations that are
refused.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from functools import partial
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.assets.validation.validators import custom
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.joins import Join
from dagster_adjunct.orchestration.operators.lookups import SelectedColumn
from dagster_adjunct.orchestration.operators.records import (
    Filter,
    FilterFunction,
    MapFunction,
    PartitionBy,
)
from dagster_adjunct.orchestration.operators.sends import SendToDataset
from dagster_adjunct.orchestration.operators.table_updates import SendToTable
from dagster_adjunct.orchestration.operators.updates import TableSend
from dagster_adjunct.orchestration.operators.windows.aggregates import Aggregate
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    InvalidNameError,
    PlanningError,
)
from dagster_adjunct.resources.iceberg import IcebergTable
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.tables.table import RemoteTable

planes = bounded_dataset("planes", input="lake.planes", key="tailnum", partitions=8)
weather = unbounded_dataset(
    "weather",
    input="lake.weather",
    key=["origin", "time_hour"],
    partition_by="origin",
    partitions=8,
)
airports = bounded_dataset("airports", input="lake.airports", key="faa", broadcast=True)


def remote(name: str, *key: str) -> RemoteTable[Any, Any, Any]:
    return RemoteTable(name, key=key, write_function=MemoryTable(name))


aircraft = remote("aircraft-state", "tailnum")


@pytest.fixture
def app() -> Application:
    return Application("flight-delays")


def test_operators_stand_in_the_order_of_their_definition(app):
    flights = app.input_stream("lake.flights", default_offset="oldest")
    late = flights.filter("dep_delay > 0")
    late.map("tailnum", "origin").partition_by("origin", partitions=4)
    flights.join(app.table(planes), on="tailnum")
    assert [(op.id, op.kind, op.inputs) for op in app.operators] == [
        ("input-1", "input", ()),
        ("filter-2", "filter", ("input-1",)),
        ("map-3", "map", ("filter-2",)),
        ("partition-by-4", "partition-by", ("map-3",)),
        ("join-5-planes", "join", ("input-1",)),
    ]
    assert app.operators[3].spec == PartitionBy(("origin",), 4)
    assert app.inputs["lake.flights"].default_offset == "oldest"
    assert app.operator("filter-2").spec == Filter("dep_delay > 0")


def test_the_graph_cannot_be_changed_from_outside(app):
    app.input_stream("lake.flights").filter("true")
    with pytest.raises(FrozenInstanceError):
        app.operators[0].id = "other"
    with pytest.raises(TypeError):
        app.outputs["lake.x"] = None
    assert app.outputs == {}


def test_a_join_says_in_one_form_what_it_compares_and_adds(app):
    flights = app.input_stream("lake.flights")
    flights.join(
        app.table(planes),
        on="tailnum",
        how="left",
        select=["seats", "year as plane_year"],
        prefix="p_",
    )
    flights.join(app.table(weather), on={"hour": "time_hour", "origin": "origin"}, name="hourly")
    first, second = app.operators[1], app.operators[2]
    assert first.spec == Join(
        "planes",
        (("tailnum", "tailnum"),),
        "left",
        (SelectedColumn("seats", "p_seats"), SelectedColumn("year", "plane_year")),
        "p_",
    )
    assert second.id == "join-3-hourly"
    # in the order of the dataset's key
    assert second.spec.on == (("origin", "origin"), ("hour", "time_hour"))
    assert second.spec.selection(("origin", "time_hour", "temp")) == (
        SelectedColumn("temp", "temp"),
    )


def test_send_to_returns_the_stream_to_go_on_with(app):
    flights = app.input_stream("lake.flights")
    out = app.output_stream("lake.out", partitions=8, key="tailnum")
    sent = flights.send_to(out)
    table = app.table(aircraft)
    assert sent.send_to(table, on_null_key="skip").operator == "send-to-table-3-aircraft-state"
    assert app.operators[2].spec == SendToTable(TableSend("aircraft-state", None, "skip"))
    assert app.tables == {"aircraft-state": aircraft}
    assert app.table_key("aircraft-state") == ("tailnum",)


def test_a_function_may_map_and_may_promise_to_keep_the_partitioning(app):
    def shorten(frame):
        return frame

    app.input_stream("lake.flights").map(shorten, keeps_partitioning=True).filter(shorten)
    assert app.operators[1].spec == MapFunction(shorten, True)
    assert app.operators[2].spec == FilterFunction(shorten)


def test_an_unbounded_dataset_can_be_fed_by_the_application(app):
    app.input_stream("lake.readings").send_to(app.table(weather))
    assert app.operators[1].spec == SendToDataset("weather")


def refused(act, error: type[AdjunctError], *parts: str) -> None:
    with pytest.raises(error) as caught:
        act()
    for part in parts:
        assert part in str(caught.value)
    if not isinstance(caught.value, InvalidNameError):
        assert caught.value.next_step or caught.value.argument


def test_unsafe_names_are_refused(app):
    refused(lambda: Application("a/b"), InvalidNameError, "a/b")
    refused(lambda: app.input_stream("flights"), InvalidNameError, "names no system")
    refused(lambda: app.output_stream("lake.a.b", partitions=1), InvalidNameError, "a.b")
    refused(lambda: app.table(remote("../x", "a")), InvalidNameError, "../x")


def test_a_stream_or_table_is_declared_once(app):
    app.input_stream("lake.flights")
    app.output_stream("lake.out", partitions=8)
    app.table(planes)
    refused(lambda: app.input_stream("lake.flights"), PlanningError, "lake.flights", "twice")
    refused(lambda: app.output_stream("lake.out", partitions=8), PlanningError, "lake.out", "twice")
    refused(lambda: app.table(planes), PlanningError, "'planes' twice")
    refused(lambda: app.table(remote("planes", "a")), PlanningError, "'planes' twice")


def test_a_stream_is_not_read_and_written_by_one_application(app):
    flights = app.input_stream("lake.flights")
    app.input_stream("lake.weather")
    app.output_stream("lake.out", partitions=8)
    refused(
        lambda: app.output_stream("lake.flights", partitions=8),
        PlanningError,
        "lake.flights",
        "loop forever",
    )
    refused(lambda: app.input_stream("lake.out"), PlanningError, "lake.out", "loop forever")
    refused(
        lambda: flights.send_to(app.table(weather)), PlanningError, "lake.weather", "loop forever"
    )
    app.output_stream("lake.planes", partitions=8)
    refused(lambda: app.table(planes), PlanningError, "lake.planes", "input of dataset 'planes'")


def test_an_output_stream_is_used_once(app):
    flights = app.input_stream("lake.flights")
    out = app.output_stream("lake.out", partitions=8)
    flights.send_to(out)
    refused(
        lambda: flights.filter("true").send_to(out),
        PlanningError,
        "'lake.out' is used twice",
        "send-to-2",
    )


def test_a_table_of_another_application_or_none_is_refused(app):
    flights = app.input_stream("lake.flights")
    other = Application("other")
    refused(
        lambda: flights.join(other.table(planes), on="tailnum"),
        PlanningError,
        "'planes'",
        "'other'",
    )
    refused(lambda: flights.join(planes, on="tailnum"), PlanningError, "planes", "app.table(")
    refused(lambda: flights.send_to(aircraft), PlanningError, "aircraft-state", "app.table(")
    refused(
        lambda: flights.send_to(other.output_stream("lake.o", partitions=1)),
        PlanningError,
        "lake.o",
    )
    refused(lambda: app.table("planes"), ConfigurationError, "is not a table")


def test_a_declaration_of_another_kind_is_named_as_what_it_is(app):
    flights = app.input_stream("lake.flights")
    stream = app.output_stream("lake.out", partitions=1)
    table = app.output_table(IcebergTable("shop.flights"))
    for target in (stream, table):
        refused(
            lambda target=target: flights.update(target, set={"a": "b"}),
            PlanningError,
            f"{target.name!r} is not a remote table",
            "send_to()",
        )
    with pytest.raises(PlanningError, match=r"'iceberg:shop\.flights', which is an output"):
        flights.join(table, on="tailnum")


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"keeps_partitioning": True}, "keeps_partitioning"),
        ({"schema": Schema.of(a="string")}, "schema"),
    ],
)
def test_an_option_of_functions_is_refused_of_an_expression_by_its_name(app, options, argument):
    flights = app.input_stream("lake.flights")
    with pytest.raises(ConfigurationError) as caught:
        flights.flat_map("split(a, ' ') as b", **options)
    assert caught.value.argument == argument


def test_what_is_reported_for_a_remote_table_only_is_refused_of_a_dataset(app):
    flights, table = app.input_stream("lake.flights"), app.table(planes)
    refused(
        lambda: flights.join(table, on="tailnum", args=("x",)),
        ConfigurationError,
        "'planes' is a dataset",
    )
    typed = {"seats": "int"}
    refused(
        lambda: flights.join(table, on="tailnum", select=typed),
        ConfigurationError,
        "'planes' is a dataset",
    )


def test_a_bounded_dataset_is_not_fed_by_an_application(app):
    flights = app.input_stream("lake.flights")
    refused(
        lambda: flights.send_to(app.table(planes)), PlanningError, "'planes' is bounded", "markers"
    )


def test_a_join_names_exactly_the_key(app):
    flights, table = app.input_stream("lake.flights"), app.table(weather)
    refused(
        lambda: flights.join(table, on="origin"),
        PlanningError,
        "lacks 'time_hour'",
        "(origin, time_hour)",
    )
    refused(
        lambda: flights.join(table, on=["origin", "time_hour", "x"]),
        PlanningError,
        "'x'",
        "not in the key",
    )
    refused(
        lambda: flights.join(table, on={"a": "origin", "b": "origin"}),
        PlanningError,
        "'origin' twice",
    )
    refused(
        lambda: flights.join(table, on=["origin", "time_hour"], how="outer"),
        ConfigurationError,
        "outer",
    )


def test_two_joins_do_not_share_a_given_name(app):
    flights, table = app.input_stream("lake.flights"), app.table(planes)
    joined = flights.join(table, on="tailnum", name="p", select=[])
    refused(
        lambda: joined.join(table, on="tailnum", name="p"), PlanningError, "join-2-p", "join-3-p"
    )
    refused(lambda: joined.join(table, on="tailnum", name="a b"), InvalidNameError, "a b")


def test_a_selection_gives_every_column_its_own_name(app):
    flights, table = app.input_stream("lake.flights"), app.table(planes)
    refused(lambda: flights.join(table, on="tailnum", select=["a as x", "X"]), PlanningError, "'X'")
    refused(
        lambda: flights.join(table, on="tailnum", select=["a + 1"]), ConfigurationError, "'a + 1'"
    )
    refused(
        lambda: flights.join(table, on="tailnum", select="seats"), ConfigurationError, "'seats'"
    )


def test_empty_or_mixed_operators_are_refused(app):
    flights = app.input_stream("lake.flights")
    refused(lambda: flights.filter(" "), ConfigurationError, "expected a Spark SQL condition")
    refused(lambda: flights.filter(1), ConfigurationError)
    refused(lambda: flights.map(), ConfigurationError, "expected Spark SQL expressions")
    refused(lambda: flights.map(lambda df: df, "a"), ConfigurationError, "or one function")
    refused(
        lambda: flights.map("a", keeps_partitioning=True), ConfigurationError, "keeps_partitioning"
    )
    refused(lambda: flights.partition_by(), ConfigurationError, "no column")
    refused(lambda: flights.partition_by("a", "a"), ConfigurationError, "twice")
    refused(lambda: flights.partition_by("a", partitions=0), ConfigurationError, "is 0")
    refused(
        lambda: app.input_stream("lake.x", default_offset="latest"), ConfigurationError, "latest"
    )
    refused(
        lambda: flights.send_to(app.output_stream("lake.y", partitions=2), on_null_key="skip"),
        ConfigurationError,
    )
    refused(lambda: Application("a", intermediate_partitions=0), ConfigurationError, "is 0")
    refused(lambda: Application("a", max_batch_records=0), ConfigurationError, "is 0")


def test_what_is_passed_in_place_of_a_table_is_reported_how_to_become_one(app: Application) -> None:
    flights = app.input_stream("lake.flights")
    with pytest.raises(PlanningError) as failure:
        flights.join(app.input_stream("lake.planes"), on="tailnum")  # type: ignore[arg-type]
    assert failure.value.operator == "input-2"
    with pytest.raises(
        PlanningError,
        match=r"got 'planes'.*Pass what app.table\(…\) or app.local_table\(…\) returned",
    ):
        flights.join(planes, on="tailnum")  # type: ignore[arg-type]
    with pytest.raises(PlanningError, match=r"Pass what app.output_stream\(…\) returned"):
        flights.update(app.table(aircraft), set=["seats"], dead_letters="lake.dead")  # type: ignore[arg-type]
    with pytest.raises(
        PlanningError, match=r"'input-1' was declared by application 'other'.*app.input_stream\(…\)"
    ):
        flights.merge(Application("other").input_stream("lake.flights"))


def test_a_local_table_refuses_only_what_it_does_not_take(app: Application) -> None:
    flights, seen = (
        app.input_stream("lake.flights"),
        app.local_table("seen", key="k", schema=Schema.of(k="string"), partitions=2),
    )
    flights.send_to(seen, on_null_key="skip")
    dead = app.output_stream("lake.dead", partitions=1)
    with pytest.raises(ConfigurationError) as failure:
        flights.send_to(seen, on_null_key="skip", dead_letters=dead)
    assert failure.value.argument == "dead_letters"


async def _later(record):
    return record


async def _each_later(record):
    yield record


class _AsyncCall:
    async def __call__(self, record):
        return record


@pytest.mark.parametrize(
    "function", [_later, _each_later, _AsyncCall(), partial(_later)], ids=lambda f: type(f).__name__
)
def test_async_functions_are_refused_where_they_are_declared(app, function):
    flights, made = app.input_stream("lake.flights"), Schema.of(word="string")
    for declare in (
        flights.map,
        flights.filter,
        flights.sink,
        lambda given: flights.flat_map(given, schema=made),
        lambda given: flights.join(app.table(planes), on="tailnum", function=given, schema=made),
        lambda given: Aggregate(given, returns="int"),
    ):
        with pytest.raises(
            ConfigurationError, match=r"got \w+\(\), which is async: expected a synchronous"
        ):
            declare(function)


def test_functions_of_other_parameters_are_refused_where_they_are_declared(app):
    flights, made = app.input_stream("lake.flights"), Schema.of(word="string")
    for declare, given, function in (
        (flights.map, "frame", lambda: None),
        (flights.filter, "frame", lambda frame, other: frame),
        (flights.sink, "records, context", lambda records: None),
        (lambda given: flights.flat_map(given, schema=made), "record", lambda: [{}]),
        (
            lambda given: flights.join(
                app.table(planes), on="tailnum", function=given, schema=made
            ),
            "record, entry",
            lambda record: {},
        ),
        (lambda given: Aggregate(given, returns="int"), "records", lambda *, records: 1),
        (lambda given: custom("x", given), "candidate", lambda: True),
    ):
        with pytest.raises(
            ConfigurationError,
            match=rf"calls <lambda>\(\) with \({given}\), but its parameters are",
        ):
            declare(function)


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        ({"as_of": "null"}, "as_of"),
        ({"as_of": "at"}, "as_of"),
        ({"before_history": "oldest"}, "before_history"),
        ({"on_null_time": "fail"}, "on_null_time"),
    ],
)
def test_a_join_with_a_remote_table_takes_no_time(given, argument):
    app = Application("visits")
    table = app.table(RemoteTable("planes", key="k", read_function=MemoryTable("planes")))
    with pytest.raises(ConfigurationError) as caught:
        app.input_stream("lake.visits").join(table, on="k", **given)
    assert caught.value.argument == argument
    assert "'planes' is a remote table" in caught.value.problem
