"""Types of expressions over nested columns, and what is rejected, compared with Spark's analyser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.resources.schemas.types import type_from_spark
from dagster_adjunct.resources.sql.checking import check_expression
from dagster_adjunct.resources.sql.types import types_differ
from tests.resources.sql.drawn_nested import DDL, TYPES, draw, draw_lambda
from tests.resources.sql.test_spark_agrees import analysed, judged

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_spark_agrees(spark: SparkSession) -> None:
    assert list(differences(spark, seed=1, expressions=120)) == []


def test_spark_agrees_on_lambdas(spark: SparkSession) -> None:
    assert list(differences(spark, seed=1, expressions=120, drawn=draw_lambda)) == []


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 5))
def test_spark_agrees_on_many(spark: SparkSession, seed: int) -> None:
    assert list(differences(spark, seed, expressions=4_000)) == []
    assert list(differences(spark, seed, expressions=4_000, drawn=draw_lambda)) == []


def differences(
    spark: SparkSession, seed: int, expressions: int, drawn: Callable[[Random], str] = draw
) -> Iterator[tuple[Any, ...]]:
    """Yield what is judged otherwise than by Spark; enough is accepted, rejected and typed."""
    frame = spark.createDataFrame([], DDL)
    random = Random(seed)
    accepted = typed = refused = 0
    for _ in range(expressions):
        text = drawn(random)
        kind, error = judged(lambda text=text: check_expression("map-1", text, tuple(TYPES), TYPES))  # type: ignore[misc]
        schema = analysed(frame, text)
        refused += error is not None
        if schema is None:
            continue
        accepted += 1
        typed += kind is not None and "…" not in kind
        found = type_from_spark(schema[0].dataType)
        if error is not None:
            yield text, str(error), found
        elif kind is not None and types_differ(kind, found):
            yield text, kind, found
    if accepted < expressions * 0.15 or typed < accepted * 0.6 or refused < expressions * 0.1:
        yield "too little is drawn", accepted, typed, refused
