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
        check_all_retained(lake, plan)
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
    manifest_of = cache(lambda dataset: DatasetLog(lake, dataset).read()[1])
    for dataset, version, batches in plan.versions_read():
        if is_transient(version):
            why = "its table lived for one run"
        elif (manifest := manifest_of(dataset)) is None:
            why = "the dataset was deleted"
        elif not _is_retained(lake, manifest, version, or_spared=or_spared):
            why = "it was discarded"
        else:
            continue
        met = f"batch {batches[0]}"
        if len(batches) > 1:
            met = f"batches {batches[0]} to {batches[-1]}"
        raise VersionDiscardedError(
            f"dataset {dataset!r}: version {version}, which {met} of application"
            f" {plan.application!r} read, is gone: {why}.",
            "Replay with versions=as-of, if joins are as-of, or versions=current (--versions). To"
            " keep earlier versions longer, change the policy: discard=DiscardPolicy(keep=…,"
            " grace=…).",
            dataset=dataset,
            version=version,
        )


def _is_retained(lake: Lake, manifest: DatasetManifest, version: str, *, or_spared: bool) -> bool:
    try:
        manifest.check_kept(version)
    except VersionDiscardedError:
        return or_spared and is_readable(lake, manifest, version)
    return True


def is_readable(lake: Lake, manifest: DatasetManifest, version: str) -> bool:
    """Return whether the files of a version still exist; those of a doomed version may."""
    try:
        sealed = read_batch_version(DatasetLog(lake, manifest.name), manifest, version)
    except (DatasetError, ObjectNotFoundError):
        return False
    there = manifest.reachable() | set(manifest.doomed)
    return all(generation.folder in there for generation in sealed.generations if generation.files)


def load_plans(
    lake: Lake, application: str, fan_out: FanOut
) -> dict[str, RecordedPlan | PermanentError]:
    """Return, by id, the plans that requests at tasks name; for a plan that can't be used any
    more, the error.
    """
    named: set[str | None] = set()
    for held in fan_out.tasks.values():
        named |= {request.recorded for request in held.values()}
    plans: dict[str, RecordedPlan | PermanentError] = {}
    for plan_id in named - {None}:
        try:
            plan = read_plan(lake, application, str(plan_id))
            check_all_retained(lake, plan, or_spared=True)
            plans[plan.id] = plan
        except ObjectNotFoundError:
            continue
        except PermanentError as error:
            plans[str(plan_id)] = error
    return plans


def find_held_versions(lake: Lake, application: str) -> dict[str, dict[str, str]]:
    """Return, by dataset and version, a text on the recorded replay of an application that needs
    the version.
    """
    held: dict[str, dict[str, str]] = {}
    for plan in _live_plans(lake, application, _list_plans(lake, application)):
        where = ", ".join(map(str, sorted(plan.spans)[:3]))
        for dataset, version, _ in plan.versions_read():
            why = f"a recorded replay of application {application}, {where}"
            held.setdefault(dataset, {})[version] = why
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
    if not stored:
        return []
    now = read_store_clock(lake.store, f"{lake.application_prefix(application)}/clock")
    # A request moves from the waiting ones to a task, then to the replays. Read in this order, none
    # is missed.
    startpoints = StartpointManager(MetadataStore(lake), application).read()
    replays = application_state(lake, application).offsets.replays.values()
    waiting = {request.recorded for request in (*startpoints.waiting, *startpoints.expired)}
    used = {replay.recorded for replay in replays}
    for held in startpoints.handed.values():
        used |= {request.recorded for request in held.values()}
    if startpoints.unreadable:  # they may name any plan
        used |= stored.keys()
    plans = []
    for plan_id, item in stored.items():
        try:
            plan = read_plan(lake, application, plan_id)
        except ObjectNotFoundError:
            continue
        is_asked = plan.id in waiting and now < plan.expires_at
        if is_asked or plan.id in used or item.modified > now - _GRACE:
            plans.append(plan)
    return plans


def _list_plans(lake: Lake, application: str) -> dict[str, ObjectInfo]:
    """Return, by plan id, the objects that store the plans of an application."""
    folder = f"{lake.application_prefix(application)}/recorded/"
    return {
        item.key.removeprefix(folder).removesuffix(".json"): item
        for item in lake.store.list(folder)
    }


