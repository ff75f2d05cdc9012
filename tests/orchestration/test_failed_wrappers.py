"""The operator whose function failed is found however the function is wrapped."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import PythonException

from dagster_adjunct import Application, Schema
from dagster_adjunct.orchestration.step.failures import FailedBatch, explain_failure
from dagster_adjunct.orchestration.step.planned_batch import PlannedBatch

Record = dict[str, Any]
RecordFunction = Callable[..., list[Record]]


def keeps(record: Record) -> list[Record]:
    return [record]


def counted(function: RecordFunction) -> RecordFunction:
    @wraps(function)
    def call(*given: Any) -> list[Record]:
        return function(*given)

    return call


def refuses(record: Record) -> list[Record]:
    raise ValueError("refused")


@counted
@counted
def refuses_decorated(record: Record) -> list[Record]:
    raise ValueError("refused")


@counted
def refuses_number(number: int, record: Record) -> list[Record]:
    raise ValueError("refused")


class Refusing:
    def __call__(self, record: Record) -> list[Record]:
        raise ValueError("refused")


class RefusingToo(Refusing):
    pass


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(refuses, id="plain"),
        pytest.param(refuses_decorated, id="decorated twice"),
        pytest.param(partial(refuses_number, 1), id="partial of a decorated one"),
        pytest.param(RefusingToo(), id="inherited __call__"),
        pytest.param(partial(RefusingToo()), id="partial of an object"),
    ],
)
def test_the_operator_is_found_whose_function_is_wrapped(function: RecordFunction) -> None:
    app = Application("app")
    schema = Schema.of(k="string")
    records = app.input_stream("lake.s").flat_map(keeps, schema=schema)
    records.flat_map(function, schema=schema).send_to(app.output_stream("lake.out", partitions=1))
    _, first, failed, output = app.operators
    context: Any = SimpleNamespace(app=app, sensitive=())
    unused: Any = None
    planned = PlannedBatch(context, *[unused] * 10)
    # No record can be looked for in these, so that no Spark is needed.
    session = SimpleNamespace(addTag=str, removeTag=str, interruptTag=str)
    frame: Any = SimpleNamespace(columns=["k"], sparkSession=session)
    arrived = {each.id: [frame] * len(each.inputs) for each in app.operators}
    batch = FailedBatch(planned, unused, arrived)
    with pytest.raises(ValueError, match="refused") as caught:
        function({"k": "a"})
    text = "".join(traceback.format_exception(caught.value))
    explained = explain_failure(batch, output.id, PythonException(text))
    assert explained is not None
    assert explained.operator == failed.id
    assert first.id not in explained.problem
