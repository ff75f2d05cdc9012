"""select, with_columns, flat_map and partition_by by expressions: the columns that leave, and
where records lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.message_stream import MessageStream
from dagster_adjunct.orchestration.operators.stream_facts import SPARK, StreamFacts
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError, PlanningError
from dagster_adjunct.resources.schemas.schema import Schema
from tests.orchestration.planner.planning import catalog, dataset

VISITS = StreamFacts(
    "lake.visits",
    4,
    ("k",),
    SPARK,
    Schema.of(k="string", shop="string", spent="double", words="string"),
)
MADE = Schema.of(k="string", word="string")


def several(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"k": record["k"], "word": word} for word in record["words"].split()]


def after(
    make: Callable[[MessageStream], MessageStream],
) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """Return the columns behind the operators that `make` adds, and by which of them records are
    partitioned.
    """
    app = Application("app")
    stream = make(app.input_stream("lake.visits"))
    planned = build_plan(app, catalog(VISITS)).operator(stream.operator)
    return planned.columns, planned.partitioned_by


@pytest.mark.parametrize(
    ("expression", "needs"), [("spent + 1", True), ("spent + 1 as more", False), ("shop", False)]
)
def test_an_expression_whose_column_only_spark_can_name_needs_spark(
    expression: str, needs: bool
) -> None:
    app = Application("app", engine="auto")
    app.input_stream("lake.visits").map("k", expression).send_to(
        app.output_stream("lake.out", partitions=1)
    )
    assert [need.operator for need in build_plan(app, catalog(VISITS)).engine.needs_spark] == [
        "map-2"
    ] * needs


ALL = ("k", "shop", "spent", "words")
CASES: dict[
    str, tuple[Callable[[MessageStream], MessageStream], tuple[str, ...], tuple[str, ...]]
] = {
    "select keeps exactly these": (lambda s: s.select("spent", "k"), ("spent", "k"), ("k",)),
    "select renames the key": (
        lambda s: s.select("k as visitor", "spent"),
        ("visitor", "spent"),
        ("visitor",),
    ),
    "select drops the key": (lambda s: s.select("spent"), ("spent",), ()),
    "select computes the key anew": (lambda s: s.select("upper(k) as k"), ("k",), ()),
    "with_columns adds": (
        lambda s: s.with_columns(gross="spent * 1.2", n="1"),
        (*ALL, "gross", "n"),
        ("k",),
    ),
    "with_columns replaces in place": (lambda s: s.with_columns(shop="upper(shop)"), ALL, ("k",)),
    "with_columns replaces the key": (lambda s: s.with_columns(k="upper(k)"), ALL, ()),
    "with_columns gives the key a new case": (
        lambda s: s.with_columns(K="k"),
        ("K", "shop", "spent", "words"),
        ("K",),
    ),
    "with_columns puts another column in place of the key": (
        lambda s: s.with_columns(k="shop"),
        ALL,
        (),
    ),
    "with_columns leaves the key as it is": (
        lambda s: s.with_columns(k="k", spent="0D"),
        ALL,
        ("k",),
    ),
    "flat_map adds the element": (
        lambda s: s.flat_map("split(words, ' ') as word"),
        (*ALL, "word"),
        ("k",),
    ),
    "flat_map replaces the array": (
        lambda s: s.flat_map("split(words, ' ') as words"),
        ALL,
        ("k",),
    ),
    "flat_map replaces the key": (lambda s: s.flat_map("split(words, ' ') as k"), ALL, ()),
    "flat_map by a function": (lambda s: s.flat_map(several, schema=MADE), ("k", "word"), ()),
    "flat_map by a function that promises": (
        lambda s: s.flat_map(several, schema=MADE, keeps_partitioning=True),
        ("k", "word"),
        ("k",),
    ),
    "partition_by an expression": (
        lambda s: s.partition_by("upper(shop) as shop_key"),
        (*ALL, "shop_key"),
        ("shop_key",),
    ),
    "partition_by a column with a space": (
        lambda s: s.with_columns(**{"loud name": "k"}).partition_by("loud name"),
        (*ALL, "loud name"),
        ("loud name",),
    ),
    "partition_by both": (
        lambda s: s.partition_by("k", "upper(shop) as shop_key"),
        (*ALL, "shop_key"),
        ("k", "shop_key"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_columns_and_partitioning_are_known_behind(case: str) -> None:
    make, columns, by = CASES[case]
    assert after(make) == (columns, by)


REFUSED: dict[str, tuple[Callable[[MessageStream], MessageStream], type[AdjunctError], str]] = {
    "select of nothing": (lambda s: s.select(), ConfigurationError, "names no column"),
    "select without a name": (
        lambda s: s.select("upper(k)"),
        ConfigurationError,
        "expected a column",
    ),
    "select of all": (lambda s: s.select("*"), ConfigurationError, r"with_columns\(\)"),
    "select of what is not there": (
        lambda s: s.select("kk"),
        PlanningError,
        "select-2: the stream has no column 'kk'",
    ),
    "select twice": (
        lambda s: s.select("k", "shop as K"),
        PlanningError,
        "select-2: two columns would be called",
    ),
    "with nothing": (lambda s: s.with_columns(), ConfigurationError, "names no column"),
    "with a hidden name": (
        lambda s: s.with_columns(__offset="1"),
        ConfigurationError,
        "begin with '__'",
    ),
    "with a name in two cases": (
        lambda s: s.with_columns(n="1", N="2"),
        ConfigurationError,
        "twice",
    ),
    "with what is not there": (
        lambda s: s.with_columns(n="kk"),
        PlanningError,
        "with-columns-2.*no column 'kk'",
    ),
    "elements without a name": (
        lambda s: s.flat_map("split(words, ' ')"),
        ConfigurationError,
        "name for the element",
    ),
    "elements of what is not there": (
        lambda s: s.flat_map("wordz"),
        PlanningError,
        "flat-map-2.*no column 'wordz'",
    ),
    "elements of a text": (
        lambda s: s.flat_map("words as word"),
        PlanningError,
        "flat-map-2: words is string, which has no elements",
    ),
    "with a function of what is not there": (
        lambda s: s.with_columns(n="upper(shopp)"),
        PlanningError,
        "no column 'shopp'.*Did you mean 'shop'",
    ),
    "elements with a schema": (
        lambda s: s.flat_map("words", schema=MADE),
        ConfigurationError,
        "for functions",
    ),
    "function without a schema": (
        lambda s: s.flat_map(several),
        ConfigurationError,
        "the columns of the results",
    ),
    "function with keep_empty": (
        lambda s: s.flat_map(several, schema=MADE, keep_empty=True),
        ConfigurationError,
        "decides itself",
    ),
    "a promise without the key": (
        lambda s: s.flat_map(several, schema=Schema.of(word="string"), keeps_partitioning=True),
        PlanningError,
        r"several\(\) returns with keeps_partitioning=True has no column 'k'",
    ),
    "partition_by without a name": (
        lambda s: s.partition_by("upper(shop)"),
        PlanningError,
        "partition-by-2.*an expression needs a name",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_is_refused(case: str) -> None:
    make, kind, message = REFUSED[case]
    with pytest.raises(AdjunctError, match=message) as refused:
        after(make)
    assert type(refused.value) is kind
    assert refused.value.next_step or refused.value.facts["argument"]


def test_a_join_by_the_expression_is_proven() -> None:
    app = Application("app")
    visits = app.input_stream("lake.visits").partition_by("upper(shop) as shop_key")
    join = visits.join(app.table(dataset("shops", 2)), on={"shop_key": "k"}, select=["v"])
    planned = build_plan(
        app,
        catalog(
            VISITS, StreamFacts("lake.shops", 1, ("k",), SPARK, Schema.of(k="string", v="int"))
        ),
    )
    assert planned.operator(join.operator).partitions == 2
    assert "partition-by-3  [2 by shop_key]  by shop_key" in planned.render()
