"""What Arrow computes, compared with Spark value by value and type by type, on drawn expressions
and records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_adjunct.resources.sql.arrow_expressions import ArrowExpression, compile_expression
from dagster_adjunct.resources.sql.arrow_kernels import NeedsSpark
from tests.resources.sql.drawn_evaluations import TYPES, DrawnEvaluation
from tests.rounds import rounds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EXPRESSIONS = 120
"""Drawn in a round."""
FILTERS = 5
"""Conditions of a round that also filter the records."""


@pytest.mark.rounds
@pytest.mark.parametrize("seed", rounds([2], range(60)))
def test_arrow_agrees_with_spark(spark: SparkSession, seed: int, tmp_path: Path) -> None:
    assert list(differences(spark, seed, tmp_path / "records.parquet")) == []


def differences(spark: SparkSession, seed: int, path: Path) -> Iterator[tuple[Any, ...]]:
    """Yield expressions for which Arrow has another value or type than Spark, or Spark an error."""
    drawn = DrawnEvaluation(seed)
    table = drawn.table(rows=30, extreme=seed % 3 == 1, ascii_only=seed % 3 == 0)
    texts = list(dict.fromkeys(drawn.expression() for _ in range(EXPRESSIONS)))
    computed: dict[str, tuple[str, pa.Array]] = {}
    taken = 0
    for text in texts:
        compiled = compile_expression(text, TYPES)
        if isinstance(compiled, ArrowExpression):
            taken += 1
            try:
                computed[text] = compiled.type, compiled.evaluate(table)
            except NeedsSpark:
                continue
    if taken < EXPRESSIONS * 0.6 or len(computed) < EXPRESSIONS * 0.4:
        yield "too little is taken", taken, len(computed)
    pq.write_table(table, path)  # over records in memory, Spark would skip most of its optimizer
    frame = spark.read.parquet(str(path))
    for text, kind, values in by_spark(frame, list(computed)):
        expected = computed[text]
        if (kind, plain(values)) != (expected[0], plain(expected[1])) or values.type != expected[
            1
        ].type:
            different = [
                pair
                for pair in zip(plain(expected[1]), plain(values), strict=False)
                if pair[0] != pair[1]
            ]
            yield text, expected[0], kind, different[:3]
    conditions = [
        text for text, (kind, _) in computed.items() if kind == "boolean" and " as " not in text
    ]
    for text in conditions[:FILTERS]:
        expected_rows = computed[text][1].true_count
        if (rows := filtered_rows(frame, text)) != expected_rows:
            yield text, f"filter keeps {expected_rows}", rows


def by_spark(frame: DataFrame, texts: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield each expression with the type and the values that Spark has for it, or "error" and
    the error.
    """
    import pyspark.sql.functions as F
    from pyspark.errors import PySparkException

    try:
        selected = frame.select(
            *[F.expr(text).alias(f"_{number}") for number, text in enumerate(texts)]
        )
        result = selected.toArrow()
    except PySparkException as error:
        if len(texts) == 1:
            yield texts[0], f"error {str(error)[:200]}", pa.array([])
            return
        half = len(texts) // 2
        yield from by_spark(frame, texts[:half])
        yield from by_spark(frame, texts[half:])
        return
    for number, text in enumerate(texts):
        yield (
            text,
            selected.schema[number].dataType.simpleString(),
            result.column(number).combine_chunks(),
        )


def filtered_rows(frame: DataFrame, condition: str) -> int | str:
    """Return how many records Spark keeps: it optimizes a filter otherwise than a column."""
    from pyspark.errors import PySparkException

    try:
        return frame.filter(condition).count()
    except PySparkException as error:
        return f"error {str(error)[:200]}"


def plain(values: pa.Array) -> list[str]:
    """Return values as texts that tell apart 0.0 and -0.0, and that any year has."""
    if pa.types.is_temporal(values.type):
        values = values.cast(pa.int32() if pa.types.is_date32(values.type) else pa.int64())
    return [repr(value) for value in values.to_pylist()]
