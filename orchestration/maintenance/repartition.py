"""Rewrite streams and datasets into another number of partitions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from dagster_adjunct.assets.reading.change_streams import ChangeImageStreams, ChangeStreams
from dagster_adjunct.assets.reading.stored_versions import list_datasets
from dagster_adjunct.assets.rebucketing import (
    RebucketReport,
    repartition_table,
    repartition_versions,
)
from dagster_adjunct.assets.versions.dataset_log import DatasetLog, commit_repartition
from dagster_adjunct.assets.versions.manifest import UnboundedManifest, has_read_all
from dagster_adjunct.orchestration.batch_log.batch_log import (
    ApplicationState,
    BatchLog,
    list_application_states,
    list_applications,
)
from dagster_adjunct.orchestration.batch_log.intent import of_stream
from dagster_adjunct.orchestration.maintenance.delete import Readers, find_followers
from dagster_adjunct.orchestration.maintenance.expire import needed_versions
from dagster_adjunct.orchestration.startpoints.positions import (
    carry_over_stream,
    describe_carry_over,
    has_pending_startpoints,
)
from dagster_adjunct.orchestration.startpoints.store import FAN_OUTS, REQUESTS, concerns_stream
from dagster_adjunct.resources.arguments import require_reason
from dagster_adjunct.resources.errors import CommitConflictError, MalformedDocumentError
from dagster_adjunct.resources.metadata import MetadataStore
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.reports import Report
from dagster_adjunct.resources.streams.lake.manifest import StreamState
from dagster_adjunct.resources.streams.lake.readers import list_readers
from dagster_adjunct.resources.streams.lake.repartition import plan_repartitioning, repartition
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import StreamInfo, SystemStreamPartition
from dagster_adjunct.resources.validation import validated


@dataclass(frozen=True, slots=True)
class RepartitionReport(Report):
    """What a repartitioning did, or (`dry_run`) would do. `rows` are records.

    `carried` applications and `datasets` continue at their positions; `affected` are readers whose
    next run fails, or which can't restate their results any more: only a forced repartitioning
    accepts them. `blocking` are readers that none accepts.
    """

    name: str
    before: int
    partitions: int
    rows: int
    carried: tuple[str, ...] = ()
    affected: tuple[str, ...] = ()
    blocking: tuple[str, ...] = ()
    dry_run: bool = False
    datasets: tuple[str, ...] = ()

    def summary(self) -> str:
        """Return the report in one line."""
        verb = "would be rewritten" if self.dry_run else "rewritten"
        return (
            f"stream {self.name}: {self.rows:,} records {verb} from {self.before} into"
            f" {self.partitions} partitions; declare partitions={self.partitions} where it is"
            " declared"
        )


@validated
def repartition_stream(
    lake: Lake,
    name: str,
    partitions: int,
    *,
    reason: str,
    by: str,
    force: bool = False,
    dry_run: bool = False,
) -> RepartitionReport:
    """Rewrite a keyed stream of the lake into another number of partitions, atomically.

    The order of each key's records is kept, and markers stay between the same records. Offsets
    start again at 0; applications, datasets and named readers that have read all of it continue
    with later records. Raises StillReadError while an open batch reads or writes it or a startpoint
    waits on it, and, unless `force`, while a reader or dataset has not read all of it, or an
    application restates its results (`restate=`): after a forced rewrite the next run of the former
    fails with advice, and results of the latter are not restated. Raises ConfigurationError for a
    stream without key, or with markers that differ between partitions.
    """
    streams = LakeStreams(lake)
    require_reason(reason, f"stream {name!r}", "repartitioned", stream=f"lake.{name}")
    _, seen = streams.state(name)
    rows = sum(entry.rows for entry in seen.entries())
    before = seen.declaration.partitions
    if dry_run:
        plan_repartitioning(streams, name, seen, partitions)  # raises what the rewrite would
        found = _inspect_readers(lake, name, seen)
        return RepartitionReport(
            name,
            before,
            partitions,
            rows,
            carried=found.applications,
            affected=found.others.affected,
            blocking=found.others.blocking,
            dry_run=True,
            datasets=found.datasets,
        )

    def check(state: StreamState) -> None:
        """Raise StillReadError if the stream, in this state, can't be rewritten now."""
        _inspect_readers(lake, name, state).others.check(
            f"stream {name!r} can't be repartitioned now",
            "Let their runs end, abandon their batches (adjunct checkpoint abandon APPLICATION"
            " --reason …) or take back startpoints (adjunct startpoint clear MODULE:APP"
            f" lake.{name} --reason …), and repeat it.",
            "Run the readers that have not read all of it, and repeat it. Or force it (--force,"
            " force=True): no record is lost or read twice, the next run of such a reader fails"
            " with advice, and results that can't be restated any more stay as they are, until a"
            " startpoint (--oldest) lets the application read all again.",
            force=force,
            stream=f"lake.{name}",
        )

    after = repartition(streams, name, partitions, reason=reason, by=by, check=check)
    # Readers that had not read all of the stream as it was (`seen`) still have positions in that.
    affected = _inspect_readers(lake, name, seen).others.affected
    rows = sum(entry.rows for entry in after.entries())
    carried = _carry_positions(lake, name, by)
    return RepartitionReport(
        name,
        before,
        partitions,
        rows,
        carried=carried.applications,
        affected=affected,
        datasets=carried.datasets,
    )


