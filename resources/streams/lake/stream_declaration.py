"""Checks a stream's declaration, and compares it with the one that is stored."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from pydantic import ValidationError

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError, StreamExistsError
from dagster_adjunct.resources.schemas.evolution import evolved, refused_changes
from dagster_adjunct.resources.schemas.schema import Schema, check_key_types
from dagster_adjunct.resources.stored_documents import first_problem
from dagster_adjunct.resources.streams.interface.stream_system import Repartitioned, StreamInfo
from dagster_adjunct.resources.streams.lake.stream_manifest import (
    CompactionPolicy,
    Declaration,
    Retention,
    StreamState,
)

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.commit_log import Commit


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
    what = f"stream {name!r}"
    if not schema.fields:
        raise SchemaMismatchError(f"{what} has no columns.", "Name at least one column.", stream=f"lake.{name}")
    if len(set(key)) != len(key):
        raise ConfigurationError(
            f"{what}: key columns {list(key)} stand twice.", "Name each once.", argument="key", stream=f"lake.{name}"
        )
    check_key_types(schema, key, what)
    if not key and partitions != 1:
        raise ConfigurationError(
            f"{what} has no key and {partitions} partitions: without a key nothing says where a record belongs.",
            "Name key columns, or declare partitions=1.",
            stream=f"lake.{name}",
        )
    if timestamp is not None and (kind := schema.field(timestamp, what).type) != "timestamp":
        raise SchemaMismatchError(
            f"{what}: column {timestamp!r} is {kind}, and the record's time must be a timestamp.",
            "Cast it to a timestamp, or leave out timestamp= to use the time of the append.",
            column=timestamp,
        )
    try:
        return Declaration(
            columns=schema,
            key=key,
            partitions=partitions,
            timestamp=timestamp,
            retention=retention,
            compaction=compaction,
        )
    except ValidationError as error:
        raise ConfigurationError(
            f"{what}: {first_problem(error)} (found {error.errors(include_url=False)[0]['input']!r}).",
            "Correct the declaration.",
            stream=f"lake.{name}",
        ) from None


def check_equal(name: str, stored: Declaration, wanted: Declaration) -> None:
    """Raise StreamExistsError with the differences of two declarations, if there are any.

    A time column or policy that is left out asks for none: an application creates its output without knowing what
    somebody configured since.
    """
    columns = stored.schema_.difference(wanted.schema_)
    _refuse(name, [*([f"columns: {columns}"] if columns else []), *_differences(stored, wanted)])


def evolve(name: str, stored: Declaration, wanted: Declaration) -> Declaration:
    """Return the stored declaration with the columns that another one adds or widens.

    The order of columns says nothing: records are matched by name. Raises StreamExistsError with what can't change.
    """
    fixed = [*stored.key, *([stored.timestamp] if stored.timestamp else [])]
    columns = refused_changes(stored.schema_, wanted.schema_, fixed, "the key or the record's time")
    _refuse(name, [*columns, *_differences(stored, wanted)])
    now = evolved(stored.schema_, wanted.schema_)
    return stored if now.to_json() == stored.schema_.to_json() else stored.model_copy(update={"columns": now})


def _differences(stored: Declaration, wanted: Declaration) -> list[str]:
    parts = ("key", "partitions", "timestamp", "retention", "compaction")
    values = [(part, getattr(stored, part), getattr(wanted, part)) for part in parts]
    return [f"{part} is {new!r}, expected {old!r}" for part, old, new in values if new is not None and old != new]


def _refuse(name: str, differences: list[str]) -> None:
    if differences:
        raise StreamExistsError(
            f"stream {name!r} is there and declared otherwise: {'; '.join(differences)}.",
            "Declare it as it is, or choose another name. Columns of a lake stream can be added and widened; one that "
            "is not needed any more can be null. Policies are changed with configure, and partitions by adjunct stream "
            "repartition.",
            stream=f"lake.{name}",
        )


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
        "spark-murmur3",
        declaration.schema_,
        "oldest",
        identity=state.id or None,
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
