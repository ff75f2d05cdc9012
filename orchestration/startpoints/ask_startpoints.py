"""Asks for startpoints: what the requests would do is looked at first, then all are written, or none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.batchlog.batch_log import application_state
from dagster_adjunct.orchestration.operators.spec.versions_met import RECORDED
from dagster_adjunct.orchestration.planner.lake_catalog import plan_application
from dagster_adjunct.orchestration.startpoints.dataset_requests import named_only
from dagster_adjunct.orchestration.startpoints.previews.preview_requests import preview_requests
from dagster_adjunct.orchestration.startpoints.previews.refused_requests import check_followed, check_kinds, replaced_by
from dagster_adjunct.orchestration.startpoints.requests.startpoint_manager import startpoints_of
from dagster_adjunct.orchestration.startpoints.requests.startpoints_not_applied import Held, not_applied
from dagster_adjunct.orchestration.startpoints.resolving.recorded_plan import write_plan
from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.startpoints.previews.request_preview import Preview
    from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import StartpointRequest
    from dagster_adjunct.resources.objects import Lake
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem


@dataclass(frozen=True, slots=True)
class AskedStartpoints:
    """What was asked for: what each request would do now, what it takes the place of, and whether it is written.

    `tables` says of each remote table that is made of what is read again what becomes of it, by the table's name.
    `notes` say which versions replays meet, and what keeps state and leaves records out that are read again.
    """

    previews: tuple[Preview, ...]
    replaced: tuple[Held, ...]
    written: bool
    tables: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-able values."""
        return {
            "written": self.written,
            "partitions": [preview.to_json() for preview in self.previews],
            "replaced": [held.summary() for held in self.replaced],
            "tables": dict(self.tables),
            "notes": list(self.notes),
        }


def ask(
    lake: Lake,
    systems: Mapping[str, StreamSystem],
    app: Application,
    requests: Sequence[StartpointRequest],
    *,
    replace: bool = False,
    dry_run: bool = False,
) -> AskedStartpoints:
    """Write these requests, all or none; return what they would do if a run started now.

    Each takes the place of what is not applied yet at the same partition and task. Raises ConfigurationError where no
    task reads a partition; where what waits or was handed out there can't be read; where a startpoint has no offset
    now, and the request does not go on from the checkpoint then; and, without `replace`, where a bounded replay would
    take the place of a startpoint, or the other way round. With `dry_run` nothing is written, and nothing is refused:
    the previews say what is wrong. Where the application has startpoints switched off, both are refused.
    """
    if not requests:
        raise ConfigurationError(
            "a startpoint is asked for at no partition.",
            "Name one, as in lake.flights.3, or a stream: lake.flights.",
            argument="partitions",
        )
    startpoints = startpoints_of(lake, app)
    startpoints.check_on()
    stored, state = startpoints.read(), application_state(lake, app.name)
    plan = plan_application(app, systems) if app.inputs else None
    shown = preview_requests(lake, systems, app, plan, requests, state, stored.unreadable)
    there = [*map(Held, stored.waiting), *not_applied(stored.handed, state)]
    replaced = replaced_by(requests, there, named_only(app))
    if not dry_run:
        check_followed(shown.previews)
        if not replace:
            check_kinds(replaced)
        recorded = shown.recorded
        if recorded is not None:
            write_plan(lake, recorded)  # from here on its versions are held
            requests = [
                dataclasses.replace(request, recorded=recorded.id) if request.versions == RECORDED else request
                for request in requests
            ]
        startpoints.write_startpoints(requests)
    taken_over = tuple(dict.fromkeys(old for old, _ in replaced))
    return AskedStartpoints(shown.previews, taken_over, not dry_run, shown.tables, shown.notes)
