"""What requests for startpoints would do to the table of a dataset, before they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.assets.unbounded.rewind_plan import plan_rewind
from dagster_adjunct.orchestration.startpoints.previews.preview_requests import Preview
from dagster_adjunct.orchestration.startpoints.requests.allowed_requests import dataset_task
from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import positioned
from dagster_adjunct.resources.errors import PermanentError

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.resources.objects import Lake
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem


def preview_tables(
    lake: Lake, systems: Mapping[str, StreamSystem], app: Application, previews: Sequence[Preview]
) -> list[Preview]:
    """Return the previews, with what those that can be followed and are for datasets would do to their tables."""
    shown = dict(enumerate(previews))
    for dataset in app.datasets:
        task = dataset_task(dataset.name)
        mine = {number: one for number, one in shown.items() if task in one.tasks and one.error is None}
        shown |= _preview_table(lake, systems, dataset, mine)
    return list(shown.values())


def _preview_table(
    lake: Lake, systems: Mapping[str, StreamSystem], dataset: AdjunctDataset, previews: Mapping[int, Preview]
) -> dict[int, Preview]:
    """Return what these requests would do to the table of a dataset, all of them together."""
    requests = {before.request.ssp: before.request for before in previews.values()}
    if not requests:
        return {}
    try:
        plan = plan_rewind(
            lake,
            systems,
            dataset,
            positions={ssp: positioned(request) for ssp, request in requests.items()},
            force={ssp for ssp, request in requests.items() if request.force},
        )
    except PermanentError as error:
        return {number: replace(before, error=str(error)) for number, before in previews.items()}
    refusal = None if plan.refusal is None else str(plan.refusal)
    rewound = {partition.ssp: partition for partition in plan.partitions}
    changed = {}
    for number, before in previews.items():
        partition = rewound[before.request.ssp]
        changed[number] = replace(
            before,
            checkpoint=partition.taken,
            start=partition.start,
            end=partition.taken,
            offsets=partition.again,
            moved=None if partition.taken is None else partition.skipped - partition.again,
            error=refusal,
        )
    return changed
