"""What a step does to remote tables: puts, deletes, updates, and what it refuses."""

from __future__ import annotations

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.update_expressions import update_message
from dagster_adjunct.resources.errors import NullKeyError, RecordNotFoundError
from dagster_adjunct.resources.tables import UpdateContract
from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark


def changes(world: StepWorld) -> None:
    world.stream("changes", "k", 2, k="string", v="int")


def updating(world: StepWorld, contract: UpdateContract, *, default: bool, on_null_key: str = "fail") -> Application:
    app = Application("app")
    message = update_message(key="k", update=["v"], default={"w": "v * 100"} if default else None)
    app.input_stream("lake.changes").map(*message).send_to(
        app.table(world.table()),
        contract,
        on_null_key=on_null_key,  # type: ignore[arg-type]
    )
    return app


def test_without_a_contract_records_are_put_and_tombstones_delete_in_their_order(step_world: StepWorld) -> None:
    changes(step_world)
    step_world.send("changes", ("a", 1), ("b", 2), ("c", 3), ("a", 4), deleted=[("b", None), ("c", None)])
    step_world.send("changes", ("c", 5))
    app = Application("app")
    app.input_stream("lake.changes").map("k", "v", "v + 1 as w").send_to(app.table(step_world.table()))
    counters = step_world.run(app).counters["things"]
    assert step_world.records() == {"a": (4, 5), "c": (5, 6)}
    assert (counters["writes"], counters["deletes"]) == (5, 2)


def test_the_first_default_is_put_once_and_every_update_is_applied_in_source_order(step_world: StepWorld) -> None:
    changes(step_world)
    step_world.send("changes", *[(f"k{i % 5}", i) for i in range(200)])
    report = step_world.run(updating(step_world, UpdateContract.UPDATE_WITH_DEFAULTS, default=True))
    assert step_world.records() == {f"k{i}": (195 + i, i * 100) for i in range(5)}
    counters = report.counters["things"]
    assert (counters["updates"], counters["defaults_put"], counters["null_keys"]) == (200, 5, 0)


def test_an_update_of_a_missing_record_fails_clearly_and_leaves_the_batch_open(step_world: StepWorld) -> None:
    changes(step_world)
    step_world.send("changes", ("a", 1))
    app = updating(step_world, UpdateContract.UPDATE_ONLY, default=False)
    with pytest.raises(RecordNotFoundError, match=r"table things has no record .*'a'"):
        step_world.run(app)
    state = step_world.state(app)
    assert state.batch == 0
    assert state.open is not None
    # Whoever puts the record lets the same batch through.
    put = Application("put")
    step_world.stream("puts", "k", 1, k="string", v="int", w="int")
    step_world.send("puts", ("a", 0, 7))
    put.input_stream("lake.puts").send_to(put.table(step_world.table()))
    step_world.run(put)
    step_world.run(app, run="run-2")
    assert step_world.records() == {"a": (1, 7)}
    assert step_world.state(app).open is None


def test_a_null_key_fails_the_batch_or_is_counted_and_skipped(step_world: StepWorld) -> None:
    changes(step_world)
    step_world.send("changes", (None, 1), ("a", 2), (None, 3))
    app = updating(step_world, UpdateContract.UPDATE_WITH_DEFAULTS, default=True)
    with pytest.raises(
        NullKeyError,
        match=r"have no k, the key of table things; the first is lake\.changes\.\d at offset \d.*on_null_key",
    ):
        step_world.run(app)
    assert step_world.state(app).batch == 0
    patient = updating(step_world, UpdateContract.UPDATE_WITH_DEFAULTS, default=True, on_null_key="skip")
    counters = step_world.run(patient).counters["things"]
    assert (counters["null_keys"], counters["updates"]) == (2, 1)
    assert step_world.records() == {"a": (2, 200)}
