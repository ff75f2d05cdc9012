"""A batch that was given up leaves nothing in tables of state, nor does what its dead run has
sent and arrives late.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.resources.errors import ObjectExistsError, PreconditionFailedError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.windows import Count, Tumbling
from tests.faulty_store import Crash, FaultyStore
from tests.orchestration.seen_times import at
from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark


class HeldBack(FaultyStore):
    """A store to which the commit of one table is under way, from a batch's intent on, when its
    process dies.
    """

    def __init__(self, world: StepWorld, table: str) -> None:
        super().__init__(world.lake.store)
        self.pointer = f"{world.lake.dataset_prefix(table)}/CURRENT"
        self.armed = False
        self.late: Callable[[], object] | None = None

    def hear(self, event: StepEvent) -> None:
        self.armed = self.armed or event.what == "intent"

    def put_if_absent(self, key: str, data: bytes) -> str:
        self._hold(key, lambda: self.inner.put_if_absent(key, data))
        return super().put_if_absent(key, data)

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        self._hold(key, lambda: self.inner.put_if_match(key, data, etag))
        return super().put_if_match(key, data, etag)

    def _hold(self, key: str, request: Callable[[], object]) -> None:
        if self.armed and key == self.pointer:
            self.late, self._crashed = request, True
            raise Crash(key)


@pytest.mark.long  # the commit alone: tests/assets/test_state_tables.py
def test_the_first_state_commit_of_an_abandoned_batch_is_rejected(step_world: StepWorld) -> None:
    world = step_world
    world.stream("hits", "k", 1, k="string", at="timestamp")
    app = Application("counting")
    hits = app.input_stream("lake.hits", default_offset="oldest", event_time="at")
    minutes = hits.window(
        Tumbling(dt.timedelta(minutes=1)), by="k", name="minutes", aggregates={"hits": Count()}
    )
    minutes.send_to(app.output_stream("lake.minutes", partitions=1, key="k"))
    sent = [(key, at(seconds)) for seconds in range(0, 50, 10) for key in "ab"]
    world.send("hits", *sent)

    store = HeldBack(world, "counting-minutes")
    with pytest.raises(Crash):
        replace(world, lake=Lake(store, world.lake.id)).run(app, run="dead", on_event=store.hear)
    assert store.late is not None
    BatchLog(world.lake, app.name).abandon(reason="it hangs", by="me", skip=False)
    late = store.late
    refused: list[Exception | None] = []

    def arrives_after_the_undo(event: StepEvent) -> None:
        if event.what != "intent":
            return
        try:
            late()
        except (ObjectExistsError, PreconditionFailedError) as error:
            refused.append(error)
        else:
            refused.append(None)

    world.run(app, run="next", on_event=arrives_after_the_undo)
    world.send("hits", ("a", at(200)))
    world.run(app, run="last")
    counted = Counter({row["k"]: row["hits"] for row in world.rows("minutes")})
    assert counted == Counter(key for key, _ in sent), "each record counts once"
    assert refused[0] is not None