@validated
def repartition_dataset(
    lake: Lake, name: str, partitions: int, *, reason: str, by: str, dry_run: bool = False
) -> RebucketReport:
    """Rewrite a dataset into another number of partitions, atomically; with `dry_run` only report
    it.

    Rewrites every retained version of a bounded dataset, under a new id, or the served table of an
    unbounded one, whose earlier versions keep their partitions. Entries, names and offsets are
    kept. Readers with a lease keep their version until they release it. Applications that follow
    its changes continue at their positions. Raises StillReadError while an open batch of an
    application needs a version, or an application has yet to read changes; DatasetError while a
    bootstrap is not finished, and ConfigurationError for a broadcast dataset.
    """
    _, manifest = DatasetLog(lake, name).read()
    if isinstance(manifest, UnboundedManifest):
        rewrite = repartition_table
    else:
        rewrite = repartition_versions
    needed = partial(needed_versions, lake, name)
    report = rewrite(lake, name, partitions, reason=reason, by=by, roots=needed, dry_run=dry_run)
    if not dry_run:
        for changes in (ChangeStreams(lake), ChangeImageStreams(lake)):
            _carry_applications(lake, f"{changes.name}.{name}", changes.info(name), by)
    return report


@dataclass(frozen=True, slots=True)
class _StreamReaders:
    """The applications and the datasets that have read all of a stream, and its other readers.

    Of the `others`, those are `blocking` that use offsets now which the rewrite would mix up; the
    rest is `affected`.
    """

    applications: tuple[str, ...]
    datasets: tuple[str, ...]
    others: Readers


def _inspect_readers(lake: Lake, name: str, state: StreamState) -> _StreamReaders:
    """Return the readers of a stream, by what a rewrite of it in this state does to them."""
    stream = f"lake.{name}"
    carried: list[str] = []
    affected: list[str] = []
    blocking: list[str] = []
    for application, app_state in list_application_states(lake).items():
        used = _describe_use(application, app_state, stream, state)
        if used:
            blocking.append(used)
        elif _has_read_all(app_state, name, state):
            carried.append(application)
            affected += _describe_lost_restatements(application, app_state)
        elif app_state.has_position_in(stream):
            affected.append(f"application {application} has not read all of it")
        if _has_waiting_startpoint(lake, application, stream):
            # After the rewrite, the startpoint's offset would be that of another record.
            blocking.append(f"a startpoint of application {application} waits on it")
    for reader in list_readers(lake, name):
        if reader.problem or reader.behind or reader.lost:
            affected.append(f"reader {reader.name} has not read all of it")
    followers = find_followers(lake, stream)
    ends = tuple(map(str, state.next))
    datasets = []
    for dataset, manifest in followers.manifests.items():
        if has_read_all(manifest, state.id, ends):
            datasets.append(dataset)
        else:
            affected.append(
                f"dataset {dataset} follows it and has not read all of it, or is being built"
            )
    others = Readers(tuple(blocking), (*affected, *followers.unknown))
    return _StreamReaders(tuple(carried), tuple(datasets), others)


