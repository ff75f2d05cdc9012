"""Casts that planning errors suggest can be planned, for every pair of types."""

from __future__ import annotations

import re
from itertools import combinations

import pytest

from dagster_adjunct import Application, Schema
from dagster_adjunct.errors import PlanningError
from dagster_adjunct.orchestration.operators.as_of_join import expression_of_time
from dagster_adjunct.resources.sql.checking import check_expression
from dagster_adjunct.testing import TestStream, assert_plannable

TYPES = (
    "int",
    "bigint",
    "double",
    "decimal(10,2)",
    "string",
    "boolean",
    "date",
    "timestamp",
    "binary",
    "array<int>",
    "struct<a:int>",
)
_CAST = re.compile(r'Cast it in (both|one of them): .with_columns\(v="(cast\(v as (.*)\))"\)\.')


def merged(one: str, other: str, casts: tuple[str | None, str | None] = (None, None)) -> None:
    """Plan a merge of two streams whose columns `v` have these types, perhaps after casts."""
    given = {
        f"lake.s{number}": TestStream(Schema.of(k="string", v=kind), key="k", partitions=2)
        for number, kind in enumerate((one, other))
    }
    app = Application("merged")
    inputs = []
    for name, cast in zip(given, casts, strict=True):
        stream = app.input_stream(name)
        inputs.append(stream if cast is None else stream.with_columns(v=cast))
    inputs[0].merge(inputs[1])
    assert_plannable(app, given)


@pytest.mark.parametrize(("one", "other"), list(combinations(TYPES, 2)))
def test_the_advised_cast_lets_two_streams_be_merged(one: str, other: str) -> None:
    with pytest.raises(PlanningError) as refused:
        merged(one, other)
    advised = _CAST.fullmatch(refused.value.next_step)
    assert advised is not None, refused.value.next_step
    where, cast, target = advised.groups()
    in_both = where == "both"
    first = cast if in_both or target == other else None
    second = cast if in_both or target == one else None
    merged(one, other, (first, second))


@pytest.mark.parametrize("kind", TYPES)
def test_the_advised_time_of_a_record_is_a_timestamp(kind: str) -> None:
    advised = expression_of_time("v", kind)
    if advised is not None:
        assert check_expression("map-1", advised, ["v"], {"v": kind}) == "timestamp"
    expected = kind in ("int", "bigint", "double", "decimal(10,2)", "string")
    assert (advised is not None) == expected
