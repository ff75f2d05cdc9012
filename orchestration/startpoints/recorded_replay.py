"""Recorded replays read records again with the dataset versions of the batches that read them
first.

    history      batch 7: p0 [10, 20) p1 [4, 9)    batch 8: p0 [20, 25)    batch 9: a replay,
                                                   ignored
    request      p0 [15, 25) p1 [4, 6)
    pieces       p0: up to 20 as batch 7, up to 25 as batch 8; p1: up to 6 as batch 7

The plan of a replay keeps these versions from being deleted until the replay has ended:

    applications/{name}/recorded/{id}.json      pieces of each partition, and the versions of each
                                                piece

It is written before the requests that name it, and only then are its versions checked; a discard
dooms versions first and reads the plans afterwards. So one of the two always sees the other, as
with leases. A plan is live (and retains its versions) while it is younger than ten minutes, while a
request or a fan-out names it, and while one of its replays is under way.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache, cmp_to_key, partial
from typing import NamedTuple

from pydantic import ValidationError

from dagster_adjunct.assets.reading.stored_versions import read_batch_version
from dagster_adjunct.assets.unbounded.transient_table import is_transient
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.manifest import DatasetManifest
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import (
    ApplicationState,
    BatchLog,
    application_state,
)
from dagster_adjunct.orchestration.batch_log.intent import Intent, JoinedVersions, Ranges
from dagster_adjunct.orchestration.operators.stream_facts import RECORDED
from dagster_adjunct.orchestration.startpoints.fan_out import FanOut
from dagster_adjunct.orchestration.startpoints.positions import AskedApplication, offset_error
from dagster_adjunct.orchestration.startpoints.recorded_plan import RecordedPiece, RecordedPlan
from dagster_adjunct.orchestration.startpoints.store import StartpointManager
from dagster_adjunct.resources.documents import first_validation_problem
from dagster_adjunct.resources.errors import (
    DatasetError,
    MalformedDocumentError,
    ObjectNotFoundError,
    PermanentError,
    VersionDiscardedError,
)
from dagster_adjunct.resources.metadata import MetadataStore
from dagster_adjunct.resources.objects.commit_log import Commit
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.objects.store import ObjectInfo, read_store_clock
from dagster_adjunct.resources.streams.system import OffsetRange, SystemStreamPartition
from dagster_adjunct.resources.times import add_span

Problems = dict[SystemStreamPartition, str]
"""Why offsets of these partitions can't be read again."""

# How long a plan is live without a request that names it: long enough to write the requests.
_GRACE = timedelta(minutes=10)


def write_plan(lake: Lake, plan: RecordedPlan) -> None:
    """Store the plan, which retains its versions from here on. If one is gone, raises
    VersionDiscardedError and stores nothing."""
    key = _key(lake, plan.application, plan.id)
    lake.store.put_if_absent(key, plan.model_dump_json().encode())
    try:
        check_all_retained(lake, plan)  # afterwards: a later discard spares its versions
    except BaseException:
        lake.store.delete(key)
        raise


def read_plan(lake: Lake, application: str, plan: str) -> RecordedPlan:
    """Return a stored plan. Raises ObjectNotFoundError and MalformedDocumentError."""
    key = _key(lake, application, plan)
    try:
        return RecordedPlan.model_validate_json(lake.store.get(key).data)
    except ValidationError as error:
        raise MalformedDocumentError(
            f"the plan of a recorded replay can't be read in {key}:"
            f" {first_validation_problem(error)}.",
            "Take the replay back (adjunct startpoint clear MODULE:APP PARTITION --reason …) and"
            " request it again, or upgrade if a newer version wrote it.",
            document=key,
        ) from error