def _key(lake: Lake, application: str, plan: str) -> str:
    return f"{lake.application_prefix(application)}/recorded/{plan}.json"


Span = tuple[str, str]
# Compares two offsets of one partition (below 0, 0 or above 0), or counts the offsets between them.
OffsetFunction = Callable[[SystemStreamPartition, str, str], int]

_NEXT = (
    "Request offsets that batches have read, or other versions (--versions): as-of, if joins are"
    " as-of, or current."
)


def plan_recorded(
    application: AskedApplication, spans: Mapping[SystemStreamPartition, Span]
) -> tuple[Problems, RecordedPlan | None]:
    """Return the problems by partition, and the plan to read these offsets again (None if there are
    problems).

    Nothing is stored or retained yet.
    """
    lake = application.lake
    streams = {}
    for ssp in spans:
        streams[ssp.qualified_stream] = application.snapshot(ssp.qualified_stream)
    asked = AskedOffsets(
        spans,
        {name: stream.info.identity for name, stream in streams.items()},
        lambda at, left, right: streams[at.qualified_stream].system.compare(left, right),
        lambda at, left, right: streams[at.qualified_stream].system.distance(at, left, right),
    )
    log = BatchLog(lake, application.app.name)
    history = collect_main_batches(log.history(None), asked)
    reads = find_first_reads(history, asked)
    problems = explain_unread(asked, reads, history)
    if application.plan is not None:
        problems |= explain_cut(asked, reads, application.plan.tables_joined_after_sends())
    if problems:
        return problems, None
    recorded = _build_plan(application.app, asked, reads, application.at)
    try:
        check_all_retained(lake, recorded)
    except DatasetError as error:
        return dict.fromkeys(spans, str(error)), None
    return {}, recorded


def _build_plan(
    app: Application, asked: AskedOffsets, reads: FirstReads, now: datetime
) -> RecordedPlan:
    """Return the plan to read the requested offsets as `reads` says. It retains nothing before
    `write_plan`.
    """
    pieces: dict[SystemStreamPartition, tuple[RecordedPiece, ...]] = {}
    spans: Ranges = {}
    for ssp, (start, end) in asked.spans.items():
        read_pieces = [RecordedPiece(end=upto, batch=batch) for upto, batch in reads.pieces[ssp]]
        if read_pieces:  # what follows the last piece are offsets without records
            read_pieces[-1] = read_pieces[-1].model_copy(update={"end": end})
        pieces[ssp] = tuple(read_pieces)
        spans[ssp] = OffsetRange(start=start, end=end if read_pieces else start)
    names = {dataset.name for dataset in app.datasets}
    versions = {}
    for batch, joined in reads.versions.items():
        kept = {name: joined.versions[name] for name in joined.versions.keys() & names}
        versions[batch] = joined.model_copy(update={"versions": kept, "reading": RECORDED})
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

    pieces: Mapping[SystemStreamPartition, tuple[tuple[str, int], ...]]
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
        newest = newest or state
        oldest = commit.number
        done = state.last.intent if state.last is not None else None
        if done is not None and not done.reads_again:
            intents.setdefault(done.batch, _drop_former_streams(done, state, asked))
        if all(_has_read_none(state, asked, ssp) for ssp in asked.spans):
            return MainBatches(intents, newest, oldest)
    if oldest <= 1:
        return MainBatches(intents, newest, oldest)
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
    read: dict[SystemStreamPartition, list[tuple[Span, int]]] = {}
    ends = {}
    unread = {}
    numbers = set()
    for ssp, (start, end) in asked.spans.items():
        before = history.gone.get(ssp, (start, start))
        unknown, left = _split_spans(asked.compare, ssp, [(start, end)], before)
        read[ssp] = []
        for number, intent in sorted(history.intents.items()):
            span = intent.ranges.get(ssp)
            if span is None:
                continue
            pieces, left = _split_spans(asked.compare, ssp, left, (span.start, span.end))
            for piece in pieces:
                read[ssp].append((piece, number))
                numbers.add(number)
        ends[ssp] = _list_ends(asked, ssp, read[ssp])
        if unknown or left:
            unread[ssp] = (*unknown, *left)
    versions = {}
    cut = []
    for number in sorted(numbers):
        intent = history.intents[number]
        versions[number] = intent.joined
        if _is_cut(intent, read, number, asked):
            cut.append(number)
    return FirstReads(ends, versions, unread, tuple(cut))


