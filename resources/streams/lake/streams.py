"""LakeStreams: append-only streams in the lake's object store, Adjunct's own; and `open_system`,
for any system.

    streams/_names/NAME                        exists for each stream, for listing
    streams/NAME/CURRENT, manifests/…          the commit log (`StreamState`)
    streams/NAME/data/ATTEMPT/part-0000i-…     an append's records, one file a partition
    streams/NAME/pages/…                       pages of the index

An append writes its files and then commits offsets, markers and its producer's sequence at once. A
crash in between leaves files that are in no manifest, which `maintain` deletes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from datetime import datetime
from typing import Any, NamedTuple, TypedDict, Unpack

from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.bucketing.hashing import parse_records_checksum
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    ObjectExistsError,
    SchemaMismatchError,
)
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects import commit_log
from dagster_adjunct.resources.objects.commit_log import Commit, DeletedObjects
from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.column_changes import (
    NO_CHANGES,
    ColumnChanges,
    Evolution,
    FixedColumns,
    describe_former,
    describe_part,
    evolve,
)
from dagster_adjunct.resources.schemas.paths import find_path, normal_path
from dagster_adjunct.resources.schemas.schema import (
    AS_NAMED,
    Schema,
    check_key_types,
    schema_struct,
)
from dagster_adjunct.resources.schemas.types import Array, Map, Struct, Type
from dagster_adjunct.resources.streams import system
from dagster_adjunct.resources.streams.declaration import build_declaration, check_same_declaration
from dagster_adjunct.resources.streams.lake import manifest
from dagster_adjunct.resources.streams.lake.append import LakeAppends
from dagster_adjunct.resources.streams.lake.find import LakeFinds
from dagster_adjunct.resources.streams.lake.maintenance import MaintenanceResult, maintain
from dagster_adjunct.resources.streams.lake.manifest import (
    NAMES_PREFIX,
    CompactionPolicy,
    LakeStreamDeclaration,
    Retention,
    Span,
    StreamState,
)
from dagster_adjunct.resources.streams.lake.read import find_offset_at_time
from dagster_adjunct.resources.streams.startpoint import check_timestamp_ms
from dagster_adjunct.resources.streams.system import (
    LAKE,
    NewStreams,
    Repartitioning,
    StreamCapabilities,
    StreamInfo,
    StreamSystem,
    StreamWriter,
    SystemStreamPartition,
)
from dagster_adjunct.resources.validation import validated, validated_methods

NEW_STREAMS = NewStreams("spark-murmur3", needs_key=True, typed=True)


FindBy = Sequence[str | Sequence[str]]
"""Keys by which records are found: a column each, or several that are a key together."""
Keys = tuple[tuple[str, ...], ...]


class Policies(TypedDict, total=False):
    """What `LakeStreams.maintain` does with a stream; None, the default, is nothing.

    `find_by` are keys, each a column or several: records are indexed by them, so that
    `find_records` finds them quickly.
    """

    retention: Retention | None
    compaction: CompactionPolicy | None
    find_by: FindBy | None


def declare_keys(name: str, schema: Schema, find_by: FindBy | None) -> Keys | None:
    """Return the keys by which the records of a stream are found, None if there are none. Raises
    ConfigurationError or SchemaMismatchError.
    """
    what = f"stream {name!r}: find_by"
    keys = []
    for given in find_by or ():
        key = _normal_key((given,) if isinstance(given, str) else given, schema)
        check_key_types(schema, key, what)
        has_duplicates = len(set(key)) < len(key)
        if not key or has_duplicates or key in keys:
            expected = "different keys, each with one column or several different ones"
            raise argument_error(f"{what} is {find_by!r}", expected, argument="find_by")
        keys.append(key)
    return tuple(sorted(keys)) or None


def _normal_key(names: Iterable[str], schema: Schema) -> tuple[str, ...]:
    """Return the columns and paths of a key in order, paths in their normal form."""
    return tuple(sorted(name if name in schema else normal_path(name) for name in names))


def declare_stream(
    name: str,
    schema: Schema,
    key: Sequence[str],
    partitions: int,
    timestamp: str | None = None,
    **policies: Unpack[Policies],
) -> LakeStreamDeclaration:
    """Return the validated declaration of a lake stream. Raises ConfigurationError or
    SchemaMismatchError.
    """
    declaration = build_declaration(
        LakeStreamDeclaration,
        f"lake.{name}",
        schema,
        tuple(key),
        partitions,
        timestamp=timestamp,
        retention=policies.get("retention"),
        compaction=policies.get("compaction"),
        find_by=declare_keys(name, schema, policies.get("find_by")),
    )
    if timestamp is not None:
        _check_timestamp(schema, timestamp, f"stream {name!r}")
    return declaration


def _check_timestamp(schema: Schema, timestamp: str, what: str) -> None:
    """Raise SchemaMismatchError unless `timestamp` is a column that is a timestamp."""
    if timestamp not in schema and find_path(timestamp, schema.types):
        problem = f"{what}: timestamp= is {timestamp!r}, which is a value inside a column."
        step = (
            "Give the records a column with the time, or send it as __timestamp, and leave"
            " timestamp= out."
        )
        raise SchemaMismatchError(problem, step, column=timestamp)
    kind = schema.field(timestamp, what).type
    if kind != "timestamp":
        problem = (
            f"{what}: column {timestamp!r} is {kind}, but the record's time must be a timestamp."
        )
        step = "Cast it to a timestamp, or leave out timestamp= to use the time of the append."
        raise SchemaMismatchError(problem, step, column=timestamp)


def _follow_keys(stored: LakeStreamDeclaration, now: Schema, changes: ColumnChanges) -> Keys | None:
    """Return the keys of `find_by` after the columns have changed, without those of which a column
    was dropped, or got a type by which records can't be found; None if there are no keys.
    """
    keys = []
    for key in stored.find_by or ():
        names = sorted(changes.follow(name, stored.columns) for name in key)
        with suppress(SchemaMismatchError):
            check_key_types(now, names, "the stream")
            keys.append(tuple(names))
    return tuple(sorted(keys)) or None


class EvolvedDeclaration(NamedTuple):
    """A declaration after its columns have changed, and what has changed."""

    declaration: LakeStreamDeclaration
    evolution: Evolution


def evolve_declaration(
    name: str,
    stored: LakeStreamDeclaration,
    wanted: LakeStreamDeclaration,
    changes: ColumnChanges = NO_CHANGES,
) -> EvolvedDeclaration:
    """Return the stored declaration with the columns that `wanted` adds or widens, and those that
    `changes` renames or drops; the same object if they do not change it.

    The order of columns does not matter, since records are matched by name. Raises
    StreamExistsError for other changes.
    """
    evolution = evolve(
        stored.columns, stored.names, wanted.columns, changes, _fixed_columns(stored)
    )
    evolved = _with_columns(stored, evolution, changes)
    # Callers don't declare the columns' names in files, so these are no difference.
    comparable = wanted.model_copy(update={"names": evolved.names})
    check_same_declaration(
        f"lake.{name}",
        evolved,
        comparable,
        list(evolution.problems),
        "Declare the stream as it exists, or use another name. Columns of a lake stream can be"
        " added and widened, and with renamed= and drop= also renamed and dropped. Change policies"
        f" with configure, and partitions with adjunct stream repartition {name} --partitions N"
        " --reason ….",
    )
    return EvolvedDeclaration(evolved, evolution)


def _fixed_columns(stored: LakeStreamDeclaration) -> FixedColumns:
    """Return the columns that can't change."""
    fixed = list(stored.key)
    if stored.timestamp is not None:
        fixed.append(stored.timestamp)
    return FixedColumns(fixed, "the key or the record's time")


