"""A batch as it is committed to a table, `TableOutput`, the interface of the formats, and how
records get the columns of a table.

A table remembers the newest batch of each producer in the same commit as the batch's rows. As a
producer begins a batch only after the one before, a batch is in the table if that is its own
number. So a batch is committed once: whoever commits looks first, and of two that commit at once
the format lets one win, and the other one looks again. The table also remembers of which lake the
producer is: batches of another lake under the same name are refused, whatever their numbers.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.schemas.column_changes import (
    NO_CHANGES,
    ColumnChanges,
    Evolution,
    evolve,
)
from dagster_adjunct.resources.schemas.evolution import is_widening
from dagster_adjunct.resources.schemas.schema import (
    AS_NAMED,
    Field,
    Schema,
    quote_text,
    schema_struct,
)
from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Member,
    Simple,
    Struct,
    Type,
    arrow_type,
    is_storable,
    tree_from_arrow,
)
from dagster_adjunct.resources.streams.system import READER, SOURCE, SOURCE_OFFSET
from dagster_adjunct.resources.times import to_microseconds

ATTEMPTS = 8
"""How often a commit is attempted while other writers change the table."""
MOST_COMPARED = 16
"""How many ranges of a partition are compared; the offsets of more are listed."""


@dataclass(frozen=True, slots=True)
class ReplacedRange:
    """The rows that an earlier batch has made of the offsets [start, end) of the partition
    `source`, as `reader` (`Sources.reader`).
    """

    reader: str
    source: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class OutputColumns:
    """The columns that records have for a table: those of `schema`, then the hidden ones, which
    begin with "__", with their types. `changes` are the declared renames and removals.
    """

    schema: Schema
    hidden: tuple[tuple[str, str], ...] = ()
    changes: ColumnChanges = NO_CHANGES

    def arrow_schema(self) -> pa.Schema:
        """Return the columns with Arrow's types."""
        hidden = [pa.field(name, arrow_type(kind)) for name, kind in self.hidden]
        return pa.schema([*self.schema.to_arrow(), *hidden])

    @property
    def have_positions(self) -> bool:
        """Whether rows have the source positions by which replays replace them."""
        return any(name == SOURCE_OFFSET for name, _ in self.hidden)

    def evolve(self, stored: Schema, what: str) -> Evolution:
        """Return how the table's columns change so that the records fit them.

        Columns and members that the table has and the records lack stay, and are null in the
        records. If the table's type holds all values of the records' type, it stays. Raises
        SchemaMismatchError for what is not allowed; `what` names the table.
        """
        renamed = evolve(stored, AS_NAMED, None, self.changes)
        if renamed.problems:
            step = "Correct renamed= and drop= of output_table()."
            raise misfit_error(what, renamed.problems, step)
        wanted = _complete(schema_struct(self.schema), schema_struct(renamed.schema))
        fields = []
        for each in wanted.members:
            is_sensitive = each.name in self.schema.sensitive
            fields.append(Field(each.name, str(each.type), is_sensitive))
        evolved = evolve(stored, AS_NAMED, Schema(tuple(fields)), self.changes)
        if evolved.problems:
            raise misfit_error(what, evolved.problems)
        return evolved


@dataclass(frozen=True, slots=True)
class OutputBatch:
    """The batch `number` of a `producer`, begun at `clock`; a repeated batch has the same.

    `lake` is the number of the producer's lake (`lake_number`), 0 if it has none. `parts` returns
    the rows with exactly `columns`, again each time that it is called. Rows that earlier batches
    made of `replaces` are removed in the same commit. `before_commit` raises if the run may not
    write any more. `check_first` is called before the table gets the producer's first batch, and
    before it is created, with whether it exists; it raises if there should be an earlier batch.
    """

    producer: str
    number: int
    clock: datetime
    columns: OutputColumns
    parts: Callable[[], Iterable[pa.Table]]
    replaces: Sequence[ReplacedRange] = ()
    before_commit: Callable[[], object] = field(default=lambda: None)
    lake: int = 0
    check_first: Callable[[bool], object] = field(default=lambda exists: None)