def check_all_retained(lake: Lake, plan: RecordedPlan, *, or_spared: bool = False) -> None:
    """Raise VersionDiscardedError for the first version of the plan that can't be read any more.

    A version that a discard has doomed is gone, for a new plan. With `or_spared`, for a plan that
    was stored before the discard, it is not, as long as its files exist: the discard has spared
    them because of the plan.
    """

    @cache
    def read_manifest(dataset: str) -> DatasetManifest | None:
        """Return the current manifest of a dataset, read once; None if there is none."""
        _, manifest = DatasetLog(lake, dataset).read()
        return manifest

    for read in plan.versions_read():
        why = ""
        if is_transient(read.version):
            why = "its table lived for one run"
        else:
            manifest = read_manifest(read.dataset)
            if manifest is None:
                why = "the dataset was deleted"
            elif not _is_retained(lake, manifest, read.version, or_spared=or_spared):
                why = "it was discarded"
        if not why:
            continue
        first = read.batches[0]
        last = read.batches[-1]
        if last != first:
            readers = f"batches {first} to {last}"
        else:
            readers = f"batch {first}"
        raise VersionDiscardedError(
            f"dataset {read.dataset!r}: version {read.version}, which {readers} of application"
            f" {plan.application!r} read, is gone: {why}.",
            "Replay with versions=as-of, if joins are as-of, or versions=current (--versions). To"
            " keep earlier versions longer, change the policy: discard=DiscardPolicy(keep=…,"
            " grace=…).",
            dataset=read.dataset,
            version=read.version,
        )


def _is_retained(lake: Lake, manifest: DatasetManifest, version: str, *, or_spared: bool) -> bool:
    """Whether a version can still be read. A doomed one can be only with `or_spared`, and as long
    as its files exist.
    """
    try:
        manifest.check_kept(version)
    except VersionDiscardedError:
        return or_spared and may_be_readable(lake, manifest, version)
    return True


def may_be_readable(lake: Lake, manifest: DatasetManifest, version: str) -> bool:
    """Return whether the files of a version exist. True also for a doomed version, whose files may
    be deleted at any time.
    """
    try:
        sealed = read_batch_version(DatasetLog(lake, manifest.name), manifest, version)
    except (DatasetError, ObjectNotFoundError):
        return False
    not_deleted = manifest.reachable() | set(manifest.doomed)
    for generation in sealed.generations:
        if generation.files and generation.folder not in not_deleted:
            return False
    return True


def load_plans(
    lake: Lake, application: str, fan_out: FanOut
) -> dict[str, RecordedPlan | PermanentError]:
    """Return, by id, the plans that requests at tasks name; for a plan that can't be used any
    more, the error. Plans that are not stored are left out.
    """
    plan_ids: set[str] = set()
    for requests in fan_out.tasks.values():
        for request in requests.values():
            if request.recorded is not None:
                plan_ids.add(request.recorded)
    plans: dict[str, RecordedPlan | PermanentError] = {}
    for plan_id in plan_ids:
        try:
            plan = read_plan(lake, application, plan_id)
            check_all_retained(lake, plan, or_spared=True)
            plans[plan.id] = plan
        except ObjectNotFoundError:
            continue
        except PermanentError as error:
            plans[plan_id] = error
    return plans


def find_held_versions(lake: Lake, application: str) -> dict[str, dict[str, str]]:
    """Return, by dataset and version, a text on the recorded replay of an application that needs
    the version.
    """
    held: dict[str, dict[str, str]] = {}
    for plan in _live_plans(lake, application, _list_plans(lake, application)):
        where = ", ".join(map(str, sorted(plan.spans)[:3]))
        for read in plan.versions_read():
            why = f"a recorded replay of application {application}, {where}"
            held.setdefault(read.dataset, {})[read.version] = why
    return held


def purge_plans(lake: Lake, application: str) -> int:
    """Delete the plans that are no longer live; return how many."""
    stored = _list_plans(lake, application)
    live = {plan.id for plan in _live_plans(lake, application, stored)}
    gone = [item.key for plan, item in stored.items() if plan not in live]
    lake.store.delete_many(gone)
    return len(gone)


