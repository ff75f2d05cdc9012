"""What columns are made of is read off expressions, and is not known where a part of it is not."""

from __future__ import annotations

import pytest

from dagster_adjunct.orchestration.operators.operator import PlanContext
from dagster_adjunct.orchestration.operators.records import Map
from dagster_adjunct.orchestration.operators.stream_facts import (
    SPARK,
    ColumnFacts,
    Columns,
    ColumnSources,
    LineageNode,
    StreamFacts,
    sources_from_sql,
)
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.schemas.schema import Schema
from tests.orchestration.planner.planning import application, catalog

VISITS = LineageNode("stream", "lake.visits")
MADE: ColumnSources = {
    "visitor": ((VISITS, "visitor"),),
    "Spent": ((VISITS, "spent"),),
    "update.seats": ((VISITS, "seats"),),
    "update.level": ((VISITS, "level"),),
}


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("upper(visitor)", {"visitor"}),
        ("concat(VISITOR, spent)", {"visitor", "spent"}),
        ("'spent' || visitor", {"visitor"}),
        ("transform(array(spent), visitor -> visitor + 1)", {"spent"}),
        ("update.seats + 1", {"seats"}),
        ("update", {"seats", "level"}),
        ("concat(visitor, other)", set()),
        ("visitor in (select 1)", set()),
        ("current_date", set()),
        ("if(spent > 1, current_user, visitor)", {"spent", "visitor"}),
    ],
)
def test_sources_are_those_of_all_columns_or_not_known(text: str, columns: set[str]) -> None:
    assert {column for _, column in sources_from_sql(text, MADE)} == columns


def test_a_name_given_before_is_made_of_what_it_was_made_of() -> None:
    app = application()
    app.input_stream("lake.visits")
    context = PlanContext("map-2", app, {})
    fields = {name: ColumnFacts(sources=MADE[f"update.{name}"]) for name in ("seats", "level")}
    own = {name: ColumnFacts(sources=MADE[name]) for name in ("visitor", "Spent")}
    arriving = Columns({**own, "update": ColumnFacts(fields=fields)})
    spec = Map(
        (
            "upper(visitor) as loud",
            "concat(loud, spent) as both",
            "named_struct('x', loud) as update",
        )
    )
    made = spec.derive_columns(context, [arriving]).sources
    assert {name: {column for _, column in sources} for name, sources in made.items()} == {
        "loud": {"visitor"},
        "both": {"visitor", "spent"},
        "update": set(),
        "update.x": {"visitor"},
    }
    kept = Map(("* except (spent)",)).derive_columns(context, [arriving])
    assert kept.sources.keys() == {"visitor", "update", "update.seats", "update.level"}


def test_types_of_what_is_computed_reach_the_operators_behind_it() -> None:
    facts = StreamFacts(
        "lake.visits", 4, ("k",), SPARK, Schema.of(k="string", at="timestamp", n="int")
    )
    out = StreamFacts(
        "lake.out", 4, ("k",), SPARK, Schema.of(k="string", day="date", more="bigint"), evolves=True
    )
    app = application()
    made = app.input_stream("lake.visits").map(
        "k", "to_date(at) as day", "coalesce(n, 0) + 1L as more"
    )
    made.filter("more > 1").send_to(app.output_stream("lake.out", partitions=4, key="k"))
    build_plan(app, catalog(facts, out))
