"""Expressions that give other records in a repeated batch are told in the plan, and refused
where it is strict.
"""

from __future__ import annotations

import pytest

from dagster_adjunct.orchestration.operators.stream_facts import SPARK, StreamFacts
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.schemas.schema import Schema
from tests.orchestration.planner.planning import application, catalog

COLUMNS = {"k": "string", "ts": "timestamp", "n": "int", "current_date": "int"}
TYPED = StreamFacts("lake.s", 2, ("k",), SPARK, Schema.of(COLUMNS))


def noted(condition: str, **options: bool) -> list[str]:
    app = application(**options)
    app.input_stream("lake.s").filter(condition)
    return [note for note in build_plan(app, catalog(TYPED)).notes if "is repeated" in note]


@pytest.mark.parametrize(
    ("condition", "named"),
    [
        ("rand() < 0.5", "rand()"),
        ("ts < CURRENT_TIMESTAMP", "current_timestamp()"),
        ("n > 0 and ts < now() - interval 1 day", "now()"),
        ("uuid() > k or rand(3) > 0.5", "uuid(), rand()"),
        ("n > unix_timestamp( )", "unix_timestamp()"),
        ("ts < timestamp'now'", "'now' as a time"),
        ("ts < timestamp ' Today UTC'", "'today' as a time"),
        ("ts < cast('now' as timestamp)", "'now' as a time"),
        ('ts < to_date("yesterday")', "'yesterday' as a time"),
        ("ts < 'now'", "'now' as a time"),
        ("('Today ') <=> ts", "'today' as a time"),
        ("ts between 'yesterday' and 'tomorrow'", "'yesterday' as a time, 'tomorrow' as a time"),
        ("datediff(ts, 'today') > 1 and hour('now') > 3", "'today' as a time, 'now' as a time"),
        ("case ts when 'now' then true end", "'now' as a time"),
        ("date_format('now', 'yyyy') = k", "'now' as a time"),
        ("k = current_user() or k = session_user", "current_user(), session_user()"),
        ("k = base64(aes_encrypt(k, '0000111122223333'))", "aes_encrypt()"),
        ("k = reflect('java.util.UUID', 'randomUUID')", "reflect()"),
    ],
)
def test_clock_and_chance_are_noted_by_operator(condition: str, named: str) -> None:
    (note,) = noted(condition)
    assert note.startswith("filter-2 gives other records")
    assert f"because of {named}:" in note


@pytest.mark.parametrize(
    "condition",
    [
        "k = 'now() or current_date'",
        "`current_date` > 3",
        "brand(k) > 1",
        "k = 'x'",
        "k = 'now'",
        "k in ('today', 'now') or upper('now') = k or k like 'now%'",
        "n < unix_timestamp(k)",
        "ts < timestamp'2026-01-01'",
    ],
)
def test_what_only_looks_like_them_is_not(condition: str) -> None:
    assert noted(condition) == []


def test_a_strict_application_is_refused_with_the_next_step() -> None:
    with pytest.raises(PlanningError, match=r"filter-2 gives other records .* rand\(\)") as caught:
        noted("rand() < 0.5", strict=True)
    assert caught.value.operator == "filter-2"
    assert "Take the value from the record" in caught.value.next_step