def _keeps_places(before: Type, after: Type) -> bool:
    """Return whether the members of structs keep their places at every depth, with new ones only
    after them, so that checksums of records (`records_checksum`) stay the same.
    """
    if isinstance(before, Struct) and isinstance(after, Struct):
        if len(before.members) > len(after.members):
            return False
        for was, now in zip(before.members, after.members, strict=False):
            if was.name != now.name or not _keeps_places(was.type, now.type):
                return False
    if isinstance(before, Array) and isinstance(after, Array):
        return _keeps_places(before.element, after.element)
    if isinstance(before, Map) and isinstance(after, Map):
        return _keeps_places(before.value, after.value)
    return True


def _with_columns(
    stored: LakeStreamDeclaration, evolution: Evolution, changes: ColumnChanges
) -> LakeStreamDeclaration:
    """Return the declaration with the columns after an evolution; itself if they are the same."""
    same = evolution.schema.to_json() == stored.columns.to_json()
    if same and evolution.names == stored.names:
        return stored
    update = {
        "columns": evolution.schema,
        "names": evolution.names,
        "find_by": _follow_keys(stored, evolution.schema, changes),
    }
    return stored.model_copy(update=update)


def _describe_stream(name: str, state: StreamState) -> StreamInfo:
    """Return the stream's properties, for `LakeStreams.info`."""
    declared = state.declaration
    rewritten = state.rewritten
    repartitioned = None
    if rewritten is not None:
        ended = tuple(map(str, rewritten.ended))
        continued_at = tuple(map(str, rewritten.next))
        identities = tuple(each.id for each in state.rewritings[:-1])
        repartitioned = Repartitioning(rewritten.id, ended, continued_at, identities)
    former = {}
    if declared.names != AS_NAMED:
        earlier = [(each.columns, each.names) for each in state.earlier]
        former = describe_former(earlier, declared.columns, declared.names)
    return StreamInfo(
        name,
        declared.partitions,
        declared.key,
        NEW_STREAMS.partitioner,
        declared.columns,
        default_offset="oldest",
        identity=state.id,
        repartitioned=repartitioned,
        former=former,
        names=declared.names,
        find_by=declared.find_by or (),
    )


