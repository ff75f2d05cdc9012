"""Streams that are broadcast in the middle of a graph, as they are planned."""

from __future__ import annotations

import re

import pytest

from dagster_adjunct.orchestration.operators.stream_facts import SPARK, StreamFacts
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.schemas.schema import Schema
from tests.orchestration.planner.planning import application, catalog, dataset

VISITS = StreamFacts("lake.visits", 4, ("k",), SPARK, Schema.of(k="string", v="int"))


def test_there_are_as_many_copies_as_tasks() -> None:
    app = application()
    visits = app.input_stream("lake.visits")
    visits.partition_by("v", partitions=6).send_to(
        app.output_stream("lake.out", partitions=9, key="v")
    )
    reported = visits.filter("v > 0").broadcast()
    kept = reported.join(app.table(dataset("names")), on="k", how="left", select=["name"])
    planned = build_plan(
        app,
        catalog(VISITS, StreamFacts("lake.names", 1, schema=Schema.of(k="string", name="string"))),
    )
    assert len(planned.tasks) == 6
    assert planned.operator(kept.operator).partitions == 6
    assert planned.operator(kept.operator).columns == ("k", "v", "task", "name")
    assert [
        (exchange.operator, exchange.reason, exchange.partitions) for exchange in planned.exchanges
    ][-1] == (reported.operator, "broadcast", 6)
    assert re.search(
        r"app-broadcast-5 +broadcast +6 +task +task number +one for each task", planned.render()
    )
    assert str(planned.tasks[5].ssps) == "()"


def test_a_partitioned_dataset_is_matched_behind_a_shuffle_only() -> None:
    app = application()
    app.input_stream("lake.visits").broadcast().join(app.table(dataset("t", 4)), on="k")
    with pytest.raises(PlanningError) as failure:
        build_plan(app, catalog(VISITS, t=1))
    assert failure.value.operator == "join-3-t"
    assert failure.value.dataset == "t"


def test_its_column_is_named_and_not_there_yet() -> None:
    app = application()
    visits = app.input_stream("lake.visits")
    with pytest.raises(ConfigurationError) as failure:
        visits.broadcast(task="a b")
    assert failure.value.argument == "task"
    visits.broadcast(task="V")
    with pytest.raises(PlanningError) as failure:
        build_plan(app, catalog(VISITS))
    assert failure.value.operator == "broadcast-2"
    assert failure.value.column == "V"