def _live_plans(
    lake: Lake, application: str, stored: Mapping[str, ObjectInfo]
) -> list[RecordedPlan]:
    """Return those of an application's stored plans that retain versions: a request or a replay
    names them, or they were just stored.
    """
    if not stored:
        return []
    now = read_store_clock(lake.store, f"{lake.application_prefix(application)}/clock")
    # A request moves from the waiting ones to a task, then to the replays. Read in this order, none
    # is missed.
    startpoints = StartpointManager(MetadataStore(lake), application).read()
    replays = application_state(lake, application).offsets.replays.values()
    waiting = {request.recorded for request in (*startpoints.waiting, *startpoints.expired)}
    used = {replay.recorded for replay in replays}
    for of_task in startpoints.handed.values():
        used |= {request.recorded for request in of_task.values()}
    if startpoints.unreadable:  # they may name any plan
        used |= stored.keys()
    plans = []
    for plan_id, item in stored.items():
        try:
            plan = read_plan(lake, application, plan_id)
        except ObjectNotFoundError:
            continue
        is_requested = plan.id in waiting and now < plan.expires_at
        is_new = item.modified > now - _GRACE
        if is_requested or plan.id in used or is_new:
            plans.append(plan)
    return plans


def _list_plans(lake: Lake, application: str) -> dict[str, ObjectInfo]:
    """Return, by plan id, the objects that store the plans of an application."""
    folder = f"{lake.application_prefix(application)}/recorded/"
    plans = {}
    for item in lake.store.list(folder):
        plan_id = item.key.removeprefix(folder).removesuffix(".json")
        plans[plan_id] = item
    return plans


def _key(lake: Lake, application: str, plan: str) -> str:
    """Return the key of the object that stores a plan."""
    return f"{lake.application_prefix(application)}/recorded/{plan}.json"


class Span(NamedTuple):
    """The offsets of a partition from `start` up to, excluding, `end`."""

    start: str
    end: str


class SpanRead(NamedTuple):
    """Offsets of a partition, and the number of the batch that read them first."""

    span: Span
    batch: int


class PieceEnd(NamedTuple):
    """The end of a piece of offsets, and the number of the batch that read the piece first."""

    end: str
    batch: int


# Compares two offsets of one partition (below 0, 0 or above 0), or counts the offsets between them.
OffsetFunction = Callable[[SystemStreamPartition, str, str], int]

_NEXT_STEP = (
    "Request offsets that batches have read, or other versions (--versions): as-of, if joins are"
    " as-of, or current."
)


class PlannedReplay(NamedTuple):
    """A plan to read offsets again, None if there are `problems`."""

    problems: Problems
    plan: RecordedPlan | None


def plan_recorded(
    application: AskedApplication, spans: Mapping[SystemStreamPartition, Span]
) -> PlannedReplay:
    """Return the plan to read these offsets again. Nothing is stored or retained yet."""
    lake = application.lake
    streams = {}
    for ssp in spans:
        streams[ssp.qualified_stream] = application.snapshot(ssp.qualified_stream)
    asked = AskedOffsets(
        spans=spans,
        identities={name: stream.info.identity for name, stream in streams.items()},
        compare=lambda ssp, left, right: streams[ssp.qualified_stream].system.compare(left, right),
        distance=lambda ssp, start, end: streams[ssp.qualified_stream].system.distance(
            ssp, start, end
        ),
    )
    log = BatchLog(lake, application.app.name)
    history = collect_main_batches(log.history(None), asked)
    reads = find_first_reads(history, asked)
    problems = explain_unread(asked, reads, history)
    if application.plan is not None:
        problems |= explain_cut(asked, reads, application.plan.tables_joined_after_sends())
    if problems:
        return PlannedReplay(problems, None)
    plan = _build_plan(application.app, asked, reads, application.at)
    try:
        check_all_retained(lake, plan)
    except DatasetError as error:
        return PlannedReplay(dict.fromkeys(spans, str(error)), None)
    return PlannedReplay({}, plan)


