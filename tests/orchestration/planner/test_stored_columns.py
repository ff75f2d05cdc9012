"""What is sent to a stream that is there: more and wider columns are planned, all else is refused."""

from __future__ import annotations

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.stream_facts import Catalog
from dagster_adjunct.orchestration.planner import SPARK, StreamFacts, plan
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.schemas.schema import Schema

INPUT = StreamFacts("lake.s", 2, ("k",), SPARK, Schema.of(k="string", v="int", x="double"))


def sending(*expressions: str) -> Application:
    app = Application("app")
    app.input_stream("lake.s").map(*expressions).send_to(app.output_stream("lake.out", partitions=2, key="k"))
    return app


def world(*, evolves: bool = True, **columns: str) -> Catalog:
    return {"lake.s": INPUT, "lake.out": StreamFacts("lake.out", 2, ("k",), SPARK, Schema.of(columns), evolves)}


@pytest.mark.parametrize(
    "expressions",
    [
        ("*",),
        ("*", "1 as one"),
        ("k", "cast(v as bigint) as v"),
        ("k", "v + 1 as v"),
        ("v", "k"),
        ("k", "one_of_ours(k) as v"),
    ],
)
def test_more_and_wider_columns_in_any_order_are_planned(expressions: tuple[str, ...]) -> None:
    plan(sending(*expressions), world(k="string", v="int"))


@pytest.mark.parametrize(
    ("expressions", "said"),
    [
        (("k",), r"map|send-to-3: stream lake\.out .*v \(int\) is removed"),
        (("k", "v as w"), r"v \(int\) is removed"),
        (("k", "v as V"), r"v \(int\) is called V"),
        (("k", "cast(v as tinyint) as v"), "v is tinyint, was int"),
        (("k", "upper(k) as v"), "v is string, was int"),
        (("k", "x as v"), "v is double, was int|whose values"),
        (("cast(v as bigint) as k", "v"), "k is bigint, was string, and is a column of the key"),
    ],
)
def test_what_records_that_are_there_can_not_be_read_with_is_refused(expressions: tuple[str, ...], said: str) -> None:
    if expressions == ("k", "x as v"):
        plan(sending(*expressions), world(k="string", v="int"))  # every int is a double: it is widened
        expressions, said = ("k", "cast(x as string) as v"), "v is string, was int"
    with pytest.raises(PlanningError, match=said) as caught:
        plan(sending(*expressions), world(k="string", v="int"))
    assert "adjunct stream delete out" in str(caught.value)


def test_a_system_that_says_nothing_of_evolving_is_left_to_itself() -> None:
    plan(sending("k"), world(evolves=False, k="string", v="int"))