def _describe_use(
    application: str, app_state: ApplicationState, stream: str, state: StreamState
) -> str:
    """Return how an application uses offsets of the stream now; "" if it does not."""
    batch = app_state.open
    if batch is not None:
        is_reader = stream in batch.streams
        may_write = application in state.producers
        if is_reader or may_write:
            return (
                f"batch {batch.batch} of application {application} is open and reads it or"
                " writes to it"
            )
    if has_pending_startpoints(app_state, stream):
        return f"a startpoint of application {application} is being followed in it"
    return ""


def _describe_lost_restatements(application: str, app_state: ApplicationState) -> Iterator[str]:
    """Yield that an application can't restate its results of what it has read of the stream, if it
    restates results.
    """
    if app_state.offsets.joined or app_state.offsets.restated:
        yield (
            f"application {application} restates results when datasets change (restate=), which it"
            " can't for records of this stream that it has read before"
        )


def _has_read_all(app_state: ApplicationState, name: str, state: StreamState) -> bool:
    """Whether an application is exactly at the ends of the stream `name` in this state."""
    stream = f"lake.{name}"
    ends = {}
    for number, offset in enumerate(state.next):
        ends[SystemStreamPartition("lake", name, number)] = str(offset)
    if app_state.offsets.streams.get(stream) != state.id:  # it has read one before of this name
        return False
    return of_stream(app_state.checkpoint, stream) == ends


def _has_waiting_startpoint(lake: Lake, application: str, stream: str) -> bool:
    """Whether a startpoint of an application in the stream is not applied."""
    for namespace in (REQUESTS, FAN_OUTS):
        waiting = MetadataStore(lake).namespace(namespace, application).read()
        if any(concerns_stream(stream, key, value) for key, value in waiting.items()):
            return True
    return False


class _Carried(NamedTuple):
    """The applications and the datasets that continue at new positions."""

    applications: tuple[str, ...]
    datasets: tuple[str, ...]


def _carry_positions(lake: Lake, name: str, by: str) -> _Carried:
    """Commit new positions for applications and datasets that had read all of the stream, and
    return their names.

    If another commit comes first, their next run does it.
    """
    stream = f"lake.{name}"
    info = LakeStreams(lake).info(name)
    applications = _carry_applications(lake, stream, info, by)
    datasets = []
    for dataset in list_datasets(lake):
        with suppress(CommitConflictError, MalformedDocumentError):
            if commit_repartition(DatasetLog(lake, dataset), stream, info, by=by):
                datasets.append(dataset)
    return _Carried(applications, tuple(datasets))


def _carry_applications(lake: Lake, stream: str, info: StreamInfo, by: str) -> tuple[str, ...]:
    """Commit new positions for applications that had read all of the stream ("lake.orders"), and
    return their names.
    """
    carried = []
    for application in list_applications(lake):
        log = BatchLog(lake, application)
        logged = log.read()
        if logged.state.open is not None:
            continue
        after = carry_over_stream(logged.state, stream, info)
        if after is not None:
            with suppress(CommitConflictError):
                log.commit(logged, after, by=by, note=describe_carry_over(stream, info))
                carried.append(application)
    return tuple(carried)
