"""An erasure between a crashed batch and its repetition: the batch is run as it was begun, and
then nothing is left.
"""

from __future__ import annotations

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.maintenance import erase_keys
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step.progress import StepEvent
from tests.orchestration.step_world import StepWorld

PLANES = bounded_dataset("planes", input="lake.planes", key="tailnum", partitions=2)


class Crash(Exception):
    """Ends a run where the test wants it to end."""


def crash(event: StepEvent) -> None:
    if event.what == "output":
        raise Crash


@pytest.mark.spark
def test_a_crashed_batch_is_run_again_with_the_version_it_was_begun_with(
    step_world: StepWorld,
) -> None:
    world = step_world
    world.stream("trips", "tailnum", 2, tailnum="string", v="int")
    world.stream("planes", "tailnum", 2, tailnum="string", seats="int")
    app = Application("app")
    trips = app.input_stream("lake.trips", default_offset="oldest")
    trips.join(app.table(PLANES), on="tailnum", how="left").send_to(
        app.output_stream("lake.out", partitions=2, key="tailnum")
    )
    world.send("planes", ("N1", 100), ("N2", 200), version="v1")
    world.advance(PLANES)
    world.send("trips", ("N1", 1), ("N2", 2))
    with pytest.raises(Crash):
        world.run(app, on_event=crash)
    because = {"reason": "request 7", "by": "ada"}
    lease = world.lake.store.list("datasets/planes/leases/")
    # of the run that died; it would expire
    world.lake.store.delete_many([item.key for item in lease])

    report = erase_keys(world.lake, "planes", ["N1"], **because)
    assert {pending.reason for pending in report.pending} == {"open batch 1 of application app"}
    assert StoredVersions(world.lake, "planes").require_current().get("N1") is None
    world.run(app)
    assert sorted((row["v"], row["seats"]) for row in world.rows("out")) == [(1, 100), (2, 200)]

    assert erase_keys(world.lake, "planes", ["N1"], **because).complete
