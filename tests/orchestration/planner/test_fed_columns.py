"""What is sent to the stream of a dataset has to stay what the dataset can take, not only what
the stream can.
"""

from __future__ import annotations

from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import unbounded_dataset
from dagster_adjunct.assets.declaration.extractors import Projection
from dagster_adjunct.orchestration.operators.stream_facts import SPARK, StreamFacts
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.schemas.schema import Schema
from tests.orchestration.planner.planning import application

STORED = Schema.of(id="string", n="int", v="int", name="string")
SENT = StreamFacts("lake.pay", 4, ("id",), SPARK, STORED)


def fed(*columns: str, **declared: Any) -> None:
    app = application()
    other = unbounded_dataset(
        "other", input="lake.ref", **{"key": "id", "partitions": 4} | declared
    )
    app.table(other)
    first = unbounded_dataset("ref", input="lake.ref", key="id", partitions=4)
    app.input_stream("lake.pay").map(*columns).send_to(app.table(first))
    build_plan(
        app,
        {
            "lake.pay": SENT,
            "lake.ref": StreamFacts("lake.ref", 4, ("id",), SPARK, STORED, evolves=True),
        },
    )


@pytest.mark.parametrize(
    ("declared", "problem"),
    [
        (
            {"key": ["id", "n"], "partition_by": "id"},
            "n is bigint, was int, and is a part of the key",
        ),
        ({"key": "n", "order_by": "v"}, "n is bigint, was int, and is a part of the key"),
        ({"extractor": Projection("id STRING, n INT")}, "declares n as int, the record has bigint"),
    ],
)
def test_a_type_that_one_of_the_datasets_on_the_stream_can_not_take_is_refused(
    declared: Any, problem: str
) -> None:
    fed("id", "n", "v", "name", **declared)
    fed("id", "n", "cast(v as bigint) as v", "name", "1 as one", **declared)
    with pytest.raises(
        PlanningError, match=rf"send-to-table-3-ref: dataset 'other' would not accept .*{problem}"
    ) as caught:
        fed("id", "cast(n as bigint) as n", "v", "name", **declared)
    assert (caught.value.operator, caught.value.dataset) == ("send-to-table-3-ref", "other")


def test_what_changes_are_ordered_by_stays_what_can_be_ordered() -> None:
    fed("id", "cast(n as bigint) as n", "v", "name", order_by="n")  # the same order
    with pytest.raises(PlanningError) as failure:
        fed("id", "cast(n as double) as n", "v", "name", order_by="n")
    assert failure.value.operator == "send-to-table-3-ref"
    assert failure.value.dataset == "other"