def _list_ends(
    asked: AskedOffsets, ssp: SystemStreamPartition, pieces: Iterable[tuple[Span, int]]
) -> tuple[tuple[str, int], ...]:
    """Return the ends of pieces with the numbers of their batches, in the order of offsets."""
    by_start = cmp_to_key(partial(asked.compare, ssp))
    in_order = sorted(pieces, key=lambda piece: by_start(piece[0][0]))
    return tuple((span[1], number) for span, number in in_order)


def explain_unread(asked: AskedOffsets, reads: FirstReads, history: MainBatches) -> Problems:
    """Return, by partition with such offsets, an error text on why no batch is known that has read
    them first.
    """
    errors = {}
    for ssp, spans in reads.unread.items():
        holes = [span for span in spans if asked.distance(ssp, *span)]
        if holes:
            start, end = holes[0]
            problem = (
                f"{ssp}: it is unknown which versions were read with offsets {start} up to {end}:"
                f" {_explain_hole(asked, history, ssp, start)}."
            )
            errors[ssp] = str(offset_error(ssp, problem, _NEXT, offset=start))
    return errors


def _explain_hole(
    asked: AskedOffsets, history: MainBatches, ssp: SystemStreamPartition, start: str
) -> str:
    """Return why no batch is known that has read the offsets from `start` on."""
    gone = history.gone.get(ssp)
    if gone is not None and asked.compare(ssp, start, gone[1]) < 0:
        return f"the batch log's history from before its commit {history.oldest} is gone"
    state = history.newest
    if state is None:
        return "no batch has read them yet"
    opened = state.open
    if opened is not None and ssp in opened.ranges and not opened.reads_again:
        return f"the open batch {opened.batch}, or a later one, reads them first"
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
    problem = (
        f"only a part of batch {reads.cut[0]} is requested, and its joins read in"
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
    start = asked.spans[ssp][0]
    if not _is_same_stream(state, asked, ssp.qualified_stream):
        return start, start
    return start, _reached(state, asked, ssp)


def _reached(state: ApplicationState, asked: AskedOffsets, ssp: SystemStreamPartition) -> str:
    """Return the end of all that batches up to this state may have read of the partition."""
    checkpoint = state.checkpoint.get(ssp, asked.spans[ssp][0])
    furthest = state.offsets.furthest.get(ssp, checkpoint)
    return furthest if asked.compare(ssp, furthest, checkpoint) > 0 else checkpoint


def _split_spans(
    compare: OffsetFunction, ssp: SystemStreamPartition, spans: Iterable[Span], read: Span
) -> tuple[list[Span], list[Span]]:
    """Return the parts of these spans inside the span `read`, and the parts outside it, without
    empty ones.
    """
    by_offset = cmp_to_key(partial(compare, ssp))
    within = []
    left = []
    for start, end in spans:
        first = max(start, read[0], key=by_offset)
        last = min(end, read[1], key=by_offset)
        parts = [(start, end)]
        if compare(ssp, first, last) < 0:
            within.append((first, last))
            parts = [(start, first), (last, end)]
        left += [part for part in parts if compare(ssp, *part) < 0]
    return within, left


def _is_cut(
    intent: Intent,
    read: Mapping[SystemStreamPartition, list[tuple[Span, int]]],
    number: int,
    asked: AskedOffsets,
) -> bool:
    """Return whether the batch `number` read other offsets than the ones in `read` that it read
    first.
    """
    for ssp, whole in intent.ranges.items():
        if asked.compare(ssp, whole.start, whole.end) == 0:
            continue
        mine = [span for span, batch in read.get(ssp, ()) if batch == number]
        if len(mine) != 1:
            return True
        (start, end) = mine[0]
        if asked.compare(ssp, start, whole.start) or asked.compare(ssp, end, whole.end):
            return True
    return False
