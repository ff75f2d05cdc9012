"""Startpoints on the streams of datasets: what was handed to a dataset is applied to its table before it advances."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from dagster_adjunct.assets.unbounded.rewind import rewind
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.manifest import as_unbounded
from dagster_adjunct.assets.versions.unbounded_manifest import UnboundedManifest
from dagster_adjunct.orchestration.startpoints.requests.allowed_requests import dataset_task, rewindable
from dagster_adjunct.orchestration.startpoints.requests.fan_out_in_words import gone_in_words
from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import positioned
from dagster_adjunct.orchestration.startpoints.resolving.resolve_handed import Unresolved
from dagster_adjunct.resources.errors import (
    AdjunctError,
    DatasetError,
    MalformedDocumentError,
    PermanentError,
)
from dagster_adjunct.resources.first_error import raise_first
from dagster_adjunct.resources.streams.interface.startpoint import resolve_startpoint_to_offset

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.versions.advance_report import AdvanceReport
    from dagster_adjunct.assets.writing.runtime import Runtime
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.stored_positions import OffsetState
    from dagster_adjunct.orchestration.startpoints.requests.fan_out import FanOut, Requests, Taken
    from dagster_adjunct.orchestration.startpoints.requests.startpoint_manager import StartpointManager
    from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import StartpointRequest
    from dagster_adjunct.resources.objects import Lake
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DatasetOutcome:
    """What became of the requests for datasets.

    `failed` are the datasets that refused theirs or could not follow them, by name: these requests stay, and the
    dataset should not advance before somebody has looked. `unresolved` are requests without an offset that say to go on
    without them; they stay too. `fan_out` is what was fanned out for this, to all tasks; None where nothing had to be.
    """

    reports: tuple[AdvanceReport, ...] = ()
    failed: Mapping[str, AdjunctError] = field(default_factory=dict)
    unresolved: tuple[Unresolved, ...] = ()
    fan_out: FanOut | None = None

    def raise_failed(self) -> None:
        """Raise the first error, if there is one, with the others as its notes."""
        raise_first(tuple(self.failed.values()))


def taken_in(lake: Lake, app: Application, offsets: OffsetState) -> Taken:
    """Return whether a commit has taken in a request for a task: of the batch log, or of the dataset's own."""
    datasets = {dataset_task(dataset.name): dataset.name for dataset in rewindable(app)}

    @cache
    def manifest(name: str) -> UnboundedManifest | None:
        stored = DatasetLog(lake, name).read_or_newest()[1]
        return None if stored is None else as_unbounded(stored)

    def taken(task: str, request: StartpointRequest) -> bool:
        if task in datasets:
            newest = manifest(datasets[task])
            return newest is not None and newest.has_applied(str(request.ssp), request.id)
        return offsets.has_taken(request.ssp, request.id)

    return taken


def apply_dataset_startpoints(
    runtime: Runtime,
    app: Application,
    startpoints: StartpointManager,
    handed: FanOut,
    *,
    only: Collection[str] | None = None,
    on_report: Callable[[AdvanceReport], None] = lambda report: None,
) -> DatasetOutcome:
    """Rewind, or build anew, the datasets that startpoints are fanned out to; all those of a dataset in one commit.

    `handed` is what a fan-out left; a dataset that was handed what can't be read fails. `only` names the datasets to
    look at, all of them when None. What was applied is removed from the fan-outs after its commit, by id: a run that
    dies between the two finds it applied. A dataset that fails keeps no other from being rewound. To be called before
    the datasets advance.
    """
    reports: list[AdvanceReport] = []
    failed: dict[str, AdjunctError] = {}
    unresolved: list[Unresolved] = []
    for text in gone_in_words(handed):
        _log.warning("%s", text)
    for dataset in rewindable(app, only):
        task = dataset_task(dataset.name)
        if task in handed.held:
            failed[dataset.name] = _unreadable(dataset.name, task, handed)
            continue
        requests, without = _resolvable(runtime.systems, handed.tasks.get(task, {}))
        unresolved += without
        for gone in without:
            _log.warning(
                "%s: dataset %s goes on without its startpoint: %s", gone.request.ssp, dataset.name, gone.error
            )
        if not requests:
            continue
        try:
            reports.append(_apply(runtime, dataset, requests))
        except AdjunctError as error:
            failed[dataset.name] = error
        else:
            startpoints.remove_fan_outs({task: {ssp: request.id for ssp, request in requests.items()}})
            on_report(reports[-1])
    return DatasetOutcome(tuple(reports), failed, tuple(unresolved))


def _apply(runtime: Runtime, dataset: AdjunctDataset, requests: Requests) -> AdvanceReport:
    bounded = [ssp for ssp, request in requests.items() if request.until is not None]
    if bounded:
        raise DatasetError(
            f"dataset {dataset.name!r}: the startpoint of {bounded[0]} is to be followed up to an end (until), and a "
            "table is what its stream says up to where it has read: there is nothing to replay beside it.",
            "Take the request back, and ask for the startpoint without an end.",
            dataset=dataset.name,
        )
    reasons = [f"{request.reason} (asked for by {request.by})" for request in requests.values()]
    return rewind(
        runtime,
        dataset,
        positions={ssp: positioned(request) for ssp, request in requests.items()},
        reason="; ".join(dict.fromkeys(reasons)),
        force={ssp for ssp, request in requests.items() if request.force},
    )


def _unreadable(name: str, task: str, handed: FanOut) -> MalformedDocumentError:
    """Return why a dataset can't go on: nobody knows where it was to be rewound to."""
    ssps = handed.held[task]
    in_the_way = [
        entry for entry in handed.unreadable if entry.at == task or (entry.at is not None and entry.ssp in ssps)
    ]
    why = [entry.error for entry in in_the_way]
    return MalformedDocumentError(
        f"dataset {name!r} was handed a startpoint that can't be read, and is left as it is. {why[0] if why else ''}",
        f"Take it back (adjunct startpoint clear MODULE:APP {min(ssps).qualified_stream} --reason …), or upgrade.",
        dataset=name,
    )


def _resolvable(
    systems: Mapping[str, StreamSystem], requests: Requests
) -> tuple[dict[SystemStreamPartition, StartpointRequest], list[Unresolved]]:
    """Return the requests without those that have no offset and say to go on without them; and these."""
    resolvable: dict[SystemStreamPartition, StartpointRequest] = {}
    without: list[Unresolved] = []
    for ssp, request in requests.items():
        try:
            if request.on_unresolved == "checkpoint":
                resolve_startpoint_to_offset(systems[ssp.system], ssp, request.startpoint)
        except PermanentError as error:
            without.append(Unresolved(request, str(error)))
        else:
            resolvable[ssp] = request
    return resolvable, without
