"""A run that writes to an HTTP service, is paused before any of its requests, and wakes: it
sends no more.
"""

from __future__ import annotations

from typing import Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.errors import RunLeaseLostError
from dagster_adjunct.resources.table_backends.http import HttpTable
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.orchestration.paused_runs import PausedWorld, at_call
from tests.rounds import rounds
from tests.servers.http_records import RecordService, running_service


def world_with(service: RecordService, nth: int = 0) -> PausedWorld:
    """Return a world whose first run is paused before its `nth` request to the service."""

    def make(world: PausedWorld, first: bool) -> Application:
        table = HttpTable(service.url, "/{k}", "k")
        if first and nth:
            request, before = table.request, at_call(nth, world.pause)

            async def paused(*given: Any, **more: Any) -> Any:
                before()
                return await request(*given, **more)

            object.__setattr__(table, "request", paused)
        app = Application("sets", engine="auto")
        kept = app.input_stream("lake.changes", default_offset="oldest")
        handle = app.table(
            RemoteTable("t", key="k", write_function=table, batch_size=5, in_flight=1)
        )
        kept.filter("not gone").select("k", "n").send_to(handle)
        return app

    return PausedWorld(make)


@pytest.mark.rounds
@pytest.mark.lengthy
def test_no_request_leaves_a_run_that_was_paused_before_it() -> None:
    with running_service() as service:
        world_with(service).run_alone()
        expected = dict(service.records)
    assert expected
    for nth in rounds([2, 9], [*range(1, 19)]):
        with running_service() as service:
            world = world_with(service, nth)
            error = world.run_paused()
            assert world.paused, nth
            assert isinstance(error, RunLeaseLostError), (nth, error)
            assert service.records == expected, nth
