"""Joins with datasets whose columns are renamed and dropped: batches read what a name means now,
also of versions from before.
"""

from __future__ import annotations

from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.assets.reading.stored_versions import open_stored_versions
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.errors import DatasetError, PlanningError
from dagster_adjunct.resources.schemas.column_changes import ColumnChanges
from dagster_adjunct.resources.schemas.schema import Schema
from tests.faulty_store import Crash
from tests.orchestration.step_world import StepWorld, crash_at

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("either_engine")]

BEFORE = Schema.of(k="string", seats="int", home={"city": "string"})
AFTER = Schema.of(k="string", places="int", home={"town": "string"})
RENAMED = {"seats": "places", "home.city": "town"}


def change_columns(world: StepWorld, schema: Schema, **changes: Any) -> None:
    world.streams.create(
        "planes", schema=schema, key=["k"], partitions=2, changes=ColumnChanges(**changes)
    )


def joining(planes: AdjunctDataset, *select: str) -> Application:
    app = Application("app")
    joined = app.input_stream("lake.s").join(app.table(planes), on="k", select=[*select])
    joined.send_to(app.output_stream("lake.out", partitions=2, key="k"))
    return app


def bounded(**options: Any) -> AdjunctDataset:
    return bounded_dataset("planes", input="lake.planes", key="k", partitions=2, **options)


def unbounded(**options: Any) -> AdjunctDataset:
    return unbounded_dataset("planes", input="lake.planes", key="k", partitions=2, **options)


def results(world: StepWorld) -> dict[str, tuple[Any, ...]]:
    found = {}
    for row in world.rows("out"):
        found[row["k"]] = row.get("places", row.get("seats")), row["home"]
    return found


def test_a_version_from_before_a_rename_is_joined_under_the_names_of_now(
    step_world: StepWorld,
) -> None:
    change_columns(step_world, BEFORE)
    step_world.send("planes", ("a", 1, {"city": "Oslo"}), version="v1")
    step_world.stream("s", "k", 2, k="string")
    step_world.advance(bounded())
    change_columns(step_world, AFTER, renamed=RENAMED)
    step_world.send("planes", ("a", 2, {"town": "Rome"}), version="v2")
    now = joining(bounded(renamed=RENAMED), "places", "home")
    step_world.send("s", ("a",))
    step_world.run(now)
    assert results(step_world) == {"a": (2, {"town": "Rome"})}
    stored = open_stored_versions(step_world.lake, "planes")
    stored.rollback(reason="test", by="me")
    assert stored.require_current().get("a") == {"k": "a", "seats": 1, "home": {"city": "Oslo"}}
    step_world.send("s", ("b",), ("a",))
    step_world.run(now)
    rows = [(row["places"], row["home"]) for row in step_world.rows("out") if row["k"] == "a"]
    assert (1, {"town": "Oslo"}) in rows
    with pytest.raises(PlanningError) as caught:
        step_world.run(joining(bounded(renamed=RENAMED), "seats"))
    assert caught.value.column == "seats"


@pytest.mark.parametrize("kind", [bounded, unbounded])
def test_an_open_batch_from_before_a_rename_joins_the_version_that_it_began_with(
    step_world: StepWorld, kind: Any
) -> None:
    change_columns(step_world, BEFORE)
    step_world.send("planes", ("a", 1, {"city": "Oslo"}), version="v1")
    step_world.stream("s", "k", 2, k="string")
    step_world.send("s", ("a",))
    with pytest.raises(Crash):  # an intent names the version
        step_world.run(joining(kind(), "seats", "home"), on_event=crash_at("intent"))
    change_columns(step_world, AFTER, renamed=RENAMED)
    step_world.send("planes", ("a", 2, {"town": "Rome"}), version="v2")
    now = joining(kind(renamed=RENAMED), "places", "home")
    step_world.run(now)
    assert results(step_world) == {"a": (1, {"town": "Oslo"})}
    step_world.send("s", ("a",))
    step_world.run(now)
    assert [row["places"] for row in step_world.rows("out")] == [1, 2]


def test_a_dataset_that_does_not_declare_a_rename_is_refused_before_it_reads(
    step_world: StepWorld,
) -> None:
    change_columns(step_world, BEFORE)
    step_world.send("planes", ("a", 1, {"city": "Oslo"}))
    step_world.advance(unbounded())
    change_columns(step_world, AFTER, renamed=RENAMED)
    with pytest.raises(DatasetError) as caught:
        step_world.advance(unbounded())
    assert "renamed=" in caught.value.problem
    step_world.advance(unbounded(renamed=RENAMED))
    step_world.advance(unbounded(renamed=RENAMED))
    view = open_stored_versions(step_world.lake, "planes").require_current()
    assert view.get("a") == {"k": "a", "places": 1, "home": {"town": "Oslo"}}
    with pytest.raises(DatasetError):
        step_world.advance(unbounded(renamed={**RENAMED, "k": "key"}))
