"""Expressions evaluated by Arrow, against the values that Spark's documentation gives."""

from __future__ import annotations

import pyarrow as pa

from dagster_adjunct.resources.sql.arrow_evaluation import ArrowExpression, compile_expression


def test_an_addition_is_evaluated() -> None:
    compiled = compile_expression("a + b * 2 as c", {"a": "int", "b": "bigint"})
    assert isinstance(compiled, ArrowExpression)
    assert (compiled.type, compiled.columns) == ("bigint", ("a", "b"))
    table = pa.table({"a": pa.array([1, None], pa.int32()), "b": pa.array([2, 3], pa.int64())})
    assert compiled.evaluate(table).to_pylist() == [5, None]
