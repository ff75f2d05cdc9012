"""A dlt load appended to the streams of its tables, once however often it is repeated.

    prepare    of each table: chooses the columns of its stream, and reads all values
    create     creates the stream, or adds to its columns
    append     one append; a table that is replaced ends with an end-of-dataset marker in it

The producer is the pipeline and the sequence is the load's id, so that a repeated load adds what is
missing. As all tables are prepared first, a load with a value that does not fit adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dagster_adjunct.assets.exchange.dlt_tables import (
    LoadedTable,
    build_table,
    choose_columns,
    keep_last,
    mark_deletions,
)
from dagster_adjunct.assets.exchange.dlt_target import LoadTarget
from dagster_adjunct.resources.errors import StreamExistsError, StreamNotFoundError
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import StreamInfo


@dataclass(frozen=True, slots=True)
class TableLoad:
    """A table of a load and how it is written: its disposition, its primary key, the column that
    says that a row is deleted, and the column and direction by which one row of a key is chosen.
    """

    table: LoadedTable
    disposition: str
    key: Sequence[str]
    deleted: str | None = None
    sort: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class PreparedTable:
    """A table with the stream that it is appended to, and the records for it."""

    load: TableLoad
    stream: str
    schema: Schema
    key: Sequence[str]
    partitions: int
    records: pa.Table


class LoadAppends:
    """Appends one load to the streams of a target."""

    def __init__(self, target: LoadTarget, pipeline: str, load_id: str, sequence: int) -> None:
        self._target = target
        self._streams = LakeStreams(target.lake)
        self.producer = f"dlt:{pipeline}"
        self.sequence = sequence
        self.version = load_id.replace(".", "-")

    def prepare(self, load: TableLoad) -> PreparedTable:
        """Return a table with its records. Raises SchemaMismatchError for the first value that does
        not fit, and StreamExistsError for a stream that is written otherwise.
        """
        return self._agree(self._build(load), self._streams.check_create)

    def create(self, table: PreparedTable) -> PreparedTable:
        """Create the stream of a table, or add to its columns; return the table as it now is to be
        appended.
        """
        return self._agree(table, self._streams.create)

    def _agree(self, table: PreparedTable, declare: Callable[..., object]) -> PreparedTable:
        """Declare the stream of a table; return the table, built again as often as another load has
        changed the stream's columns meanwhile. Raises StreamExistsError if building it again gives
        the same columns.
        """
        while True:
            try:
                declare(
                    table.stream, schema=table.schema, key=table.key, partitions=table.partitions
                )
            except StreamExistsError:
                again = self._build(table.load)
                if again.schema.to_json() == table.schema.to_json():
                    raise
                table = again
            else:
                return table

    def _build(self, load: TableLoad) -> PreparedTable:
        """Return a table with the columns, the key and the partitions that its stream has or will
        have, and with its records. A stream keeps its partitions and the order of its key, unless
        the key has other columns, which declaring the stream rejects.
        """
        name = load.table.name
        stream = self._target.stream(name)
        known = self._find_stream(stream)
        key = list(load.key)
        partitions = self._target.partitions_of(name) if key else 1
        stored = None
        if known is not None:
            self._check_kind(stream, load.disposition)
            stored = known.schema
            if set(known.key) == set(key):
                key = list(known.key)
                partitions = known.partitions
        declared = self._target.schemas.get(name)
        former = {} if known is None else known.former
        schema = choose_columns(load.table, stored, declared, former)
        records = build_table(load.table, schema)
        if load.sort is not None and load.sort[0] in schema:
            records = keep_last(records, *load.sort)
        if load.deleted is not None and load.deleted in schema:
            records = mark_deletions(records, load.deleted)
        return PreparedTable(load, stream, schema, key, partitions, records)

    def append(self, table: PreparedTable) -> int:
        """Append the records of a table, unless that was done; return their number."""
        version = self.version if table.load.disposition == "replace" else None
        result = self._streams.append(
            table.stream,
            table.records,
            producer=self.producer,
            sequence=self.sequence,
            end_of_dataset=version,
        )
        return result.rows

    def _find_stream(self, stream: str) -> StreamInfo | None:
        """Return what is known of a stream, None if there is none."""
        try:
            return self._streams.info(stream)
        except StreamNotFoundError:
            return None

    def _check_kind(self, stream: str, disposition: str) -> None:
        """Raise StreamExistsError if the stream has records of another write disposition, which
        would become part of a version, or come to belong to none. A load that is appended already
        passes.
        """
        if self._streams.appended(stream, self.producer, self.sequence) is not None:
            return
        _, state = self._streams.state(stream)
        has_versions = any(state.marked_until)
        pairs = zip(state.next, state.marked_until, strict=True)
        has_unmarked = any(end > until for end, until in pairs)
        name = f"lake.{stream}"
        step = (
            f"Load into streams of another prefix, or delete the stream: adjunct stream"
            f" delete {stream} --reason …."
        )
        if disposition == "replace" and has_unmarked:
            problem = f"{name} has records without an end-of-dataset marker, and can't be replaced."
            raise StreamExistsError(problem, step, stream=name)
        if disposition != "replace" and has_versions:
            problem = f"{name} has versions, each with a marker: {disposition!r} can't add to it."
            raise StreamExistsError(problem, step, stream=name)
