"""What names a column of a dataset that was renamed or dropped is found by the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, bounded_dataset
from dagster_adjunct.assets.declaration.extractors import Projection
from dagster_adjunct.assets.validation.validators import no_nulls, sql_check
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.stream_facts import SPARK, Catalog, StreamFacts
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.schemas.schema import Schema

CATALOG: Catalog = {
    "lake.flights": StreamFacts("lake.flights", 2, ("k",), SPARK, Schema.of(k="string")),
    "lake.planes": StreamFacts(
        "lake.planes", 2, ("k",), SPARK, Schema.of(k="string", places="int", home="string")
    ),
}


def planes(**options: Any) -> AdjunctDataset:
    return bounded_dataset(
        "planes",
        input="lake.planes",
        key="k",
        partitions=2,
        renamed={"seats": "places"},
        drop=["note"],
        **options,
    )


def joining(select: list[str], on: str = "k", **options: Any) -> Application:
    app = Application("app")
    joined = app.input_stream("lake.flights").join(
        app.table(planes(**options)), on=on, select=select
    )
    joined.send_to(app.output_stream("lake.out", partitions=2, key="k"))
    return app


@pytest.mark.parametrize(
    ("declare", "column", "step"),
    [
        (lambda: joining(["seats"]), "seats", "Write places."),
        (lambda: joining(["note"]), "note", "Leave it out."),
        (lambda: joining(["home"], sensitive="note"), "note", "Leave it out."),
        (lambda: joining(["home"], columns=["k", "seats"]), "seats", "Write places."),
        (
            lambda: joining(["home"], validators=[sql_check("few", "seats > 900")]),
            "seats",
            "Write places.",
        ),
        (lambda: joining(["home"], validators=[no_nulls("note")]), "note", "Leave it out."),
        (
            lambda: joining(["n"], extractor=Projection("k STRING, n INT", {"n": "seats"})),
            "seats",
            "Write places.",
        ),
    ],
)
def test_the_plan_says_what_became_of_a_column(
    declare: Callable[[], Application], column: str, step: str
) -> None:
    with pytest.raises(PlanningError) as caught:
        build_plan(declare(), CATALOG)
    assert caught.value.column == column
    assert step in caught.value.next_step


def test_a_member_that_was_renamed_is_named_by_its_path() -> None:
    schema = Schema.of(k="string", places="int", home={"farm": "string"})
    planes = StreamFacts("lake.planes", 2, ("k",), SPARK, schema)
    sites = bounded_dataset(
        "sites", input="lake.planes", key="k", partitions=2, renamed={"home.park": "farm"}
    )

    def plan(path: str) -> None:
        app = Application("app")
        joined = app.input_stream("lake.flights").join(app.table(sites), on="k", select=[path])
        joined.send_to(app.output_stream("lake.out", partitions=2, key="k"))
        build_plan(app, Catalog({**CATALOG, "lake.planes": planes}))

    with pytest.raises(PlanningError) as caught:
        plan("home.park")
    assert "Write home.farm." in caught.value.next_step
    plan("home.farm")


def test_a_dataset_under_the_names_of_now_is_planned() -> None:
    build_plan(joining(["places"], sensitive="home"), CATALOG)