@dataclass(frozen=True, slots=True)
class CommittedBatch:
    """What a table remembers of the newest batch of a producer. `commit` is the id of the attempt
    that has committed it, "" if the table does not know any more. `clock` is in microseconds since
    the epoch, and `lake` the number of the lake that it came from; both are 0 if the table does not
    know. `positions` is whether its rows have source positions. `rows` and `positions` are None if
    the table does not know any more. `duplicate`: it was committed before, by an earlier attempt.
    """

    number: int
    clock: int
    commit: str
    rows: int | None = None
    duplicate: bool = False
    lake: int = 0
    positions: bool | None = None


class TableOutput(ABC):
    """A table that applications write.

    Methods raise TableUnavailableError, or TransientError, where the store does not answer: then
    nothing is known of a commit, and the next attempt looks first.
    """

    name: str
    """The name of the table in plans and errors."""
    place: str
    """Where this process looks for the table: its name, or the absolute path of a folder."""

    @abstractmethod
    def stored_columns(self) -> Schema | None:
        """Return the table's columns whose types Adjunct has, hidden ones left out; None if there
        is no table yet.
        """

    @abstractmethod
    def check(self, columns: OutputColumns, producer: str) -> Sequence[str]:
        """Return what the next commit of these columns would create or change, in words; raise what
        it would raise.
        """

    @abstractmethod
    def find(self, producer: str) -> CommittedBatch | None:
        """Return the newest batch of a producer; None if the table has none, or there is no
        table.
        """

    @abstractmethod
    def commit(self, batch: OutputBatch) -> CommittedBatch:
        """Commit a batch, unless the table has it already.

        The table is created if needed, and its columns are changed, with the first batch that has
        rows for them.
        """

    @abstractmethod
    def has_rows_of(self, readers: Sequence[str]) -> bool:
        """Return whether the table has rows with a source position that one of these `readers` has
        read (`Sources.reader`).
        """

    def find_batch(
        self, producer: str, number: int, clock: datetime, lake: int
    ) -> CommittedBatch | None:
        """Return the batch of this number if the table has it, else None.

        Raises ProducerConflictError if the table has a later one, another one of this number, or
        one of another lake.
        """
        found = self.find(producer)
        return same_batch(self.name, found, producer, number, clock, lake)


def lake_number(lake_id: str) -> int:
    """Return a number by which a lake is told from others, by its id: Delta tables remember no
    texts.
    """
    return int.from_bytes(hashlib.sha256(lake_id.encode()).digest()[:7], "big") or 1


def same_batch(
    table: str, found: CommittedBatch | None, producer: str, number: int, clock: datetime, lake: int
) -> CommittedBatch | None:
    """Return the newest committed batch of a producer, `found`, if it is this one; None if it is an
    earlier one, or there is none. Raises ProducerConflictError if it is a later one, another one of
    this number, or one of another lake.
    """
    if found is None:
        return None
    if lake and found.lake and lake != found.lake:
        raise errors.ProducerConflictError(
            f"table {table} has batches of an application {producer!r} of another lake: the newest"
            f" is {found.number}.",
            "Nothing was written. Give this application another name, or send to another table.",
            table=table,
            producer=producer,
            sequence=number,
            newest=found.number,
        )
    if found.number < number:
        return None
    if found.number > number:
        kind = "later batches"
    elif found.clock in (0, to_microseconds(clock)):  # 0: the table does not know it any more
        return replace(found, duplicate=True)
    else:
        kind = "another batch"
    problem = (
        f"table {table} has {kind} of producer {producer!r}: the newest is {found.number}, and this"
        f" one is {number}."
    )
    step = (
        "Nothing was written. Another application of this name writes the table, or the lake was"
        " restored from an earlier copy: give the application another name, or send to another"
        " table."
    )
    raise errors.ProducerConflictError(
        problem, step, table=table, producer=producer, sequence=number, newest=found.number
    )


