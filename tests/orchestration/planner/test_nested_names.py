"""Nested columns in plans: operators name values in them by paths, and the types of nested
expressions are known.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from typing import Any

import pytest

from dagster_adjunct import Application, Schema, bounded_dataset
from dagster_adjunct.errors import PlanningError
from dagster_adjunct.orchestration.operators.stream_facts import LineageNode, StreamFacts
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.windows import Aggregate, Count, Sum, Tumbling

ORDERS = Schema.of(
    {
        "id": "bigint",
        "at": "timestamp",
        "customer": {"id": "bigint", "home": {"city": "string", "odd.name": "string"}},
        "tags": ["string"],
        "notes": "map<string,string>",
        "lines": [{"sku": "string"}],
        "dotted.name": "string",
    }
)
CUSTOMERS = Schema.of(id="bigint", name="string", address={"city": "string", "tags": ["string"]})
FACTS = {
    "lake.orders": StreamFacts("lake.orders", 2, ("id",), "spark-murmur3", ORDERS),
    "lake.others": StreamFacts("lake.others", 2, ("id",), "spark-murmur3", ORDERS),
    "lake.customers": StreamFacts("lake.customers", 2, ("id",), "spark-murmur3", CUSTOMERS),
}
DATASET = bounded_dataset("customers", input="lake.customers", key="id", partitions=2)
SECOND = dt.timedelta(seconds=1)


def plan(describe: Callable[[Application, Any], Any], **options: Any) -> ExecutionPlan:
    app = Application("app", **options)
    made = describe(app, app.input_stream("lake.orders", event_time="at"))
    made.send_to(app.output_stream("lake.out", partitions=1))
    return build_plan(app, FACTS)


def refusal(describe: Callable[[Application, Any], Any], **options: Any) -> PlanningError:
    with pytest.raises(PlanningError) as failure:
        plan(describe, **options)
    return failure.value


def test_the_plan_shows_a_path_that_records_are_partitioned_by() -> None:
    made = plan(lambda app, orders: orders.partition_by("customer.home.city"))
    assert made.exchanges[0].partitioned_by == ("customer.home.city",)
    assert "customer.home.city" in made.render()


def test_a_column_of_a_dotted_name_is_no_path() -> None:
    plan(lambda app, orders: orders.partition_by("dotted.name"))
    plan(lambda app, orders: orders.partition_by("customer.home.`odd.name`"))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("customer.nme", "customer"),
        ("customer.home.town", "customer.home"),
        ("id.x", "id"),
        ("tags.x", "tags"),
        ("lines.sku", "lines"),
        ("notes.x", "notes"),
        ("costumer.id", "costumer.id"),
    ],
)
def test_a_path_to_nothing_is_refused_by_name(name: str, wrong: str) -> None:
    error = refusal(lambda app, orders: orders.partition_by(name))
    assert error.column == name
    assert error.operator == "partition-by-2"
    assert repr(wrong) in error.problem


PLACES: dict[str, Callable[[Application, Any, str], Any]] = {
    "partition_by": lambda app, orders, name: orders.partition_by(name),
    "join": lambda app, orders, name: orders.join(app.table(DATASET), on={name: "id"}),
    "window": lambda app, orders, name: orders.window(
        Tumbling(SECOND), by=name, name="w", aggregates={"n": Count()}
    ),
    "stream join": lambda app, orders, name: orders.join_stream(
        app.input_stream("lake.others", event_time="at").select("id as other", "at as other_at"),
        on={name: "other"},
        within=SECOND,
        name="s",
    ),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["customer", "customer.home", "tags"])
def test_what_to_do_about_a_nested_value_can_be_done(place: str, name: str) -> None:
    describe = PLACES[place]
    error = refusal(lambda app, orders: describe(app, orders, name), auto_repartition=True)
    assert error.column == name
    advised = re.search(r"for example '([^']+)'", error.next_step)
    assert (advised is None) == (name == "tags")
    is_compared = place in ("join", "stream join")
    if advised is None or (is_compared and name == "customer.home"):  # with a number
        return
    plan(lambda app, orders: describe(app, orders, advised[1]), auto_repartition=True)


@pytest.mark.parametrize("place", PLACES)
def test_a_path_names_a_simple_value(place: str) -> None:
    plan(lambda app, orders: PLACES[place](app, orders, "customer.id"), auto_repartition=True)


KEPT: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "filter": (lambda orders: orders.filter("customer.id > 1"), ("customer.id",)),
    "select": (lambda orders: orders.select("customer", "id"), ("customer.id",)),
    "rename": (lambda orders: orders.select("customer as buyer"), ("buyer.id",)),
    "odd": (lambda orders: orders.select("customer as `a buyer`"), ("`a buyer`.id",)),
    "star": (lambda orders: orders.map("*", "1 as one"), ("customer.id",)),
    "other": (lambda orders: orders.with_columns(id="id + 1"), ("customer.id",)),
    "changed": (lambda orders: orders.with_columns(customer="named_struct('id', 1L)"), ()),
    "dropped": (lambda orders: orders.select("id"), ()),
    "excepted": (lambda orders: orders.map("* except (customer)"), ()),
    "part": (lambda orders: orders.select("customer.id"), ()),
    "column": (lambda orders: orders.with_columns(**{"customer.id": "id"}), ()),
    "alias": (lambda orders: orders.select("customer", "id as `customer.id`"), ()),
    "element": (lambda orders: orders.flat_map("tags as customer"), ()),
    "function": (lambda orders: orders.map(lambda frame: frame), ()),
    "promise": (
        lambda orders: orders.map(lambda frame: frame, keeps_partitioning=True),
        ("customer.id",),
    ),
}


@pytest.mark.parametrize("change", KEPT)
def test_the_partitioning_is_known_while_the_column_of_a_path_is_kept(change: str) -> None:
    describe, kept = KEPT[change]
    made = plan(lambda app, orders: describe(orders.partition_by("customer.id")))
    assert made.operators[-2].partitioned_by == kept


def test_records_by_a_path_are_not_taken_for_those_by_a_column() -> None:
    def named_alike(app: Application, orders: Any) -> Any:
        known = app.table(DATASET)
        joined = orders.partition_by("customer.id", partitions=2).join(
            known, on={"customer.id": "id"}, select=["name as `customer.id`"]
        )
        return joined.select("id as `customer.id`", "customer").join(
            known, on={"customer.id": "id"}, select=["name"], name="again"
        )

    error = refusal(named_alike)
    assert error.operator is not None
    assert error.operator.endswith("again")


def test_types_of_values_that_are_compared_must_be_equal() -> None:
    error = refusal(lambda app, orders: PLACES["join"](app, orders, "customer.home.city"))
    assert error.column == "customer.home.city"
    advised = re.search(r'\.map\("\*", "(.+) as (\w+)"\)', error.next_step)
    assert advised is not None
    plan(
        lambda app, orders: PLACES["join"](
            app, orders.map("*", f"{advised[1]} as {advised[2]}"), advised[2]
        ),
        auto_repartition=True,
    )


def test_the_source_of_a_part_of_an_entry_is_its_column() -> None:
    made = plan(
        lambda app, orders: orders.join(
            app.table(DATASET), on="id", select=["address.city", "address.city as town"]
        )
    )
    columns = made.columns["join-2-customers"].known
    for name in ("city", "town"):
        assert columns[name].type == "string"
        assert columns[name].sources == ((LineageNode("dataset", "customers"), "address"),)


@pytest.mark.parametrize(
    ("select", "wrong"),
    [(["address.town"], "address.town"), (["address.tags.x"], "address.tags.x")],
)
def test_a_part_that_entries_lack_is_refused(select: list[str], wrong: str) -> None:
    error = refusal(lambda app, orders: orders.join(app.table(DATASET), on="id", select=select))
    assert error.column == wrong


@pytest.mark.parametrize("select", [["address.city as id"], ["name as city", "address.city"]])
def test_parts_of_entries_need_names_of_their_own(select: list[str]) -> None:
    refusal(lambda app, orders: orders.join(app.table(DATASET), on="id", select=select))


def test_a_window_calls_its_key_as_the_last_step_of_a_path() -> None:
    made = plan(
        lambda app, orders: orders.partition_by("customer.id").window(
            Tumbling(SECOND), by="customer.id", name="w", aggregates={"n": Sum("customer.id")}
        )
    )
    window = made.operators[-2]
    assert window.columns == ("id", "window_start", "window_end", "n")
    assert window.partitioned_by == ("id",)
    known = made.columns[window.id].known
    assert known["id"].sources == ((LineageNode("stream", "lake.orders"), "customer"),)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("customer.home.city", "city"),
        ("customer.home.`odd.name`", "odd.name"),
        ("customer.home.city as town", "town"),
    ],
)
@pytest.mark.parametrize("door", ["select", "map", "window", "join"])
def test_a_path_that_becomes_a_column_has_the_name_of_its_last_step(
    door: str, path: str, name: str
) -> None:
    def describe(app: Application, orders: Any) -> Any:
        if door == "window":
            options = {"name": "w", "aggregates": {"n": Count()}}
            return orders.window(Tumbling(SECOND), by=path, **options)
        if door == "join":
            entries = bounded_dataset("orders", input="lake.orders", key="id", partitions=2)
            return orders.select("id").join(app.table(entries), on="id", select=[path])
        return getattr(orders, door)("id", path)

    columns = plan(describe, auto_repartition=True).operators[-2].columns
    assert columns is not None
    assert name in columns
    assert not {"customer", "city", "odd.name"} & {*columns} - {name}


@pytest.mark.parametrize("by", [["customer.id", "id"], ["customer.id as buyer", "id"]])
def test_two_keys_of_a_window_of_one_name_need_an_alias(by: list[str]) -> None:
    def window(app: Application, orders: Any) -> Any:
        return orders.window(Tumbling(SECOND), by=by, name="w", aggregates={"n": Count()})

    if by[0] == "customer.id":
        assert refusal(window, auto_repartition=True).column == "id"
    else:
        columns = plan(window, auto_repartition=True).operators[-2].columns
        assert columns == ("buyer", "id", "window_start", "window_end", "n")


def test_two_values_for_a_function_need_names_of_their_own() -> None:
    made = Aggregate(len, "int", ["id", "customer.id"])
    error = refusal(
        lambda app, orders: orders.window(
            Tumbling(SECOND), by="id", name="w", aggregates={"n": made}
        )
    )
    assert error.column == "id"


@pytest.mark.parametrize("how", ["inner", "left", "right", "full"])
def test_records_of_joined_streams_stay_partitioned_by_a_path(how: Any) -> None:
    def joined(app: Application, orders: Any) -> Any:
        others = app.input_stream("lake.others", event_time="at").select("id as other", "at as met")
        on = {"customer.id": "other"}
        return orders.join_stream(others, on=on, within=SECOND, name="s", how=how)

    planned = plan(joined, auto_repartition=True)
    (join,) = [each for each in planned.operators if each.kind == "stream-join"]
    assert join.partitioned_by == ("customer.id",)


@pytest.mark.parametrize("stream", ["lake.keyed", "kafka.keyed"])
def test_the_key_of_an_output_stream_is_a_simple_value(stream: str) -> None:
    def sent(key: str) -> None:
        app = Application("app")
        orders = app.input_stream("lake.orders")
        orders.send_to(app.output_stream(stream, partitions=2, key=key))
        build_plan(app, FACTS)

    sent("`customer`.id")
    for key in ("customer", "customer.none", "customer.id.none"):
        with pytest.raises(PlanningError) as failure:
            sent(key)
        assert failure.value.column == key


@pytest.mark.parametrize("made", [None, "summed"])
def test_an_aggregate_of_an_array_is_no_condition(made: str | None) -> None:
    app = Application("app")
    orders = app.input_stream("lake.orders")
    condition = "aggregate(array(id), 0L, (sum, each) -> sum + each)"
    if made is not None:
        orders = orders.with_columns(**{made: condition})
        condition = made
    kept = orders.filter(condition)
    kept.send_to(app.output_stream("lake.out", partitions=2, key="id"))
    with pytest.raises(PlanningError, match="is bigint: expected boolean") as failure:
        build_plan(app, FACTS)
    assert failure.value.operator == kept.operator
