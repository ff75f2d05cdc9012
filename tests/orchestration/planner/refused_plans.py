"""Examples of what planning rejects, each followed by its corrected form where there is one.

`test_documented_refusals.py` runs them: each kind of error has a row in docs/refusals.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from dagster_adjunct import Application, Schema, bounded_dataset, unbounded_dataset
from dagster_adjunct.changes import Projection, Watermark
from dagster_adjunct.errors import AdjunctError
from dagster_adjunct.exchange import IcebergTable
from dagster_adjunct.sources import FileSource
from dagster_adjunct.streams import ARRIVAL
from dagster_adjunct.tables import RemoteTable, SqliteTable, TableReadFunction
from dagster_adjunct.testing import TestStream, assert_plannable
from dagster_adjunct.validators import no_nulls, sql_check, values_in
from dagster_adjunct.windows import Count, Sum, Tumbling

streams = {
    "lake.visits": TestStream(
        Schema.of(visitor="string", shop="string", spent="double"), key="visitor", partitions=4
    ),
    "lake.members": TestStream(
        Schema.of(visitor="string", level="string"), key="visitor", partitions=4
    ),
    "lake.shops": TestStream(Schema.of(shop="string", city="string"), key="shop", partitions=2),
}
members = bounded_dataset("members", input="lake.members", key="visitor", partitions=4)
shops = unbounded_dataset("shops", input="lake.shops", key="shop", partitions=2)
problems: list[str] = []
"""What the errors said."""
without_line: list[str] = []
"""The table or the problem of errors that do not name the line of a declaration here."""


def planned(
    describe: Callable[[Any, Any], object],
    given: dict[str, TestStream] = streams,
    *,
    broadcast: bool = False,
    event_time: Any = None,
    **options: Any,
) -> None:
    app = Application("visits", **options)
    describe(app, app.input_stream("lake.visits", broadcast=broadcast, event_time=event_time))
    assert_plannable(app, given)


def rejected(*example: Any, **options: Any) -> None:
    with pytest.raises(AdjunctError) as caught:
        planned(*example, **options)
    problems.append(caught.value.problem)
    places = getattr(caught.value, "places", ()) or (getattr(caught.value, "declared_at", None),)
    if not all(re.fullmatch(r".*refused_plans\.py:\d+", str(place)) for place in places):
        without_line.append(caught.value.table or caught.value.problem)


# Streams

rejected(lambda app, visits: app.input_stream("lake.shop"))
planned(lambda app, visits: app.input_stream("lake.shops"))

rejected(lambda app, visits: app.input_stream("lake.visits").filter("spent > 0"))
planned(lambda app, visits: visits.filter("spent > 0"))

rejected(lambda app, visits: app.input_stream("lake.shops", event_time="city"))
rejected(
    lambda app, visits: app.input_stream(
        "lake.shops", event_time="max(to_timestamp(city)) over (partition by shop)"
    )
)
planned(lambda app, visits: app.input_stream("lake.shops", event_time="to_timestamp(city)"))

rejected(lambda app, visits: visits.send_to(app.output_stream("lake.visits", partitions=4)))
rejected(
    lambda app, visits: (app.output_stream("lake.out", partitions=4), app.input_stream("lake.out"))
)
planned(
    lambda app, visits: visits.send_to(
        app.output_stream("lake.seen-visits", partitions=4, key="visitor")
    )
)

rejected(lambda app, visits: assert_plannable(Application("nothing"), streams))
planned(lambda app, visits: None)

rejected(lambda app, visits: app.input_stream("lake.shops", broadcast=True), broadcast=True)
planned(lambda app, visits: app.input_stream("lake.shops", broadcast=True))

rejected(lambda app, visits: app.input_stream("lake.shops", broadcast="city"))
planned(lambda app, visits: app.input_stream("lake.shops", broadcast="task"))


# Outputs

rejected(lambda app, visits: [app.output_stream("lake.out", partitions=4) for _ in "12"])
rejected(lambda app, visits: [app.output_table(IcebergTable("shop.visits")) for _ in "12"])


def replaced(app: Any, visits: Any, on_replay: Any) -> None:
    both = visits.join_stream(
        app.input_stream("lake.members", event_time=ARRIVAL),
        on="visitor",
        within=timedelta(hours=1),
        name="both",
        select=["level"],
    )
    both.select("visitor").send_to(
        app.output_table(IcebergTable("shop.visits"), on_replay=on_replay)
    )


rejected(lambda app, visits: replaced(app, visits, "replace"), event_time=ARRIVAL)
planned(lambda app, visits: replaced(app, visits, "append"), event_time=ARRIVAL)


def twice(app, visits):
    out = app.output_stream("lake.out", partitions=4, key="visitor")
    visits.filter("spent > 9").send_to(out)
    visits.filter("spent < 1").send_to(out)


rejected(twice)


def once(app, visits):
    out = app.output_stream("lake.out", partitions=4, key="visitor")
    visits.filter("spent > 9 or spent < 1").send_to(out)


planned(once)

rejected(
    lambda app, visits: visits.map("shop").send_to(
        app.output_stream("lake.out", partitions=4, key="visitor")
    )
)
planned(
    lambda app, visits: visits.map("visitor", "shop").send_to(
        app.output_stream("lake.out", partitions=4, key="visitor")
    )
)

rejected(
    lambda app, visits: visits.send_to(app.output_stream("lake.out", partitions=4, key="spent"))
)
planned(
    lambda app, visits: visits.map("*", "cast(spent as decimal(9,2)) as price").send_to(
        app.output_stream("lake.out", partitions=4, key="price")
    )
)

rejected(lambda app, visits: visits.send_to(app.output_stream("lake.out", partitions=4)))
planned(lambda app, visits: visits.send_to(app.output_stream("lake.out", partitions=1)))
planned(
    lambda app, visits: visits.send_to(app.output_stream("lake.out", partitions=4, key="visitor"))
)

there = {**streams, "lake.out": TestStream(key="visitor", partitions=8)}
rejected(
    lambda app, visits: visits.send_to(app.output_stream("lake.out", partitions=4, key="visitor")),
    there,
)
planned(
    lambda app, visits: visits.send_to(app.output_stream("lake.out", partitions=8, key="visitor")),
    there,
)

there = {
    **streams,
    "lake.out": TestStream(
        Schema.of(visitor="string", spent="string"), key="visitor", partitions=4
    ),
}


def sent(*columns):
    return lambda app, visits: visits.map(*columns).send_to(
        app.output_stream("lake.out", partitions=4, key="visitor")
    )


rejected(sent("visitor", "spent"), there)


planned(sent("visitor", "cast(spent as string) as spent"), there)


def sent_to_topic(**changes):
    return lambda app, visits: visits.map("visitor").send_to(
        app.output_stream("kafka.out", partitions=4, key="visitor", **changes)
    )


topics = {
    **streams,
    "kafka.out": TestStream(Schema.of(visitor="string"), key="visitor", partitions=4),
}
rejected(sent_to_topic(drop=["spent"]), topics)
planned(sent_to_topic(), topics)

floors = unbounded_dataset(
    "floors", input="lake.floors", key=["shop", "floor"], partition_by="shop", partitions=2
)
there = {
    **streams,
    "lake.floors": TestStream(Schema.of(shop="string", floor="int"), key="shop", partitions=2),
}
rejected(lambda app, visits: visits.map("shop", "1L as floor").send_to(app.table(floors)), there)
planned(lambda app, visits: visits.map("shop", "1 as floor").send_to(app.table(floors)), there)


def around(app, visits):
    app.table(shops)
    app.output_stream("lake.shops", partitions=2)


rejected(around)
planned(lambda app, visits: visits.map("shop", "visitor as city").send_to(app.table(shops)))


# Columns

rejected(lambda app, visits: visits.partition_by("visiter"))
rejected(lambda app, visits: visits.map("visitor", "shop as visitor"))
planned(lambda app, visits: visits.map("visitor", "shop as place").partition_by("visitor"))

rejected(lambda app, visits: visits.map("*", "spent as __spent"))
planned(lambda app, visits: visits.map("*", "spent as _spent"))

rejected(lambda app, visits: visits.filter("spnt > 0"))
rejected(
    lambda app, visits: (
        visits.filter("spnt > 0").filter("more"),
        visits.map("upper(shopp) as shop"),
    )
)
planned(lambda app, visits: visits.filter("spent > 0").map("visitor", "upper(shop) as shop"))

rejected(lambda app, visits: visits.filter("__offset > 1"))
rejected(lambda app, visits: visits.with_columns(all="to_json(struct(*))"))
rejected(lambda app, visits: visits.filter("shop.name = 'north'"))
planned(
    lambda app, visits: visits.with_columns(all="to_json(struct(visitor, shop))").filter(
        "shop = 'north'"
    )
)

rejected(lambda app, visits: visits.filter("upper(shop)"))
rejected(lambda app, visits: visits.map("visitor", "upper(shop as shop"))
planned(
    lambda app, visits: visits.filter("upper(shop) = 'A'").map("visitor", "upper(shop) as shop")
)

for refused, accepted in (
    ("cast(spent as date)", "cast(shop as date)"),
    ("spent & 1", "cast(spent as int) & 1"),
    ("date '2026-01-01' + 3000000000", "date '2026-01-01' + 30"),
    ("timestamp '2026-01-01' + 1", "timestamp '2026-01-01' + interval 1 day"),
    ("coalesce(spent, current_date())", "coalesce(spent, 0)"),
    ("timestamp_millis(spent)", "timestamp_millis(cast(spent as bigint))"),
    ("round(spent, length(shop))", "round(spent, 2)"),
):
    rejected(lambda app, visits, refused=refused: visits.with_columns(at=refused))
    planned(lambda app, visits, accepted=accepted: visits.with_columns(at=accepted))
rejected(lambda app, visits: visits.filter("spent >> 1"))

rejected(
    lambda app, visits: visits.with_columns(shops="named_struct('first', shop)").partition_by(
        "shops"
    )
)
rejected(
    lambda app, visits: visits.with_columns(shops="named_struct('first', shop)").partition_by(
        "shops.last"
    )
)
planned(
    lambda app, visits: (
        visits.with_columns(shops="named_struct('first', shop)")
        .partition_by("shops.first")
        .send_to(app.output_stream("lake.out", partitions=2, key="shop"))
    )
)


def firsts_of(app):
    schema = Schema.of({"shops.first": "string"})
    return app.local_table("firsts", key="shops.first", schema=schema, partitions=4)


rejected(
    lambda app, visits: visits.with_columns(shops="named_struct('first', shop)").send_to(
        firsts_of(app)
    )
)
planned(
    lambda app, visits: (
        visits.with_columns(shops="named_struct('first', shop)")
        .with_columns(**{"shops.first": "shops.first"})
        .send_to(firsts_of(app))
    )
)
rejected(lambda app, visits: visits.flat_map("shop as place"))
planned(lambda app, visits: visits.flat_map("split(shop, ',') as place"))


def doubled(column):
    def double(visit, member):
        return {column: visit["spent"] * 2}

    return lambda app, visits: visits.join(
        app.table(members), on="visitor", function=double, schema=Schema.of({column: "double"})
    )


rejected(doubled("spent"))
planned(doubled("twice"))

rejected(lambda app, visits: visits.merge(visits.select("visitor", "spent", "shop as place")))
rejected(lambda app, visits: visits.merge(visits.with_columns(spent="cast(spent as int)")))
planned(lambda app, visits: visits.merge(visits.with_columns(spent="spent * 2")))

rejected(sent("visitor", "cast(shop as timestamp_ntz) as spent"), there)
planned(sent("visitor", "cast(spent as string) as spent"), there)


def with_cities(**more):
    cities = bounded_dataset("cities", input="lake.shops", key="shop", broadcast=True, **more)
    return lambda app, visits: visits.join(app.table(cities), on="shop", select=["city"])


rejected(with_cities(validators=[no_nulls("citty")]))
rejected(with_cities(validators=[sql_check("has_a_name", "length(city)")]))
rejected(with_cities(validators=[sql_check("are_some", "count(*) > 1")]))
rejected(
    with_cities(
        validators=[
            sql_check("north_is_large", "SELECT v.* FROM version v WHERE v.citty = 'north'")
        ]
    )
)
rejected(with_cities(extractor=Projection("shop STRING, city INT", {"city": "upper(city)"})))
rejected(with_cities(extractor=Projection("shop STRING, city STRING", where="length(city)")))
lengths = Projection("shop STRING, city INT", {"city": "length(city)"})
rejected(with_cities(validators=[values_in("city", ["north"])], extractor=lengths))
planned(
    with_cities(
        validators=[no_nulls("city"), values_in("city", [4, 5]), sql_check("long", "city > 3")],
        extractor=lengths,
    )
)


def declared(**more):
    parts = {"input": "lake.shops", "key": "shop", "partitions": 2, **more}
    return lambda app, visits: app.table(unbounded_dataset("shops-of-now", **parts))


rejected(declared(validators=[no_nulls("citty")]))
planned(declared(validators=[no_nulls("city"), sql_check("long", "length(city) > 3")]))
rejected(declared(key="shopp"))
rejected(declared(columns=["shop", "size"]))
rejected(declared(order_by="opened"))
rejected(declared(order_by={"city": []}))
rejected(declared(key="city"))
planned(declared(columns=["shop", "city"]))

rejected(lambda app, visits: visits.filter("spent > date '2026-01-01'"))
rejected(lambda app, visits: visits.filter("array_contains(shop, 'a')"))
rejected(lambda app, visits: visits.filter("*"))
planned(lambda app, visits: visits.filter("array_contains(split(shop, ' '), 'a')"))

rejected(lambda app, visits: visits.map("visitor", "sum(spent) as total"))
rejected(lambda app, visits: visits.with_columns(letter="explode(split(shop, ''))"))
rejected(
    lambda app, visits: visits.filter("row_number() over (partition by visitor order by spent) = 1")
)
rejected(lambda app, visits: visits.filter("spent > 1 and visitor is not null or spent"))
planned(lambda app, visits: visits.flat_map("split(shop, '') as letter"))

numbered_visits = "row_number() over (partition by shop order by spent)"
rejected(lambda app, visits: visits.with_columns(place=numbered_visits))
rejected(
    lambda app, visits: visits.partition_by("shop").with_columns(place=numbered_visits), strict=True
)
planned(lambda app, visits: visits.partition_by("shop").with_columns(place=numbered_visits))


# Joins


store = SqliteTable(
    "levels.sqlite", "levels", key="visitor", columns={"visitor": "string", "level": "string"}
)
levels = RemoteTable("levels", key="visitor", write_function=store)
read = RemoteTable("levels", key="visitor", read_function=store, write_function=store)
rejected(lambda app, visits: visits.join(app.table(levels), on="visitor"))
planned(lambda app, visits: visits.join(app.table(read), on="visitor"))

rejected(lambda app, visits: visits.join(members, on="visitor"))
rejected(lambda app, visits: visits.join(Application("other").table(members), on="visitor"))
rejected(lambda app, visits: visits.join(app.input_stream("lake.members"), on="visitor"))
planned(lambda app, visits: visits.join(app.table(members), on="visitor"))


def doubly(second, name):
    def describe(app, visits):
        table = app.table(members)
        both = visits.join(table, on="visitor", name="level", select=["level"])
        both.join(second(app, table), on="visitor", name=name, prefix="again_")

    return describe


rejected(doubly(lambda app, table: app.table(members), "again"))
rejected(doubly(lambda app, table: table, "level"))
planned(doubly(lambda app, table: table, "again"))

rejected(lambda app, visits: visits.join(app.table(members), on="shop"))
rejected(lambda app, visits: visits.join(app.table(members), on={}))
rejected(
    lambda app, visits: visits.join(
        app.table(members), on={"visitor": "visitor", "shop": "visitor"}
    )
)
planned(lambda app, visits: visits.join(app.table(members), on="visitor"))

rejected(
    lambda app, visits: visits.join(
        app.table(members), on="visitor", select=["level", "visitor as level"]
    )
)
rejected(
    lambda app, visits: visits.map("*", "shop as level").join(app.table(members), on="visitor")
)
planned(
    lambda app, visits: visits.map("*", "shop as level").join(
        app.table(members), on="visitor", prefix="member_"
    )
)

rejected(
    lambda app, visits: visits.join(
        app.table(bounded_dataset("people", input="lake.members", key="person", broadcast=True)),
        on={"visitor": "person"},
    )
)
planned(
    lambda app, visits: visits.join(
        app.table(bounded_dataset("people", input="lake.members", key="visitor", broadcast=True)),
        on="visitor",
    )
)


def as_of(dataset, when, *columns, **options):
    return lambda app, visits: visits.map("visitor", *columns).join(
        app.table(dataset), on="visitor", as_of=when, **options
    )


levels_over_time = unbounded_dataset(
    "levels", input="lake.members", key="visitor", broadcast=True, history="all"
)
latest_levels = unbounded_dataset("levels", input="lake.members", key="visitor", broadcast=True)
rejected(as_of(members, "at", "current_timestamp() as at"))
rejected(as_of(latest_levels, "at", "current_timestamp() as at"))
rejected(as_of(levels_over_time, "shop", "shop"))
rejected(as_of(levels_over_time, "at", "shop"))
planned(as_of(levels_over_time, "at", "cast(shop as timestamp) as at"))

now = "current_timestamp() as at"
levels_of_one_run = unbounded_dataset(
    "levels", input="lake.members", key="visitor", broadcast=True, persistent=False
)
rejected(as_of(members, "at", now, versions="known-then", before_history="oldest"))
rejected(as_of(levels_of_one_run, "at", now, versions="known-then"))
rejected(as_of(levels_over_time, "at", now, versions="known-then", select=["interval_id"]))
planned(as_of(members, "at", now, versions="known-then"))

complete_levels = unbounded_dataset(
    "levels",
    input="lake.members",
    key="visitor",
    broadcast=True,
    history="all",
    watermark=Watermark(),
)


def waiting(dataset, records=lambda app, visits: visits):
    return lambda app, visits: records(app, visits).join(
        app.table(dataset), on="visitor", wait=timedelta(minutes=10)
    )


def count_visits(app, visits):
    minutes = Tumbling(timedelta(minutes=1))
    return visits.window(minutes, by="visitor", name="counted", aggregates={"many": Count()})


rejected(waiting(levels_over_time), event_time=ARRIVAL)
rejected(waiting(complete_levels, count_visits), event_time=ARRIVAL)
rejected(
    waiting(
        complete_levels, lambda app, visits: app.input_changes(complete_levels, event_time=ARRIVAL)
    )
)
rejected(
    lambda app, visits: visits.join(
        app.table(complete_levels),
        on="visitor",
        as_of="at",
        versions="known-then",
        wait=timedelta(minutes=10),
    ),
    event_time=ARRIVAL,
)
planned(waiting(complete_levels), event_time=ARRIVAL)


def restating(dataset=members, before=lambda visits: visits, after=None, how="left", **options):
    """Join with restate=, after what is done before, and before what is done after."""

    def describe(app, visits):
        joined = before(visits).join(
            app.table(dataset), on="visitor", how=how, restate=timedelta(days=7), **options
        )
        return joined if after is None else after(app, visits, joined)

    return describe


def newest_levels(**options):
    columns = {"visitor": "string", "shop": "string", "spent": "double", "level": "string"}
    store = SqliteTable("newest.sqlite", "newest", ["visitor"], columns=columns, create=True)
    return RemoteTable("newest", key="visitor", write_function=store, **options)


def send_to(table):
    return lambda app, visits, joined: joined.send_to(app.table(table))


def keep(table, key, **update):
    return lambda app, visits, joined: joined.update(
        app.table(table), on={key: "visitor"}, **update
    )


def merge_members(app, visits, joined):
    others = app.input_stream("lake.members").select("visitor", "level")
    both = joined.select("visitor", "level").merge(others)
    return both.send_to(app.output_stream("lake.enriched", partitions=4, key="visitor"))


def count_joined(app, visits, joined):
    return joined.window(
        Tumbling(timedelta(minutes=1)), by="visitor", name="counted", aggregates={"many": Count()}
    )


def join_twice(app, visits):
    same = visits.select("visitor", "shop").merge(
        visits.select("shop as visitor", "visitor as shop")
    )
    return same.partition_by("visitor").join(
        app.table(members), on="visitor", restate=timedelta(days=7)
    )


def upper(visits):
    return visits.map("upper(visitor) as visitor", "shop").partition_by("visitor")


by_shop = newest_levels(newest_by="shop")
levels_of_a_run = unbounded_dataset(
    "levels", input="lake.members", key="visitor", partitions=4, persistent=False
)
rejected(restating(levels_of_a_run))
planned(restating())
rejected(restating(before=upper))
planned(restating(before=lambda visits: visits.select("visitor", "upper(shop) as shop")))
rejected(restating(), broadcast=True)
rejected(join_twice)
rejected(
    lambda app, visits: (app.input_changes(members), restating()(app, visits)),
    {**streams, "changes.members": streams["lake.members"]},
)
rejected(restating(after=count_joined), event_time=ARRIVAL)
rejected(restating(after=lambda app, visits, joined: joined.broadcast()))
rejected(restating(after=merge_members))
rejected(restating(after=send_to(newest_levels())))
planned(restating(after=send_to(by_shop)))
rejected(restating(after=send_to(by_shop), how="inner"))
rejected(restating(after=keep(by_shop, "level", set={"shop": "shop"})))
added = {"key": "visitor", "add": {"spent": "spent"}}
rejected(restating(after=keep(newest_levels(idempotent=True), **added)))
rejected(restating(after=keep(newest_levels(newest_by="shop"), **added)))


# Stream joins


MINUTE = timedelta(minutes=1)
VISITS = Schema.of(visitor="string", shop="string", at="timestamp")
joinable = {
    name: TestStream(VISITS, key="visitor", partitions=4)
    for name in ("lake.visits", "lake.seen", "lake.orders")
}


def join_orders(app, **options):
    seen, orders = (
        app.input_stream(name, event_time="at") for name in ("lake.seen", "lake.orders")
    )
    return seen.join_stream(
        orders, on="visitor", within=MINUTE, **{"name": "bought", "prefix": "order_", **options}
    )


rejected(lambda app, visits: join_orders(app, prefix=""), joinable)
planned(lambda app, visits: join_orders(app, how="full"), joinable)

wide = {**joinable, "lake.orders": TestStream(VISITS, key="visitor", partitions=8)}
aside = {**joinable, "lake.orders": TestStream(VISITS, key="shop", partitions=4)}
rejected(join_visits := lambda app, visits: join_orders(app), aside)
rejected(join_visits, wide)
rejected(
    lambda app, visits: visits.join_stream(
        "lake.orders", on="visitor", within=MINUTE, name="bought"
    ),
    joinable,
)
planned(join_visits, aside, auto_repartition=True)
planned(join_visits, joinable)

again = {"on": "visitor", "within": MINUTE, "prefix": "v_"}
rejected(lambda app, visits: join_orders(app).join_stream(visits, name="again", **again), joinable)
rejected(
    lambda app, visits: (one := join_orders(app)).join_stream(
        one.filter("shop = 'a'"), name="bought", **again
    ),
    joinable,
)
planned(
    lambda app, visits: (one := join_orders(app)).join_stream(
        one.filter("shop = 'a'"), name="again", **again
    ),
    joinable,
)
rejected(
    lambda app, visits: (
        app.local_table("visits-bought-left", key="shop", schema=VISITS, partitions=4),
        join_orders(app),
    ),
    joinable,
)
rejected(lambda app, visits: visits.filter("shop = 'a'").late_records(), joinable)
planned(lambda app, visits: join_orders(app).late_records(), joinable)


# Lookups in remote tables


def looked_up(table, select=None, *columns):
    return lambda app, visits: visits.map("visitor", *columns).join(
        app.table(table), on="visitor", select=select
    )


rejected(looked_up(read, ["lvl"]))
rejected(looked_up(read, None, "shop as level"))
planned(looked_up(read, ["level as now"], "shop as level"))


class Service(TableReadFunction):
    async def get(self, key, *args): ...


service = RemoteTable("service", key="visitor", read_function=Service())
numbers = SqliteTable(
    "levels.sqlite", "numbers", key="visitor", columns={"visitor": "string", "n": "numeric"}
)
unbound = RemoteTable("numbers", key="visitor", read_function=numbers)
rejected(looked_up(service))
rejected(looked_up(service, ["level"]))
rejected(looked_up(unbound, ["n"]))
rejected(looked_up(read, {"level": "int"}))
planned(looked_up(service, {"level": "string"}))


def by_spent(expression):
    return lambda app, visits: visits.map(f"{expression} as visitor").join(
        app.table(read), on="visitor"
    )


rejected(by_spent("cast(spent as int)"))
rejected(by_spent("spent"))
planned(by_spent("cast(spent as string)"))


# Partitions

two = bounded_dataset("members-in-two", input="lake.members", key="visitor", partitions=2)
rejected(lambda app, visits: visits.join(app.table(two), on="visitor"))
planned(lambda app, visits: visits.partition_by("visitor").join(app.table(two), on="visitor"))
planned(lambda app, visits: visits.join(app.table(two), on="visitor"), auto_repartition=True)

rejected(lambda app, visits: visits.partition_by("shop").join(app.table(members), on="visitor"))
kafka = {
    **streams,
    "lake.visits": TestStream(key="visitor", partitions=4, partitioner="kafka-murmur2"),
}
rejected(lambda app, visits: visits.join(app.table(members), on="visitor"), kafka)
rejected(lambda app, visits: visits.map(lambda frame: frame).join(app.table(members), on="visitor"))
planned(lambda app, visits: visits.join(app.table(members), on="visitor").partition_by("shop"))
planned(
    lambda app, visits: visits.partition_by("visitor").join(app.table(members), on="visitor"), kafka
)
planned(
    lambda app, visits: visits.map(lambda frame: frame, keeps_partitioning=True).join(
        app.table(members), on="visitor"
    )
)

numbered = {
    "lake.visits": TestStream(
        Schema.of(visitor="bigint", shop="string"), key="visitor", partitions=4
    ),
    "lake.members": TestStream(
        Schema.of(visitor="int", level="string"), key="visitor", partitions=4
    ),
}
rejected(lambda app, visits: visits.join(app.table(members), on="visitor"), numbered)
planned(
    lambda app, visits: (
        visits.map("*", "cast(visitor as int) as visitor_key")
        .partition_by("visitor_key")
        .join(app.table(members), on={"visitor_key": "visitor"})
    ),
    numbered,
)
numbered["lake.visits"] = TestStream(key="visitor", partitions=4)
rejected(lambda app, visits: visits.join(app.table(members), on="visitor"), numbered, strict=True)
planned(lambda app, visits: visits.join(app.table(members), on="visitor"), numbered)


# Sending to tables and datasets


files = FileSource("deliveries", "jsonl", Schema.of(visitor="string", level="string"))
from_files = bounded_dataset("levels-of-files", input=files, key="visitor", partitions=4)
rejected(lambda app, visits: visits.map("visitor", "shop as level").send_to(app.table(from_files)))
rejected(lambda app, visits: visits.map("visitor", "shop as level").send_to(app.table(members)))
levels_of_now = unbounded_dataset(
    "levels-of-now", input="lake.members", key="visitor", partitions=4
)
planned(
    lambda app, visits: visits.map("visitor", "shop as level").send_to(app.table(levels_of_now))
)

rejected(lambda app, visits: visits.update(app.table(members), set={"level": "shop"}))
planned(lambda app, visits: visits.update(app.table(levels), set={"level": "shop"}))


def updated(table, **changes):
    return lambda app, visits: visits.update(app.table(table), **changes)


def sent_from_inside(key, columns, on):
    def describe(app, visits):
        store = SqliteTable("inside.sqlite", "inside", key=key, columns=columns)
        table = app.table(RemoteTable("inside", key=key, write_function=store))
        inside = visits.map("level", "named_struct('name', visitor) as visitor")
        inside.send_to(table, on=on)

    return describe


with_levels = {
    "lake.visits": TestStream(Schema.of(visitor="string", level="string"), key="visitor")
}
kinds = {"name": "string", "level": "string", "visitor": "struct<name:string>"}
rejected(sent_from_inside("visitor", kinds, None), with_levels)
rejected(sent_from_inside("visitor.name", {"visitor.name": "string"}, None), with_levels)
rejected(sent_from_inside("level", kinds, {"visitor.name": "level"}), with_levels)
planned(sent_from_inside("name", kinds, {"visitor.name": "name"}), with_levels)

newest = RemoteTable("newest-levels", key="visitor", write_function=store, newest_by="level")
rejected(updated(newest, add={"level": "1"}))
rejected(updated(levels, set={"levle": "shop"}))
rejected(updated(levels, set={"level": "cast(spent as double)"}))
planned(updated(levels, set={"level": "cast(spent as string)"}))

rejected(lambda app, visits: visits.with_columns(seen="current_timestamp()"), strict=True)
planned(lambda app, visits: visits.with_columns(seen="current_timestamp()"))

by_shop = RemoteTable(
    "last-visitors",
    key="shop",
    write_function=SqliteTable(
        "levels.sqlite", "last", key="shop", columns={"shop": "string", "visitor": "string"}
    ),
)
rejected(lambda app, visits: visits.map("shop", "visitor").send_to(app.table(by_shop)), strict=True)
planned(lambda app, visits: visits.map("shop", "visitor").send_to(app.table(by_shop)))

marked = RemoteTable("marked-levels", key="visitor", write_function=store, newest_by="level")
unnumbered = {
    **streams,
    "lake.visits": TestStream(key="visitor", partitions=4, numbered_offsets=False),
}
rejected(
    lambda app, visits: visits.map("visitor", "shop as level").send_to(app.table(marked)),
    unnumbered,
)
planned(
    lambda app, visits: visits.map("visitor", "shop as level").send_to(app.table(levels)),
    unnumbered,
)

rejected(
    lambda app, visits: visits.map("visitor", "shop as level").send_to(
        app.table(levels), marks_as="visits"
    )
)


def twice(app, visits, *names):
    table, sent = app.table(marked), visits.map("visitor", "shop as level")
    for name in names:
        sent.send_to(table, marks_as=name)


rejected(lambda app, visits: twice(app, visits, "visits", "visits"))
planned(lambda app, visits: twice(app, visits, "visits", None))


def counted(expression):
    def describe(app, visits):
        counts = app.local_table(
            "visits-of-visitors",
            key="visitor",
            schema=Schema.of(visitor="string", visits="bigint"),
            partitions=4,
        )
        return visits.map("visitor", expression).send_to(counts)

    return describe


rejected(counted("cast(1 as int) as visits"))
planned(counted("cast(1 as bigint) as visits"))

rejected(counted("count_of_ours(shop) as visits"), strict=True)
planned(counted("count_of_ours(shop) as visits"))


owner = Application("owner")
theirs = owner.local_table(
    "levels-of-owner", key="visitor", schema=Schema.of(visitor="string"), partitions=4
)
rejected(lambda app, visits: visits.send_to(app.table(theirs.dataset)))
planned(lambda app, visits: visits.join(app.table(theirs.dataset), on="visitor"))


# Windows


def summed(app, visits, column="spent"):
    aggregates = {"visits": Count(), "total": Sum(column)}
    return visits.window(
        Tumbling(timedelta(minutes=5)), by="visitor", name="totals", aggregates=aggregates
    )


rejected(summed)
planned(summed, event_time=ARRIVAL)
rejected(lambda app, visits: summed(app, visits, "shop"), event_time=ARRIVAL)
rejected(
    lambda app, visits: summed(app, visits.with_columns(**{"record$": "spent"}), "record$"),
    event_time=ARRIVAL,
)
rejected(
    lambda app, visits: summed(
        app, visits.with_columns(visitor="cast(length(shop) as double)").partition_by("visitor")
    ),
    event_time=ARRIVAL,
)
rejected(lambda app, visits: visits.late_records(), event_time=ARRIVAL)
planned(lambda app, visits: summed(app, visits).late_records(), event_time=ARRIVAL)


def after_sending(app, visits):
    return summed(app, visits.send_to(app.output_stream("lake.sent", partitions=8, key="visitor")))


def before_sending(app, visits):
    return summed(app, visits).send_to(app.output_stream("lake.sent", partitions=8, key="visitor"))


rejected(after_sending, event_time=ARRIVAL)
planned(before_sending, event_time=ARRIVAL)


def twice_over(condition):
    def describe(app, visits):
        counts = {"visits": Count()}
        minutes = visits.window(
            Tumbling(MINUTE), by="visitor", name="minutes", aggregates=counts, results="updates"
        )
        hours = {"by": "visitor", "name": "hours", "aggregates": {"total": Sum("visits")}}
        minutes.filter(condition).window(Tumbling(60 * MINUTE), **hours)

    return describe


rejected(twice_over("visits > 1"), event_time=ARRIVAL, strict=True)
planned(twice_over("visits > 1 and final"), event_time=ARRIVAL, strict=True)


# Expectations


def expecting(on_fail, column="spent", *, sends=("kept", "failed")):
    def describe(app, visits):
        checked = visits.with_columns(**{column: "1"}).expect(
            "spent > 0", name="paid", on_fail=on_fail
        )
        streams = {"kept": checked, "failed": checked}
        if on_fail == "letter":
            streams["failed"] = checked.failed_records()
        for name in sends:
            streams[name].send_to(app.output_stream(f"lake.{name}", partitions=1))

    return describe


rejected(expecting("letter", sends=["kept"]))
planned(expecting("letter"))
planned(expecting("warn"))
rejected(expecting("letter", "Failed_Rule"))


def unchecked(app, visits):
    visits.expect("spent > 0", name="paid", on_fail="fail")
    visits.send_to(app.output_stream("lake.sent", partitions=1))


def failing_late(app, visits):
    visits.send_to(app.output_stream("lake.sent", partitions=1))
    visits.expect("spent > 0", name="paid", on_fail="fail")


def failing_first(app, visits):
    checked = visits.expect("spent > 0", name="paid", on_fail="fail")
    checked.send_to(app.output_stream("lake.sent", partitions=1))


rejected(unchecked)
rejected(failing_late)
planned(failing_first)


def named_twice(name):
    def describe(app, visits):
        visits.expect("spent > 0", name="is-paid").expect("spent < 9", name=name)

    return describe


rejected(named_twice("is-paid"))
rejected(named_twice("is_paid"))
planned(named_twice("cheap"))
rejected(lambda app, visits: visits.expect("spent > 0", name="paid").failed_records())
rejected(lambda app, visits: visits.expect("spent", name="paid"))