def check_same_replay(table: str, found: CommittedBatch | None, columns: OutputColumns) -> None:
    """Raise ConfigurationError if a table has rows of this producer with another `on_replay`: a
    replay could not replace them, or readers could not compare their epochs, which would be null.
    """
    if found is None or found.positions is None:  # it is not known
        return
    if found.positions == columns.have_positions:
        return
    if columns.have_positions:
        declared = "replace"
        stored = "append"
        lack = "no source positions, so that a replay could not replace them"
    else:
        declared = "append"
        stored = "replace"
        lack = "no __epoch, so that readers could not tell them from newer results of a replay"
    raise errors.ConfigurationError(
        f'output table {table} has on_replay="{declared}", and rows that this application wrote'
        f' with on_replay="{stored}": they have {lack}.',
        f'Declare on_replay="{stored}" again, or send to a new table.',
        argument="on_replay",
    )


def describe_creation(partition_by: Sequence[str]) -> tuple[str]:
    """Return in words that a table is created, and by what it is partitioned."""
    if not partition_by:
        return ("the table is created",)
    return (f"the table is created, partitioned by {', '.join(partition_by)}",)


def describe_added(columns: OutputColumns, names: Collection[str]) -> list[str]:
    """Return in words which hidden columns are added to a table with columns of these names."""
    return [f"{name} ({kind}) is added" for name, kind in columns.hidden if name not in names]


def describe_kept_partitions(declared: Sequence[str], stored: Sequence[str]) -> list[str]:
    """Return in words that an existing table keeps its partitions, if others are declared."""
    if not declared or list(declared) == list(stored):
        return []
    by = ", ".join(stored) or "no column"
    return [f"partitions stay by {by}: partition_by={list(declared)} is for a new table"]


def misfit_error(
    what: str,
    problems: Iterable[str],
    step: str = "Cast the columns to the types of the table, or send to another table.",
) -> errors.SchemaMismatchError:
    """Return the error for records that do not fit the columns of a table."""
    return errors.SchemaMismatchError(
        f"the records do not fit the columns of table {what}: {'; '.join(problems)}.",
        step,
        table=what,
    )


def conflict_error(table: str, reason: str) -> errors.TableUnavailableError:
    """Return the error for a table that others change faster than a batch can be committed."""
    problem = f"table {table} was changed by others at each of {ATTEMPTS} commits: {reason}."
    step = "Nothing was written; the batch is run again. Let other writers commit less often."
    return errors.TableUnavailableError(problem, step, table=table)


def readable_schema(schema: pa.Schema) -> Schema:
    """Return the columns of a table whose types Adjunct has; hidden ones are left out."""
    fields = []
    for column in schema:
        if column.name.startswith("__"):
            continue
        try:
            kind = str(tree_from_arrow(column.type, column.name))
        except errors.SchemaMismatchError:  # a timestamp without a zone
            continue
        if is_storable(kind):
            fields.append(Field(column.name, kind))
    return Schema(tuple(fields))


