"""Spark's analyser over no records: nothing that it accepts is refused without it, and types and
names are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.sql.checking import check_expression, check_expressions
from dagster_adjunct.resources.sql.expression import parse_expression
from dagster_adjunct.resources.sql.types import types_differ
from tests.resources.sql.drawn_expressions import DDL, TYPES, Drawn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

NAMES = tuple(TYPES)


def test_spark_agrees(spark: SparkSession) -> None:
    assert list(differences(spark, seed=1, expressions=100, lists=12)) == []


@pytest.mark.long
@pytest.mark.parametrize("ansi", ["true", "false"])
@pytest.mark.parametrize("seed", range(2, 5))
def test_spark_agrees_on_many(spark: SparkSession, seed: int, ansi: str) -> None:
    before = spark.conf.get("spark.sql.ansi.enabled")
    spark.conf.set("spark.sql.ansi.enabled", ansi)
    try:
        assert list(differences(spark, seed, expressions=4_000, lists=400)) == []
    finally:
        spark.conf.set("spark.sql.ansi.enabled", str(before))


def differences(
    spark: SparkSession, seed: int, expressions: int, lists: int
) -> Iterator[tuple[Any, ...]]:
    """Yield what is judged otherwise than by Spark; enough has to be accepted, and of enough the
    type be known.
    """
    frame = spark.createDataFrame([], DDL)
    drawn = Drawn(seed)
    accepted = typed = refused = 0
    for _ in range(expressions):
        text = drawn.item()
        kind, error = judged(lambda text=text: check_expression("map-1", text, NAMES, TYPES))  # type: ignore[misc]
        schema = analysed(frame, text)
        refused += error is not None
        if schema is None:
            continue
        accepted += 1
        typed += kind is not None
        yield from _unlike(text, kind, error, schema)
        if (
            kind not in (None, "boolean", "void")
            and parse_expression(text).alias is None
            and filters(frame, text)
        ):
            yield text, kind, "is a condition"
    for _ in range(lists):
        texts = drawn.items()
        items, error = judged(lambda texts=texts: check_expressions("map-1", texts, NAMES, TYPES))  # type: ignore[misc]
        schema = analysed(frame, *texts)
        if schema is None:
            continue
        if items is None:
            yield texts, str(error), "accepted"
            continue
        known = []
        for item, _ in items:
            known += list(item.expand_star(NAMES)) if item.star else [item.name]
        if [name for name in known if name] != schema.names:
            yield texts, known, schema.names
        for item, kind in items:
            if kind is not None and types_differ(
                schema[str(item.name)].dataType.simpleString(), kind
            ):
                yield texts, kind, schema[str(item.name)].dataType.simpleString()
    if accepted < expressions * 0.3 or typed < accepted * 0.5 or refused < expressions * 0.05:
        yield "too little is drawn", accepted, typed, refused


def _unlike(
    text: str, kind: str | None, error: PlanningError | None, schema: StructType
) -> Iterator[tuple[Any, ...]]:
    if error is not None:
        yield text, str(error), "accepted"
    if len(schema) != 1:
        return
    if kind is not None and types_differ(kind, schema[0].dataType.simpleString()):
        yield text, kind, schema[0].dataType.simpleString()
    name = check_expressions("map-1", [text], NAMES)[0][0].name if error is None else None
    if name is not None and name != schema[0].name:
        yield text, name, schema[0].name


def judged(judge: Callable[[], Any]) -> tuple[Any, PlanningError | None]:
    try:
        return judge(), None
    except PlanningError as error:
        return None, error


def analysed(frame: DataFrame, *texts: str) -> StructType | None:
    """Return the columns that Spark makes of expressions, None where it refuses them."""
    try:
        return frame.selectExpr(*texts).schema
    except _spark_errors():
        return None


def filters(frame: DataFrame, text: str) -> bool:
    try:
        return bool(frame.filter(text).schema)
    except _spark_errors():
        return False


@cache
def _spark_errors() -> tuple[type[Exception], ...]:
    """What Spark refuses expressions with; a mistake of its own comes bare."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    return PySparkException, Py4JJavaError
