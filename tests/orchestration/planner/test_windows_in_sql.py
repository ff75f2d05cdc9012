"""Windows in expressions, `over (partition by …)`: over records that lie together, and of one
batch.
"""

from __future__ import annotations

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.stream_facts import SPARK, StreamFacts
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.schemas.schema import Schema
from tests.orchestration.planner.planning import application, catalog

KINDS = Schema.of(k="string", n="int", day="date")
FACTS = catalog(
    StreamFacts("lake.s", 4, ("k",), SPARK, KINDS),
    StreamFacts("lake.m", 4, ("k",), "kafka-murmur2", KINDS),
)


def described(*expressions: str, of: str = "lake.s", **options: object) -> Application:
    app = application(**options)
    app.input_stream(of).map("*", *expressions)
    return app


@pytest.mark.parametrize(
    ("expression", "problem", "mended"),
    [
        (
            "sum(n) over (partition by n) as t",
            "the records of one (n) in one partition, but they are partitioned by (k)",
            '("n") before',
        ),
        (
            "1 + max(n) over (partition by n, day) as t",
            "the records of one (n, day)",
            '("n", "day") before',
        ),
        (
            "count(*) filter (where n > 1) over (partition by `day` order by n) as t",
            "of one (",
            '("day") before',
        ),
        (
            "row_number() over (partition by upper(k) order by n) as t",
            "of one (UPPER(k))",
            "Partition the window by",
        ),
        (
            "sum(n) over () as t",
            (
                "needs all records in one partition, but they are partitioned by (k) with"
                " spark-murmur3"
            ),
            "Partition the",
        ),
        (
            "lag(n) over (order by day) as t",
            "needs all records in one partition",
            "Partition the window by columns",
        ),
    ],
)
def test_a_window_over_records_that_lie_apart_is_refused(
    expression: str, problem: str, mended: str
):
    app = described(expression)
    with pytest.raises(PlanningError) as caught:
        build_plan(app, FACTS)
    assert problem in caught.value.problem
    assert mended in caught.value.next_step
    assert caught.value.operator == "map-2"
    assert "test_windows_in_sql.py:" in str(caught.value.declared_at)


@pytest.mark.parametrize("columns", ["k", "K", "n, k", "(k)", "`k`, upper(k)"])
def test_a_window_over_co_located_records_is_noted_and_rejected_if_strict(columns: str):
    expression = f"sum(n) over (partition by {columns}) as t"
    execution_plan = build_plan(described(expression), FACTS)
    (note,) = (note for note in execution_plan.notes if "one batch" in note)
    assert note.startswith(
        "map-2: sum() over (…) sees the records of one batch only: its result depends"
    )
    assert execution_plan.operators[-1].partitioned_by == ("k",)
    with pytest.raises(PlanningError) as failure:
        build_plan(described(expression, strict=True), FACTS)
    assert failure.value.operator == "map-2"


def test_the_mend_of_the_message_is_one():
    app = application()
    app.input_stream("lake.s").partition_by("n").map("*", "sum(n) over (partition by n) as t")
    assert [exchange.operator for exchange in build_plan(app, FACTS).exchanges] == [
        "partition-by-2"
    ]


def test_where_records_lie_by_another_hash_or_nobody_knows_a_window_is_refused():
    with pytest.raises(PlanningError) as failure:
        build_plan(described("sum(n) over (partition by k) as t", of="lake.m"), FACTS)
    assert failure.value.operator == "map-2"
    app = application()
    app.input_stream("lake.s").map(lambda frame: frame).with_columns(
        t="sum(n) over (partition by k)"
    )
    with pytest.raises(PlanningError) as failure:
        build_plan(app, FACTS)
    assert failure.value.operator == "with-columns-3"


def test_behind_a_merge_of_different_counts_records_lie_apart():
    app = application()
    merged = app.input_stream("lake.s").merge(app.input_stream("lake.r"))
    merged.with_columns(t="sum(n) over (partition by k)")
    kinds = StreamFacts("lake.r", 4, ("k",), SPARK, KINDS)
    build_plan(app, FACTS | catalog(kinds))
    with pytest.raises(PlanningError) as failure:
        build_plan(app, FACTS | catalog(StreamFacts("lake.r", 8, ("k",), SPARK, KINDS)))
    assert failure.value.operator == "with-columns-4"


def test_the_time_of_a_record_is_its_own():
    app = application()
    app.input_stream("lake.s", event_time="max(timestamp_seconds(n)) over (partition by k)")
    with pytest.raises(PlanningError) as failure:
        build_plan(app, FACTS)
    assert failure.value.operator == "input-1"


def test_a_column_that_is_called_over_is_no_window():
    execution_plan = build_plan(
        described("n as over", "over + 1 as more", "'over ()' as text"), FACTS
    )
    assert not [note for note in execution_plan.notes if "one batch" in note]
