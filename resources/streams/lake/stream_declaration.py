"""The declaration of a lake stream: checked, evolved, and told."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.schemas.evolution import evolved, refused_changes
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.interface.declared_stream import (
    declared,
    differences_beside_columns,
    refuse_differences,
)
from dagster_adjunct.resources.streams.interface.stream_system import NewStreams, Repartitioned, StreamInfo
from dagster_adjunct.resources.streams.lake.stream_manifest import (
    CompactionPolicy,
    Declaration,
    Retention,
    StreamState,
)

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.commit_log import Commit


NEW_STREAMS = NewStreams("spark-murmur3", needs_key=True, typed=True)


@dataclass(frozen=True, slots=True)
class StreamDescription:
    """A stream as `adjunct stream describe` shows it; sizes in bytes, offsets by partition."""

    info: StreamInfo
    timestamp: str | None
    retention: Retention | None
    compaction: CompactionPolicy | None
    oldest: tuple[int, ...]
    upcoming: tuple[int, ...]
    segments: int
    rows: int
    size: int
    markers: int
    commits: int
    changed_at: datetime


def declare(
    name: str,
    schema: Schema,
    key: tuple[str, ...],
    partitions: int,
    timestamp: str | None,
    retention: Retention | None,
    compaction: CompactionPolicy | None,
) -> Declaration:
    """Return the declaration, or raise ConfigurationError or SchemaMismatchError saying what can't be."""
    declaration = declared(
        Declaration,
        f"lake.{name}",
        schema,
        key,
        partitions,
        timestamp=timestamp,
        retention=retention,
        compaction=compaction,
    )
    what = f"stream {name!r}"
    if timestamp is not None and (kind := schema.field(timestamp, what).type) != "timestamp":
        raise SchemaMismatchError(
            f"{what}: column {timestamp!r} is {kind}, and the record's time must be a timestamp.",
            "Cast it to a timestamp, or leave out timestamp= to use the time of the append.",
            column=timestamp,
        )
    return declaration


def evolve(name: str, stored: Declaration, wanted: Declaration) -> Declaration:
    """Return the stored declaration with the columns that another one adds or widens.

    The order of columns says nothing: records are matched by name. Raises StreamExistsError with what can't change.
    """
    fixed = [*stored.key, *([stored.timestamp] if stored.timestamp else [])]
    columns = refused_changes(stored.schema_, wanted.schema_, fixed, "the key or the record's time")
    refuse_differences(
        f"lake.{name}",
        [*columns, *differences_beside_columns(stored, wanted)],
        "Declare it as it is, or choose another name. Columns of a lake stream can be added and widened; one that is "
        "not needed any more can be null. Policies are changed with configure, and partitions by adjunct stream "
        "repartition.",
    )
    now = evolved(stored.schema_, wanted.schema_)
    return stored if now.to_json() == stored.schema_.to_json() else stored.model_copy(update={"columns": now})


def info_of(name: str, state: StreamState) -> StreamInfo:
    declaration, rewritten = state.declaration, state.rewritten
    repartitioned = None
    if rewritten is not None:
        ended, went_on = (tuple(map(str, offsets)) for offsets in (rewritten.ended, rewritten.next))
        repartitioned = Repartitioned(rewritten.id, ended, went_on)
    return StreamInfo(
        name,
        declaration.partitions,
        declaration.key,
        NEW_STREAMS.partitioner,
        declaration.schema_,
        "oldest",
        identity=state.id,
        repartitioned=repartitioned,
    )


def described(name: str, commit: Commit, state: StreamState) -> StreamDescription:
    """Return what a stream's manifest says, in sums."""
    entries, declared = state.entries(), state.declaration
    return StreamDescription(
        info=info_of(name, state),
        timestamp=declared.timestamp,
        retention=declared.retention,
        compaction=declared.compaction,
        oldest=state.oldest,
        upcoming=state.next,
        segments=sum(entry.segments for entry in entries),
        rows=sum(entry.rows for entry in entries),
        size=sum(entry.size for entry in entries),
        markers=sum(entry.marked for entry in entries),
        commits=commit.number,
        changed_at=commit.created_at,
    )