def _build_plan(
    app: Application, asked: AskedOffsets, reads: FirstReads, now: datetime
) -> RecordedPlan:
    """Return the plan to read the requested offsets as `reads` says. It retains nothing before
    `write_plan`.
    """
    pieces: dict[SystemStreamPartition, tuple[RecordedPiece, ...]] = {}
    spans: Ranges = {}
    for ssp, (start, end) in asked.spans.items():
        of_partition = [RecordedPiece(end=read.end, batch=read.batch) for read in reads.pieces[ssp]]
        if of_partition:  # what follows the last piece are offsets without records
            of_partition[-1] = of_partition[-1].model_copy(update={"end": end})
            spans[ssp] = OffsetRange(start=start, end=end)
        else:  # no records
            spans[ssp] = OffsetRange(start=start, end=start)
        pieces[ssp] = tuple(of_partition)
    names = {dataset.name for dataset in app.datasets}
    versions = {}
    for batch, joined in reads.versions.items():
        of_app = {name: joined.versions[name] for name in joined.versions.keys() & names}
        versions[batch] = joined.model_copy(update={"versions": of_app, "reading": RECORDED})
    streams = {}
    for name, identity in asked.identities.items():
        if identity is not None:
            streams[name] = identity
    return RecordedPlan(
        id=uuid.uuid4().hex,
        application=app.name,
        expires_at=add_span(now, app.startpoints_expire_after),
        streams=streams,
        spans=spans,
        pieces=pieces,
        versions=versions,
    )


@dataclass(frozen=True, slots=True)
class AskedOffsets:
    """The offsets to read again: `spans` has [start, end) by partition, `identities` the identity
    of each stream.

    `compare` orders the offsets of a partition, `distance` counts them.
    """

    spans: Mapping[SystemStreamPartition, Span]
    identities: Mapping[str, str | None]
    compare: OffsetFunction
    distance: OffsetFunction


@dataclass(frozen=True, slots=True)
class MainBatches:
    """The closed batches of the main position that may have read some offsets, from the batch log.

    `intents` has them by number, `newest` is the newest state of the application (None before its
    first commit), `oldest` the number of the oldest commit read. `gone` has, by partition, which of
    the offsets may have been read by batches whose commits the log has deleted.
    """

    intents: Mapping[int, Intent]
    newest: ApplicationState | None
    oldest: int
    gone: Mapping[SystemStreamPartition, Span] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FirstReads:
    """Which batches read the requested offsets first.

    `pieces` has, by partition and in order of offsets, the end of each piece and the number of the
    batch that read it first. Pieces are contiguous except where `unread` has offsets, of which no
    such batch is known. `versions` has the dataset versions that each batch read. `cut` are the
    batches of which only a part is requested.
    """

    pieces: Mapping[SystemStreamPartition, tuple[PieceEnd, ...]]
    versions: Mapping[int, JoinedVersions]
    unread: Mapping[SystemStreamPartition, tuple[Span, ...]]
    cut: tuple[int, ...]


def collect_main_batches(
    history: Iterable[tuple[Commit, ApplicationState]], asked: AskedOffsets
) -> MainBatches:
    """Return the closed batches of the main input that may have read the offsets.

    `history` is newest first; it is read only as far back as batches may have read the offsets.
    """
    intents: dict[int, Intent] = {}
    newest = None
    oldest = 0
    for commit, state in history:
        if newest is None:
            newest = state
        oldest = commit.number
        if state.last is not None and not state.last.intent.reads_again:
            intent = state.last.intent
            intents.setdefault(intent.batch, _drop_former_streams(intent, state, asked))
        if all(_has_read_none(state, asked, ssp) for ssp in asked.spans):
            return MainBatches(intents, newest, oldest)
    is_complete = oldest <= 1  # the log has its first commit, or none
    if is_complete:
        return MainBatches(intents, newest, oldest)
    # `state` is that of the oldest commit left.
    gone = {ssp: _read_up_to(state, asked, ssp) for ssp in asked.spans}
    return MainBatches(intents, newest, oldest, gone)


