"""What is told of results of a user's function that are not as it declared them."""

from __future__ import annotations

import traceback
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct import Schema
from dagster_adjunct.errors import SchemaMismatchError
from dagster_adjunct.orchestration.operators.record_functions import RecordCall, _made


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda record: {"n": record["email"]}, "gave column 'n' a value that is no int"),
        (lambda record: {record["email"]: 1}, "has {other}; its schema says n"),
    ],
)
def test_a_result_that_is_not_as_declared_tells_no_value_where_columns_are_sensitive(function: Any, said: str) -> None:
    batch = pa.RecordBatch.from_pydict({"k": ["a"], "email": ["ada@mail"]})
    for sensitive, other in ((frozenset[str](), "the columns ada@mail"), (frozenset({"email"}), "other columns")):
        call = RecordCall("flat-map-2", function, Schema.of(n="int"), sensitive=sensitive)
        with pytest.raises(SchemaMismatchError) as caught:
            list(_made(batch, call, ["k"]))
        assert said.format(other=other) in caught.value.problem
        assert ("ada@mail" in "".join(traceback.format_exception(caught.value))) is not bool(sensitive)
