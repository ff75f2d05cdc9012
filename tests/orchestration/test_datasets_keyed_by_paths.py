"""An application joins datasets whose keys are paths, by every engine, against plain Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.stream_facts import LineageNode
from dagster_adjunct.orchestration.step.context import list_sensitive_columns
from dagster_adjunct.resources.schemas.schema import Schema

if TYPE_CHECKING:
    from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark

CONTACTS = Schema.of(no="int", person={"id": "bigint", "name": "string"}, at={"seq": "int"})


def contact(no: int, person: int | None, name: str, seq: int = 0) -> dict[str, Any]:
    return {"no": no, "person": {"id": person, "name": name}, "at": {"seq": seq}}


def test_they_are_joined_by_the_stored_column(step_world: StepWorld) -> None:
    world = step_world
    world.streams.create("contacts", schema=CONTACTS, key=["no"], partitions=2)
    world.streams.create("changes", schema=CONTACTS, key=["no"], partitions=2)
    orders = Schema.of(order="int", buyer={"id": "bigint"})
    world.streams.create("orders", schema=orders, key=["order"], partitions=2)
    rows = [contact(no, no % 5, f"n{no}", seq=10 - no) for no in range(8)]
    world.streams.append("contacts", rows[:5], producer="t", sequence=1, end_of_dataset="v1")
    world.streams.append("changes", rows, producer="t", sequence=1)
    sent = [{"order": no, "buyer": {"id": no}} for no in range(7)]
    sent.append({"order": 7, "buyer": None})
    world.streams.append("orders", sent, producer="t", sequence=1)
    known = bounded_dataset(
        "known", input="lake.contacts", key="person.id", columns=["no", "at"], partitions=3
    )
    newest = unbounded_dataset(
        "newest",
        input="lake.changes",
        key="person.id as who",
        columns=["person.name"],
        order_by="at.seq",
        partitions=2,
        sensitive="person.name",
    )
    for dataset in (known, newest):
        world.advance(dataset)
    app = Application("app", auto_repartition=True)
    (
        app.input_stream("lake.orders")
        .join(app.table(known), on={"buyer.id": "id"}, how="left", select=["at.seq"])
        .join(app.table(newest), on={"buyer.id": "who"}, how="left", select=["name"])
        .select("order", "seq", "name")
        .send_to(app.output_stream("lake.out", partitions=2, key="order"))
    )
    world.run(app)
    places = {row["person"]["id"]: row["at"]["seq"] for row in rows[:5]}
    highest: dict[int, dict[str, Any]] = {}
    for row in rows:
        held = highest.setdefault(row["person"]["id"], row)
        if row["at"]["seq"] > held["at"]["seq"]:
            highest[row["person"]["id"]] = row
    expected = []
    for number in range(8):
        name = highest[number]["person"]["name"] if number in highest else None
        expected.append((number, places.get(number), name))
    found = [(row["order"], row["seq"], row["name"]) for row in world.rows("out")]
    assert sorted(found, key=str) == sorted(expected, key=str)
    hidden = list_sensitive_columns(app, {"lake": world.streams})
    assert (LineageNode("dataset", "newest"), "name") in hidden