def _drop_former_streams(intent: Intent, state: ApplicationState, asked: AskedOffsets) -> Intent:
    """Return the intent without ranges of streams that are not the requested ones."""
    ranges = dict(intent.ranges)
    for ssp in intent.ranges:
        if not _is_same_stream(state, asked, ssp.qualified_stream):
            del ranges[ssp]
    return intent.model_copy(update={"ranges": ranges})


def find_first_reads(history: MainBatches, asked: AskedOffsets) -> FirstReads:
    """Return which of these batches read each offset first.

    Offsets that batches of deleted commits may have read before are unread.
    """
    read: dict[SystemStreamPartition, list[SpanRead]] = {}
    ends = {}
    unread = {}
    numbers = set()
    for ssp, span in asked.spans.items():
        gone = history.gone.get(ssp, Span(span.start, span.start))
        unknown = _split_spans(asked.compare, ssp, [span], gone)
        left = unknown.outside
        read[ssp] = []
        for number, intent in sorted(history.intents.items()):
            batch_range = intent.ranges.get(ssp)
            if batch_range is None:
                continue
            batch_span = Span(batch_range.start, batch_range.end)
            parts = _split_spans(asked.compare, ssp, left, batch_span)
            left = parts.outside
            for part in parts.inside:
                read[ssp].append(SpanRead(part, number))
                numbers.add(number)
        ends[ssp] = _list_ends(asked, ssp, read[ssp])
        if unknown.inside or left:
            unread[ssp] = (*unknown.inside, *left)
    versions = {}
    cut = []
    for number in sorted(numbers):
        intent = history.intents[number]
        versions[number] = intent.joined
        if _is_cut(intent, read, number, asked):
            cut.append(number)
    return FirstReads(ends, versions, unread, tuple(cut))


def _list_ends(
    asked: AskedOffsets, ssp: SystemStreamPartition, pieces: Iterable[SpanRead]
) -> tuple[PieceEnd, ...]:
    """Return the ends of pieces with the numbers of their batches, in the order of offsets."""
    by_offset = cmp_to_key(partial(asked.compare, ssp))
    in_order = sorted(pieces, key=lambda piece: by_offset(piece.span.start))
    return tuple(PieceEnd(piece.span.end, piece.batch) for piece in in_order)


def explain_unread(asked: AskedOffsets, reads: FirstReads, history: MainBatches) -> Problems:
    """Return, by partition with such offsets, an error text on why no batch is known that has read
    them first.
    """
    problems = {}
    for ssp, spans in reads.unread.items():
        holes = [span for span in spans if asked.distance(ssp, span.start, span.end)]
        if not holes:
            continue
        start, end = holes[0]
        problem = (
            f"{ssp}: it is unknown which versions were read with offsets {start} up to {end}:"
            f" {_explain_hole(asked, history, ssp, start)}."
        )
        problems[ssp] = str(offset_error(ssp, problem, _NEXT_STEP, offset=start))
    return problems


def _explain_hole(
    asked: AskedOffsets, history: MainBatches, ssp: SystemStreamPartition, start: str
) -> str:
    """Return why no batch is known that has read the offsets from `start` on."""
    gone = history.gone.get(ssp)
    if gone is not None and asked.compare(ssp, start, gone.end) < 0:
        return f"the batch log's history from before its commit {history.oldest} is gone"
    state = history.newest
    if state is None:
        return "no batch has read them yet"
    batch = state.open
    if batch is not None and ssp in batch.ranges and not batch.reads_again:
        return f"the open batch {batch.batch}, or a later one, reads them first"
    if asked.compare(ssp, state.checkpoint.get(ssp, start), start) <= 0:
        return "no batch has read them yet"
    return "no batch of the main position has read them"