def fit_table(
    rows: pa.Table, columns: pa.Schema, what: str, sensitive: Collection[str] = ()
) -> pa.Table:
    """Return the rows with exactly these columns; those that they lack are null.

    Raises SchemaMismatchError for a value that does not fit, which is not shown for a `sensitive`
    column, and for a null in a column that takes none.
    """
    arrays = []
    for column in columns:
        if column.name not in rows.column_names:
            values = pa.chunked_array([pa.nulls(rows.num_rows, column.type)])
        else:
            values = rows.column(column.name)
        try:
            arrays.append(values.cast(column.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            cause: Exception | None
            if column.name in sensitive:
                reason = "a value that is not shown"
                cause = None  # its text has the value
            else:
                reason = str(error).rstrip(".")
                cause = error
            problem = f"column {column.name!r} does not fit table {what}: {reason}."
            step = f"Cast it before it is sent; the table has {column.type}."
            raise errors.SchemaMismatchError(
                problem, step, column=column.name, table=what
            ) from cause
        if not column.nullable and arrays[-1].null_count:
            problem = (
                f"column {column.name!r} of table {what} takes no nulls, and"
                f" {arrays[-1].null_count} row(s) have none of its values."
            )
            step = "Fill it before it is sent, or let the table's column be optional."
            raise errors.SchemaMismatchError(problem, step, column=column.name, table=what)
    return pa.Table.from_arrays(arrays, schema=columns.remove_metadata())


def fitted_parts(batch: OutputBatch, columns: pa.Schema, what: str) -> Iterator[pa.Table]:
    """Yield the parts of a batch that have rows, with exactly these columns."""
    sensitive = batch.columns.schema.sensitive
    for part in batch.parts():
        if part.num_rows:
            yield fit_table(part, columns, what, sensitive)


def replaced_sql(ranges: Sequence[ReplacedRange], *, exact: bool = True) -> str | None:
    """Return the SQL condition for the rows of these ranges; None if they are empty.

    Unless it is `exact`, the condition also holds for rows between the ranges of a partition. If it
    is, and there are many ranges, as those of a restatement, their offsets are listed: engines take
    minutes for many comparisons.
    """
    conditions = []
    for source, spans in group_by_source(ranges).items():
        if not exact:
            covered = [OffsetSpan(spans[0].start, max(span.end for span in spans))]
        else:
            covered = spans
        of_source = (
            f"{READER} = {quote_text(source.reader)} and {SOURCE} = {quote_text(source.source)}"
        )
        conditions.append(f"({of_source} and ({_offsets_sql(covered)}))")
    if not conditions:
        return None
    return " or ".join(conditions)


def _offsets_sql(spans: Sequence[OffsetSpan]) -> str:
    """Return the SQL condition for the offsets in these spans."""
    if len(spans) > MOST_COMPARED:
        offsets = chain.from_iterable(range(span.start, span.end) for span in spans)
        listed = dict.fromkeys(offsets)  # each once, in order
        return f"{SOURCE_OFFSET} in ({', '.join(map(str, listed))})"
    compared = []
    for span in spans:
        compared.append(f"({SOURCE_OFFSET} >= {span.start} and {SOURCE_OFFSET} < {span.end})")
    return " or ".join(compared)


class SourceOfReader(NamedTuple):
    """A source partition, and the reader that has read it."""

    reader: str
    source: str


class OffsetSpan(NamedTuple):
    """The offsets [start, end)."""

    start: int
    end: int


def group_by_source(ranges: Sequence[ReplacedRange]) -> dict[SourceOfReader, list[OffsetSpan]]:
    """Return the spans of each source partition that are not empty, ordered by their starts."""
    found: dict[SourceOfReader, list[OffsetSpan]] = {}
    for span in sorted(ranges, key=attrgetter("start")):
        if span.start < span.end:
            source = SourceOfReader(span.reader, span.source)
            found.setdefault(source, []).append(OffsetSpan(span.start, span.end))
    return found


def _complete(mine: Type, stored: Type) -> Any:
    """Return the type `mine` of records as a column of the stored type takes it: with the members
    that only the stored type has; and if a simple stored type holds all values of the simple type
    at its place in `mine`, with the stored one.
    """
    if isinstance(mine, Struct) and isinstance(stored, Struct):
        return _complete_struct(mine, stored)
    if isinstance(mine, Array) and isinstance(stored, Array):
        return Array(_complete(mine.element, stored.element))
    if isinstance(mine, Map) and isinstance(stored, Map):
        return Map(_complete(mine.value, stored.value))
    are_simple = isinstance(mine, Simple) and isinstance(stored, Simple)
    if are_simple and is_widening(str(mine), str(stored)):
        return stored
    return mine


def _complete_struct(mine: Struct, stored: Struct) -> Struct:
    """Return the struct `mine`, whose members have types that `_complete` returns, and then the
    members that only the stored struct has.
    """
    members = []
    for member in mine.members:
        there = stored.member(member.name)
        if there is not None:
            kind = _complete(member.type, there.type)
        else:
            kind = member.type
        members.append(Member(member.name, kind))
    names = {member.name.lower() for member in mine.members}
    for member in stored.members:
        if member.name.lower() not in names:
            members.append(member)
    return Struct(tuple(members))