@validated_methods
class LakeStreams(LakeFinds, LakeAppends, StreamWriter):
    """The streams of one lake, as the system `lake`. Safe to use from several threads and
    processes.
    """

    capabilities = StreamCapabilities(
        reads_arrow=True,
        reads_in_tasks=True,
        finds_times=True,
        counts_unread=True,
        copies_keys=True,
        keeps_positions=True,
        appends_alone=True,
        evolves=True,
        new_streams=NEW_STREAMS,
    )

    def create(
        self,
        name: str,
        *,
        schema: Schema,
        key: Sequence[str] = (),
        partitions: int,
        timestamp: str | None = None,
        changes: ColumnChanges = NO_CHANGES,
        **policies: Unpack[Policies],
    ) -> StreamInfo:
        """Create a stream, or change the columns of an existing one.

        Options that are left out (except `key`) do not change an existing stream. Its records are
        not rewritten: added columns are null in them, widened ones are cast when they are read.
        Columns of an existing stream that are not in `schema` must be renamed or dropped by
        `changes`, which may stay declared once that has happened (see `change_columns`).
        `key` determines a record's partition (Spark's hash of it modulo `partitions`, also for a
        null key); a stream without key has one partition. `timestamp` is the column with the
        record's time; without it, and where it is null, the time of the append is used. `policies`
        are what `maintain` does. Raises StreamExistsError with the differences, and
        ConfigurationError or SchemaMismatchError.
        """
        self.lake.stream_prefix(name)  # checks the name
        declaration = declare_stream(name, schema, key, partitions, timestamp, **policies)

        def decide(commit: Commit | None) -> dict[str, Any] | None:
            if commit is None or commit_log.is_deletion_commit(commit):
                # The name before the commit, so that every stream is listed; a name without a
                # commit is ignored.
                with suppress(ObjectExistsError):
                    self.lake.store.put_if_absent(f"{NAMES_PREFIX}/{name}", b"")
                return StreamState.empty(declaration).body()
            state = self._parse(commit)
            evolved = evolve_declaration(name, state.declaration, declaration, changes)
            if evolved.declaration is state.declaration:
                return None
            self._check_markers(name, state, evolved.evolution)
            return state.with_declaration(evolved.declaration).body()

        commit = self._transact(name, decide, "create")
        return _describe_stream(name, self._parse(self._require_commit(name, commit)))

    def check_create(
        self,
        name: str,
        *,
        schema: Schema,
        key: Sequence[str] = (),
        partitions: int,
        changes: ColumnChanges = NO_CHANGES,
    ) -> None:
        declaration = declare_stream(name, schema, key, partitions)
        commit = self.log(name).current()
        if commit is not None and not commit_log.is_deletion_commit(commit):
            state = self._parse(commit)
            evolved = evolve_declaration(name, state.declaration, declaration, changes)
            self._check_markers(name, state, evolved.evolution)

    def change_columns(
        self,
        stream: str,
        *,
        renamed: Mapping[str, str] | None = None,
        drop: Sequence[str] = (),
        schema: Schema | None = None,
        dry_run: bool = False,
    ) -> tuple[str, ...]:
        """Rename, drop, add, widen and reorder columns of a stream in one commit; return what
        changes, one sentence each.

        `renamed` are new names by old name, or by path within a column of structs:
        `{"customer.mail": "email"}`, `{"lines[].sku": "item"}`. `drop` are names and paths.
        `schema` are all columns after the change, in their new order; without it the others stay.
        No record is rewritten. A column that was dropped does not come back: a new one of its name
        is null in older records. A repeated call changes nothing.

        Raises SchemaMismatchError for what can't change, such as the key, and for paths that do not
        exist.
        """
        changes = ColumnChanges(renamed or {}, tuple(drop))
        described: list[str] = []  # what changes, as the last call of `decide` has found it

        def decide(commit: Commit | None) -> dict[str, Any] | None:
            state = self._parse(self._require_commit(stream, commit))
            stored = state.declaration
            evolution = evolve(
                stored.columns, stored.names, schema, changes, _fixed_columns(stored), ordered=True
            )
            problems = []
            for path in changes.unknown(stored.columns, stored.names):
                problems.append(f"there is no {path}: {describe_part(stored.columns, path)}")
            problems += evolution.problems
            if problems:
                problem = f"stream {stream!r} can't change so: {'; '.join(problems)}."
                step = "Correct the change, and repeat it."
                raise SchemaMismatchError(problem, step, stream=f"lake.{stream}")
            self._check_markers(stream, state, evolution)
            described[:] = evolution.changes
            now = _with_columns(stored, evolution, changes)
            if now is stored or dry_run:
                return None
            return state.with_declaration(now).body()

        self._transact(stream, decide, "change columns")
        return tuple(described)

    def _check_markers(self, stream: str, state: StreamState, evolution: Evolution) -> None:
        """Raise SchemaMismatchError if markers have checksums of records that could no longer be
        compared after the change.

        Checksums are made of values by their places, so renamed and added columns do not matter.
        """
        stored = state.declaration
        before = schema_struct(stored.names.store(stored.columns))
        after = schema_struct(evolution.names.store(evolution.schema))
        if _keeps_places(before, after):
            return
        spans = {}
        for partition, (oldest, upcoming) in enumerate(zip(state.oldest, state.next, strict=True)):
            spans[partition] = Span(oldest, upcoming)
        for marker in manifest.find_markers(state, self.files_of(stream), spans):
            if parse_records_checksum(marker.checksum):
                problem = (
                    f"stream {stream!r}: version {marker.version!r} has a marker with a checksum of"
                    " its records, which would not match after the change"
                    f" ({'; '.join(evolution.changes)})."
                )
                step = (
                    "Let retention drop this version first, or only rename columns, and add new"
                    " ones after the others."
                )
                raise SchemaMismatchError(problem, step, stream=f"lake.{stream}")

    def info(self, stream: str) -> StreamInfo:
        return _describe_stream(stream, self.state(stream).state)

    def stored_bytes(self, stream: str) -> int:
        return sum(entry.size for entry in self.state(stream).state.entries())

    def describe(self, stream: str) -> dict[str, Any]:
        """Return the stream's declaration, offsets by partition and totals, as `adjunct stream
        show` shows them.
        """
        commit, state = self.state(stream)
        entries = state.entries()
        declared = state.declaration
        stored = declared.model_dump(mode="json")
        return {
            "name": stream,
            "partitions": declared.partitions,
            "key": list(declared.key),
            "partitioner": NEW_STREAMS.partitioner,
            "timestamp": declared.timestamp,
            "records": sum(entry.rows for entry in entries),
            "bytes": sum(entry.size for entry in entries),
            "segments": sum(entry.segments for entry in entries),
            "markers": sum(entry.marked for entry in entries),
            "oldest": list(state.oldest),
            "upcoming": list(state.next),
            "commits": commit.number,
            "changed_at": commit.created_at,
            "retention": stored["retention"],
            "compaction": stored["compaction"],
            "find_by": stored["find_by"],
            "schema": stored["columns"],
        }

    def oldest(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        return self._offsets(ssps, lambda state: state.oldest)

    def upcoming(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        return self._offsets(ssps, lambda state: state.next)

    def fingerprint(self, stream: str) -> str:
        return str(self.log(stream).pointer_etag())

    def offset_for_timestamp(self, ssp: SystemStreamPartition, timestamp_ms: int) -> str:
        check_timestamp_ms("timestamp_ms", timestamp_ms, str(ssp))
        _, state = self.state(system.require_one_stream(self.name, [ssp]))
        system.check_partition(ssp, state.declaration.partitions)
        files = self.files_of(ssp.stream)
        return str(find_offset_at_time(files, state, ssp.partition, timestamp_ms * 1000))

    def configure(
        self,
        stream: str,
        *,
        retention: Retention | None,
        compaction: CompactionPolicy | None,
        find_by: FindBy | None = None,
    ) -> None:
        """Set both policies of a stream (None: no policy), and the keys by which records are found
        (None: leave them), for its next `maintain`.
        """
        update: dict[str, Any] = {"retention": retention, "compaction": compaction}

        def decide(commit: Commit | None) -> dict[str, Any] | None:
            state = self._parse(self._require_commit(stream, commit))
            if find_by is not None:
                update["find_by"] = declare_keys(stream, state.declaration.columns, find_by)
            now = state.declaration.model_copy(update=update)
            if now == state.declaration:
                return None
            return state.with_declaration(now).body()

        self._transact(stream, decide, "configure")

    def maintain(self, stream: str, now: datetime | None = None) -> MaintenanceResult:
        """Apply the stream's retention and compaction, delete what has been unreachable for an
        hour, and index the records of segments that have no index yet by the keys of `find_by`.

        Retention drops whole segments from the front and moves `oldest`; compaction changes no
        offset. An append that began more than an hour ago can no longer commit.

        `now` is by default the time of this machine's clock or of the store's, whichever is behind:
        a clock that is ahead would drop records too early, delete files that are being read or
        written, and have the appends of other machines rejected.
        """
        if now is None:
            self.state(stream)  # raises if there is no stream, where nothing is to be written
            now = self.lake.cautious_now(self.lake.stream_prefix(stream))
        return maintain(self, stream, now)

    def fenced(self, fence: Fence) -> StreamSystem:
        of_run = copy(self)
        of_run.lake = self.lake.fenced(fence)
        return of_run

    def snapshot(self, stream: str) -> StreamSystem:
        """Return a view of the streams: the first question about a stream reads its state, for all
        later ones too.

        It can be written to as well: what it commits is conditional on what it has read, and
        decided again if that has changed.
        """
        view = copy(self)
        view._snapshot = {}
        return view

    def _offsets(
        self,
        ssps: Iterable[SystemStreamPartition],
        select: Callable[[StreamState], tuple[int, ...]],
    ) -> dict[SystemStreamPartition, str]:
        """Return the offset that `select` reads from the state of each partition's stream."""
        result: dict[SystemStreamPartition, str] = {}
        by_stream: dict[str, tuple[int, ...]] = {}
        for ssp in ssps:
            stream = system.require_one_stream(self.name, [ssp])
            if stream not in by_stream:
                by_stream[stream] = select(self.state(stream).state)
            offsets = by_stream[stream]
            system.check_partition(ssp, len(offsets))
            result[ssp] = str(offsets[ssp.partition])
        return result


@validated
def open_system(lake: Lake, name: str) -> StreamSystem:
    """Return the stream system registered as `name`; `lake` stores what the system itself can't.
    Raises ConfigurationError if there is none, or its name or `default_offset` is wrong.
    """
    if name == LAKE:
        return LakeStreams(lake)
    systems = system.registered_systems()
    if name not in systems:
        problem = (
            f"there is no stream system {name!r}. Systems: {', '.join(sorted({LAKE, *systems}))}."
        )
        raise ConfigurationError(
            problem,
            "Check the part before the dot, or declare the system first: kafka_system(…), in YAML"
            " the section kafka, or register_system(…) for one of your own.",
            system=name,
        )
    found = systems[name](lake)
    if found.name != name:
        problem = f"the stream system registered as {name!r} has the name {found.name!r}."
        raise ConfigurationError(
            problem, "Give it the name that it is registered with.", system=name
        )
    if found.default_offset not in (None, "oldest", "upcoming"):
        problem = (
            f"stream system {name!r} has default_offset {found.default_offset!r}: expected"
            " 'oldest', 'upcoming' or None."
        )
        raise ConfigurationError(problem, "Correct its default_offset.", system=name)
    return found


def open_systems(lake: Lake, streams: Iterable[str]) -> dict[str, StreamSystem]:
    """Return the stream systems of these streams ("lake.orders"), by the system's name."""
    names = {split_stream_name(stream)[0] for stream in streams}
    return {name: open_system(lake, name) for name in names}


def list_deletable_objects(streams: LakeStreams, stream: str, last: Commit) -> dict[str, int]:
    """Return the sizes of the objects that deleting the stream deletes, by key. `last` is the
    commit of the deletion, or before that, as in a dry run, the stream's last commit.

    The positions of named readers stay, so that these notice that the stream was deleted.
    """
    log = streams.log(stream)
    sizes = commit_log.list_log_objects(log)
    keys: Collection[str] = sizes
    if commit_log.is_deletion_commit(last):  # after it, the stream may have been recreated
        keys = commit_log.exclude_newer_manifests(log, last, sizes)
    return {key: sizes[key] for key in keys if not key.startswith(f"{log.prefix}/readers/")}


def delete_stream(
    streams: LakeStreams, stream: str, seen: Commit, *, reason: str, by: str
) -> DeletedObjects:
    """Delete the stream, or complete an interrupted deletion; return the number and size of the
    deleted objects.

    Raises CommitConflictError if the stream has changed since the commit `seen`. Concurrent reads
    fail because of missing files.
    """
    log = streams.log(stream)
    if not commit_log.is_deletion_commit(seen):
        last = commit_log.commit_deletion(log, seen, reason=reason, by=by)
    else:
        last = seen
    sizes = list_deletable_objects(streams, stream, last)
    now = log.current()
    if now is None or now.id != last.id:
        # It was recreated meanwhile: its `maintain` deletes the rest.
        return DeletedObjects(0, 0, left=True)
    # Nobody writes to a deleted stream, so the listed objects are those of the old one.
    log.store.delete_many([*sizes])
    return DeletedObjects(len(sizes), sum(sizes.values()))