def explain_cut(
    asked: AskedOffsets, reads: FirstReads, joined_after_sends: AbstractSet[str]
) -> Problems:
    """Return, by partition, an error text on why a batch can't be replayed in part; empty if that
    is possible.

    It is not if a join of the application reads a local table after the batch has sent records to
    it: the join has read what the whole batch sent. `joined_after_sends` are these tables.
    """
    if not joined_after_sends or not reads.cut:
        return {}
    first, *_ = reads.cut
    problem = (
        f"only a part of batch {first} is requested, and its joins read in"
        f" {min(joined_after_sends)!r} what the whole batch had sent there before."
    )
    step = (
        "Request whole batches, of all their partitions at once: adjunct checkpoint history"
        " APPLICATION lists their offsets."
    )
    return {ssp: str(offset_error(ssp, f"{ssp}: {problem}", step)) for ssp in asked.spans}


def _is_same_stream(state: ApplicationState, asked: AskedOffsets, stream: str) -> bool:
    """Return whether the state's offsets are of the same stream as the requested ones, not of a
    former stream of its name. True for a stream that is not requested."""
    known = state.offsets.streams.get(stream)
    return known == asked.identities.get(stream, known)


def _has_read_none(
    state: ApplicationState, asked: AskedOffsets, ssp: SystemStreamPartition
) -> bool:
    """Return whether it is certain that no batch up to this state has read any of the
    partition's requested offsets.
    """
    start, end = asked.spans[ssp]
    if asked.compare(ssp, start, end) == 0:
        return True
    return asked.compare(ssp, _reached(state, asked, ssp), start) <= 0


def _read_up_to(state: ApplicationState, asked: AskedOffsets, ssp: SystemStreamPartition) -> Span:
    """Return which of the partition's requested offsets batches up to this state may have read; an
    empty span for none.

    These are the offsets before the furthest position that the state knows.
    """
    start, _ = asked.spans[ssp]
    if not _is_same_stream(state, asked, ssp.qualified_stream):
        return Span(start, start)
    return Span(start, _reached(state, asked, ssp))


def _reached(state: ApplicationState, asked: AskedOffsets, ssp: SystemStreamPartition) -> str:
    """Return the end of all that batches up to this state may have read of the partition."""
    checkpoint = state.checkpoint.get(ssp, asked.spans[ssp].start)
    furthest = state.offsets.furthest.get(ssp, checkpoint)
    if asked.compare(ssp, furthest, checkpoint) > 0:
        return furthest
    return checkpoint


class _SplitSpans(NamedTuple):
    """The parts of spans inside and outside another span, without empty ones."""

    inside: list[Span]
    outside: list[Span]


def _split_spans(
    compare: OffsetFunction, ssp: SystemStreamPartition, spans: Iterable[Span], by: Span
) -> _SplitSpans:
    """Return the parts of these spans of one partition inside and outside the span `by`."""
    by_offset = cmp_to_key(partial(compare, ssp))
    split = _SplitSpans([], [])
    for span in spans:
        first = max(span.start, by.start, key=by_offset)
        last = min(span.end, by.end, key=by_offset)
        outside = [span]
        if compare(ssp, first, last) < 0:
            split.inside.append(Span(first, last))
            outside = [Span(span.start, first), Span(last, span.end)]
        for part in outside:
            if compare(ssp, part.start, part.end) < 0:
                split.outside.append(part)
    return split


def _is_cut(
    intent: Intent,
    read: Mapping[SystemStreamPartition, list[SpanRead]],
    number: int,
    asked: AskedOffsets,
) -> bool:
    """Return whether only a part of what the batch `number` read is in `read`, the requested
    offsets with the batches that read them first.
    """
    for ssp, whole in intent.ranges.items():
        if asked.compare(ssp, whole.start, whole.end) == 0:
            continue
        read_first = [span for span, batch in read.get(ssp, ()) if batch == number]
        if len(read_first) != 1:
            return True
        (span,) = read_first
        is_whole_start = asked.compare(ssp, span.start, whole.start) == 0
        is_whole_end = asked.compare(ssp, span.end, whole.end) == 0
        if not is_whole_start or not is_whole_end:
            return True
    return False
