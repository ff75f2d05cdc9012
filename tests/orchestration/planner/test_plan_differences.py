"""What changed between two plans: everything that did, nothing that did not, however operators
are numbered.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest

from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.orchestration.planner.render import describe_differences
from tests.orchestration.planner.planning import application, catalog, dataset
from tests.orchestration.planner.test_planned_tables import counts, last_seen, planned, scans, tags


def orders(
    before: Callable[[Any], Any] = lambda stream: stream,
    after: Callable[[Any], Any] = lambda stream: stream,
    buckets: int = 8,
    by: str = "k",
    **options: Any,
) -> ExecutionPlan:
    app = application(**options)
    stream = before(app.input_stream("lake.s"))
    stream = stream.join(app.table(dataset("t", 8)), on="k", select=["v"]).partition_by("v")
    stream = stream.join(app.table(dataset("u", buckets)), on={"v": "k"}, select=[])
    after(stream).send_to(app.output_stream("lake.out", partitions=4, key=by))
    return build_plan(app, catalog(s=8, t=1, u=1))


def test_equal_plans_have_no_differences() -> None:
    assert orders().differences_from(orders()) == ()


def test_an_operator_in_front_is_one_new_operator_though_it_renumbers_the_rest() -> None:
    changed = orders(before=lambda stream: stream.filter("v > 0")).differences_from(orders())
    assert changed == (
        "operator filter-2 is new: v > 0",
        "operator join-3-t takes the records of filter-2, took those of input-1",
    )
    assert orders().differences_from(orders(before=lambda stream: stream.filter("v > 0"))) == (
        "operator filter-2 is gone: v > 0",
        "operator join-2-t takes the records of input-1, took those of filter-2",
    )


def test_what_an_operator_does_is_reported_by_what_it_did() -> None:
    def keep(condition: str) -> ExecutionPlan:
        return orders(after=lambda stream: stream.filter(condition))

    assert keep("v > 1").differences_from(keep("v > 0")) == (
        "operator filter-5 does v > 1, did v > 0",
    )


def test_counts_joins_and_exchanges_are_reported() -> None:
    reported = "\n".join(orders(buckets=4).differences_from(orders()))
    for part in (
        "operator partition-by-3 has 4 partitions, had 8",
        "stream app-partition-by-3 (intermediate) has 4 partitions, had 8",
        "stream lake.u (u) has 4 partitions, had 8",
        "proven join join-4-u has 4 partitions, had 8",
        "exchange at partition-by-3 (partition_by) has 4 partitions, had 8",
    ):
        assert part in reported
    reported = "\n".join(orders(by="v").differences_from(orders()))
    assert "operator send-to-5 is partitioned by v, was by k" in reported
    assert "exchange at send-to-5 (output) is partitioned by v, was by k" in reported


def test_the_order_of_a_table_and_columns_are_reported() -> None:
    reported = planned(last_seen(tags(newest_by="at"))).differences_from(planned(last_seen(tags())))
    assert any("keeps the order newest, kept per source partition" in line for line in reported)
    assert any(
        line.startswith("note is gone: Table tags: order holds per source partition only")
        for line in reported
    )
    wider = planned(last_seen(tags()), scans(("tag",))).differences_from(planned(last_seen(tags())))
    assert any("keeps the order per key" in line for line in wider)
    columns = orders(after=lambda s: s.map("k", "v", "1 as one")).differences_from(
        orders(after=lambda s: s.map("v", "k", "2 as two"))
    )
    assert "operator map-5: new columns one; columns two are gone" in columns
    swapped = orders(after=lambda s: s.map("k", "v")).differences_from(
        orders(after=lambda s: s.map("v", "k"))
    )
    assert "operator map-5: the columns are in another order: k, v" in swapped


def test_a_send_whose_marks_are_others_is_reported() -> None:
    reported = planned(counts(None, None)).differences_from(planned(counts(None)))
    assert any("marks applied records as counts#2, did as counts" in line for line in reported)
    named = planned(counts("late", None)).differences_from(planned(counts(None)))
    assert not any("marks applied records" in line for line in named)


def test_another_engine_is_reported_and_what_needs_spark_then() -> None:
    assert orders(engine="auto").differences_from(orders(engine="spark")) == (
        "need of Spark at join-2-t (the key k, whose type is unknown) is new",
        "need of Spark at join-4-u (the key v, whose type is unknown) is new",
        "the plan: has the engine auto, had spark",
    )


def test_whatever_member_changes_is_reported() -> None:
    """Of both plans, each value in turn is made another: silence would be a difference that
    nobody hears of.
    """
    for document in (orders().to_json(), planned(last_seen(tags())).to_json()):
        places = list(leaves(document))
        for place in random.Random(1).sample(places, min(len(places), 150)):
            other = copy.deepcopy(document)
            *way, last = place
            part: Any = other
            for step in way:
                part = part[step]
            part[last] = 77 if isinstance(part[last], int) else "another"
            if place != ("format",):
                assert describe_differences(document, other), place
        assert describe_differences(document, copy.deepcopy(document)) == ()


def leaves(value: Any, *way: Any) -> Any:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    if not items and not isinstance(value, dict | list) and way:
        yield way
    for name, item in items:
        yield from leaves(item, *way, name)


def test_what_only_one_version_writes_is_not_a_difference() -> None:
    older, newer = orders().to_json(), orders().to_json()
    for item in newer["operators"]:
        item["mood"] = "calm"
    newer["colour"] = "green"
    del older["tables"]
    assert describe_differences(older, newer) == ()


@pytest.mark.lengthy
@pytest.mark.parametrize("number", [1_000])
def test_many_operators_are_compared(number: int) -> None:
    def chain(length: int) -> ExecutionPlan:
        app = application()
        stream = app.input_stream("lake.s")
        for _ in range(length):
            stream = stream.filter("k > 0")
        return build_plan(app, catalog(s=8))

    assert len(chain(number + 1).differences_from(chain(number))) == 1
