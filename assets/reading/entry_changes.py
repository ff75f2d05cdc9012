"""The changes of a dataset between two of its versions: a row for each key whose entry differs.

Of versions of a change stream's table with the same base, only the keys in the deltas that one of
them lacks are compared, and looked up in the other files. Other versions are compared bucket by
bucket, without those that are equal by their checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from dagster_adjunct.assets.reading.diff import (
    buckets_to_read,
    check_equal_keys,
    common_type,
    compare_tables,
    name_as,
    repeated_key_error,
)
from dagster_adjunct.assets.reading.served_history import Compaction
from dagster_adjunct.assets.reading.superseded import StoredRows
from dagster_adjunct.assets.reading.version_reader import (
    Entry,
    VersionReader,
    entries_among,
    read_entries,
    read_entries_of,
)
from dagster_adjunct.assets.versions.version import SealedVersion
from dagster_adjunct.resources.bucketing.files import Generation
from dagster_adjunct.resources.lazy_modules import np, pa, pc
from dagster_adjunct.resources.schemas.arrow_values import cast_to
from dagster_adjunct.resources.schemas.equality import comparable_value
from dagster_adjunct.resources.schemas.records import frame_from_arrow
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.types import arrow_type
from dagster_adjunct.resources.schemas.values import python_rows
from dagster_adjunct.resources.spark.in_process import resolve_session
from dagster_adjunct.resources.user_code import MASKED
from dagster_adjunct.resources.validation import validated, validated_methods

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Kind: TypeAlias = Literal["insert", "update", "delete"]
_KINDS: tuple[Kind, ...] = ("insert", "delete", "update")
_ROWS_AT_ONCE = 1024


@validated
@dataclass(frozen=True, slots=True)
class EntryChange:
    """A key whose entry differs between two versions: `before` is None for an insert, `after` for
    a delete.
    """

    kind: Kind
    key: Entry
    before: Entry | None
    after: Entry | None

    def masked(self, sensitive: Collection[str]) -> EntryChange:
        """Return this change with `***` for the values of these columns."""
        masks = dict.fromkeys(sensitive, MASKED)

        def mask(entry: Entry) -> Entry:
            return {name: masks.get(name, value) for name, value in entry.items()}

        before = None
        after = None
        if self.before is not None:
            before = mask(self.before)
        if self.after is not None:
            after = mask(self.after)
        return EntryChange(self.kind, mask(self.key), before, after)

    def differing_columns(self) -> list[str]:
        """Return the columns whose values differ, all of them if one of the entries is None."""
        before = self.before or {}
        after = self.after or {}
        names = list(dict.fromkeys([*before, *after]))
        if self.kind != "update":
            return names
        differing = []
        for name in names:
            if comparable_value(before.get(name)) != comparable_value(after.get(name)):
                differing.append(name)
        return differing


class ReaderPair(NamedTuple):
    """Two versions of a dataset, the earlier one first."""

    before: VersionReader
    after: VersionReader


class _Entries(NamedTuple):
    """Entries of an earlier and of a later version: all that differ, and perhaps equal ones."""

    before: pa.Table
    after: pa.Table


@validated_methods
class EntryChanges:
    """The changes from the version `since` (None: nothing) to the version `until`.

    Iterate over it for `EntryChange`s, or give it to pyarrow, DuckDB or Polars as a table: with
    `kind` ("insert", "update" or "delete"), the structs `key`, `before` and `after`, the `version`
    and the time `at` when it was sealed. Each iteration reads the files again, a bucket at a time;
    changes are in the order of their keys within a bucket. A column that one version lacks counts
    as null there, and one that was renamed has its new name before, too.
    """

    def __init__(
        self, old: VersionReader | None, new: VersionReader, compactions: Sequence[ReaderPair] = ()
    ) -> None:
        """`compactions` are the versions before and after each major compaction in between, which
        have the same entries: with them, only the keys of deltas are compared.
        """
        self._new = new
        self._old: VersionReader | None = None
        if old is not None:
            self._old = name_as(old, new)
            check_equal_keys(self._old, new)
        self._compactions = []
        for before, after in compactions:
            self._compactions.append(ReaderPair(name_as(before, new), name_as(after, new)))

    def __repr__(self) -> str:
        return f"EntryChanges({self._new.dataset!r}, since={self.since!r}, until={self.until!r})"

    @property
    def since(self) -> str | None:
        """The id of the version whose entries are `before`, None for changes from nothing."""
        if self._old is None:
            return None
        return self._old.version

    @property
    def until(self) -> str:
        """The id of the version whose entries are `after`: a later `changes(since=…)` goes on from
        it.
        """
        return self._new.version

    @property
    def at(self) -> datetime:
        """The time when the version `until` was sealed."""
        return self._new.sealed.sealed_at

    @property
    def sensitive(self) -> tuple[str, ...]:
        """The columns that are sensitive in one of the versions."""
        names = [*self._new.schema.sensitive]
        if self._old is not None:
            names = [*self._old.schema.sensitive, *names]
        return tuple(dict.fromkeys(names))

    @property
    def schema(self) -> pa.Schema:
        """The columns of the changes as a table."""
        if self._old is not None:
            before = self._old.schema
        else:
            before = self._new.schema
        return pa.schema(
            [
                pa.field("kind", pa.string()),
                pa.field("key", _struct(self._new.schema.select(self._new.sealed.key))),
                pa.field("before", _struct(before)),
                pa.field("after", _struct(self._new.schema)),
                pa.field("version", pa.string()),
                pa.field("at", arrow_type("timestamp")),
            ]
        )

    def __iter__(self) -> Iterator[EntryChange]:
        for batch in self.batches():
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                rows = pa.Table.from_batches([batch.slice(start, _ROWS_AT_ONCE)])
                for row in python_rows(rows):
                    yield EntryChange(row["kind"], row["key"], row["before"], row["after"])

    def batches(self, bucket: int | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the changes of each bucket that has some, or of one bucket, in the columns of
        `schema`.

        Raises DatasetError for a key with several entries, and ManifestMismatchError for a missing
        or damaged file.
        """
        for entries in self._changed_buckets(bucket):
            batch = self._compare(entries)
            if batch.num_rows:
                yield batch

    def to_arrow(self) -> pa.Table:
        """Return all changes as one table with the columns of `schema`."""
        return pa.Table.from_batches(self.batches(), self.schema)

    def frame(self, spark: SparkSession | Callable[[], SparkSession]) -> DataFrame:
        """Return all changes as a DataFrame with the columns of `schema`; this process reads
        them.
        """
        return frame_from_arrow(resolve_session(spark), self.to_arrow())

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        reader = pa.RecordBatchReader.from_batches(self.schema, self.batches())
        return reader.__arrow_c_stream__(requested_schema)

    def _changed_buckets(self, only: int | None) -> Iterator[_Entries]:
        """Yield the entries of each bucket that may have changes, or of the bucket `only`."""
        if self._old is None:
            nothing = self._new.schema.to_arrow().empty_table()
            for bucket in self._new.buckets:
                if only in (None, bucket):
                    yield _Entries(nothing, read_entries(self._new, bucket))
            return
        yield from self._changed_since(self._old, only)

    def _changed_since(self, old: VersionReader, only: int | None) -> Iterator[_Entries]:
        """Yield the entries of each bucket, or of the bucket `only`, of the version `old` and the
        new one. If each step keeps its base, these are only the entries of keys in deltas.
        """
        new = self._new
        steps = self._steps(old)
        if all(shares_base(before.sealed, after.sealed) for before, after in steps):
            for number in sorted({*old.buckets, *new.buckets}):
                if only not in (None, number):
                    continue
                keys = _changed_keys(steps, number)
                if keys:
                    yield _entries_of_both(old, new, number, keys)
            return
        for bucket in buckets_to_read(old, new).buckets:
            if only in (None, bucket):
                yield _Entries(read_entries(old, bucket), read_entries(new, bucket))

    def _steps(self, old: VersionReader) -> list[ReaderPair]:
        """Return the pairs of versions between which entries may have changed: from `old` up to the
        first compaction, from each compaction up to the next, and on to the new version.
        """
        steps = []
        since = old
        for compaction in self._compactions:
            steps.append(ReaderPair(since, compaction.before))
            since = compaction.after
        steps.append(ReaderPair(since, self._new))
        return steps

    def _compare(self, entries: _Entries) -> pa.RecordBatch:
        """Return the changes of the entries, in the order of keys."""
        key = self._new.sealed.key
        aligned = _align(entries)
        values = [name for name in aligned.before.column_names if name not in key]
        compared = compare_tables(aligned.before, aligned.after, key, values)
        if compared is None:
            raise repeated_key_error(self._old or self._new, self._new)
        # In the order of _KINDS: inserts, deletes, updates. Row -1 stands for no entry.
        counts = [len(compared.added), len(compared.removed), len(compared.changed_after)]
        no_rows = np.full(max(counts), -1)
        rows_before = np.concatenate(
            [no_rows[: len(compared.added)], compared.removed, compared.changed_before]
        )
        rows_after = np.concatenate(
            [compared.added, no_rows[: len(compared.removed)], compared.changed_after]
        )
        before, after = entries
        columns = {
            "kind": pa.array(np.repeat(_KINDS, counts), pa.string()),
            "key": self._take_keys(entries, rows_before, rows_after),
            "before": _take_structs(before, rows_before, self.schema.field("before").type),
            "after": _take_structs(after, rows_after, self.schema.field("after").type),
        }
        order = _order_by(columns["key"])
        in_order_of_keys = [column.take(order) for column in columns.values()]
        version = pa.repeat(self.until, len(order))
        at = pa.repeat(pa.scalar(self.at, arrow_type("timestamp")), len(order))
        return pa.RecordBatch.from_arrays([*in_order_of_keys, version, at], schema=self.schema)

    def _take_keys(self, entries: _Entries, rows_before: Any, rows_after: Any) -> pa.StructArray:
        """Return the key of each change: that of the entry after it, of a delete that before it.
        Rows are numbers in the tables of `entries`, negative for none.
        """
        before, after = entries
        kind = self.schema.field("key").type
        names = [field.name for field in kind]
        old = pa.table([before.column(field.name).cast(field.type) for field in kind], names=names)
        both = pa.concat_tables([after.select(names), old])
        is_deleted = rows_after < 0
        rows_in_both = np.where(is_deleted, rows_before + after.num_rows, rows_after)
        return _take_structs(both, rows_in_both, kind)


def _struct(schema: Schema) -> pa.DataType:
    """Return the Arrow struct with these columns as members."""
    return pa.struct(list(schema.to_arrow()))


def shares_base(old: SealedVersion, new: SealedVersion) -> bool:
    """Whether two versions have the same base, in the same buckets: then only keys in deltas that
    one of them lacks can have other entries.
    """
    if not old.positioned or not new.positioned:
        return False
    if (old.partitions, old.partition_by) != (new.partitions, new.partition_by):
        return False
    had_history = old.history is not None
    has_history = new.history is not None
    if had_history != has_history:
        return False
    return _identity_of(old.generations[0]) == _identity_of(new.generations[0])


def list_own_generations(version: SealedVersion, other: SealedVersion) -> tuple[Generation, ...]:
    """Return the generations of a version that the `other` one does not have."""
    shared = {_identity_of(generation) for generation in other.generations}
    own = (each for each in version.generations if _identity_of(each) not in shared)
    return tuple(own)


def _identity_of(generation: Generation) -> tuple[int, str]:
    """Return what only this generation has: its number and its folder."""
    return generation.id, generation.folder


@dataclass(frozen=True, slots=True)
class ComparedVersions:
    """The versions to compare for the changes between two commits, None for nothing.

    `compactions` are the major compactions in between. If `by_deltas`, only keys in deltas are
    compared.
    """

    old: SealedVersion | None
    new: SealedVersion | None
    compactions: tuple[Compaction, ...] = ()
    by_deltas: bool = False

    @property
    def ends(self) -> list[SealedVersion]:
        """The two versions, without None."""
        return [version for version in (self.old, self.new) if version is not None]

    @property
    def all(self) -> list[SealedVersion]:
        """All versions that are read."""
        return [*self.ends, *chain.from_iterable(self.compactions)]

    def list_deltas(self) -> list[VersionDelta]:
        """Return the deltas that were added or merged between the two versions, which share a base
        but for compactions; each once. [] if one of the two is None.
        """
        if self.old is None or self.new is None:
            return []
        found = {}
        since = self.old
        for before, after in (*self.compactions, Compaction(self.new, self.new)):
            for version, other in ((since, before), (before, since)):
                for generation in list_own_generations(version, other):
                    found[_identity_of(generation)] = VersionDelta(version, generation)
            since = after
        return list(found.values())


class VersionDelta(NamedTuple):
    """A generation, and a version that has it."""

    version: SealedVersion
    generation: Generation


def _changed_keys(steps: Iterable[ReaderPair], bucket: int) -> Sequence[Any]:
    """Return the keys (in plain form, sorted) in deltas of a bucket that one of two versions
    lacks.
    """
    changed: set[Any] = set()
    for before, after in steps:
        for version, other in ((before, after), (after, before)):
            own = list_own_generations(version.sealed, other.sealed)
            changed.update(version.keys_in(bucket, {each.id for each in own}))
    return sorted(changed)


def _entries_of_both(
    old: VersionReader, new: VersionReader, bucket: int, keys: Sequence[Any]
) -> _Entries:
    """Return the entries of these keys (in plain form, sorted) of a bucket in both versions, by
    lookups; rows that both have are looked up once.
    """
    stored = new.stored_rows_of(bucket, keys)
    if _has_rows_of(new.sealed, old.sealed):
        numbers = [generation.id for generation in old.sealed.generations]
        is_of_old = np.isin(stored.generations, numbers)
        of_old = StoredRows(stored.rows.filter(pa.array(is_of_old)), stored.generations[is_of_old])
        before = entries_among(old, of_old)
    else:
        before = read_entries_of(old, bucket, keys)
    return _Entries(before, entries_among(new, stored))


def _has_rows_of(version: SealedVersion, other: SealedVersion) -> bool:
    """Whether all rows of another version are rows of this one, in the same columns."""
    if version.columns != other.columns or version.names != other.names:
        return False
    return not list_own_generations(other, version)


def _align(entries: _Entries) -> _Entries:
    """Return the entries with the columns of both tables, in equal types.

    A column that one table lacks is null there. Values of types without a common one differ unless
    both are null.
    """
    before, after = entries
    names = list(dict.fromkeys([*after.column_names, *before.column_names]))
    old = [_comparable(before, after, name, mark=0) for name in names]
    new = [_comparable(after, before, name, mark=1) for name in names]
    return _Entries(pa.table(old, names=names), pa.table(new, names=names))


def _comparable(table: pa.Table, other: pa.Table, name: str, *, mark: int) -> pa.ChunkedArray:
    """Return the values of a column in the type in which they are compared with `other`'s; null if
    the table lacks the column. Without a common type, all values are `mark`, which differs between
    the two tables.
    """
    if name not in table.column_names:
        return pa.nulls(table.num_rows, other.column(name).type)
    column = table.column(name)
    if name not in other.column_names:
        return column
    kind = common_type(column.type, other.column(name).type, all_members=True)
    if kind is not None:
        return cast_to(column, kind)
    return pc.if_else(column.is_valid(), pa.scalar(mark, pa.int8()), pa.scalar(None, pa.int8()))


def _take_structs(table: pa.Table, rows: Any, kind: pa.DataType) -> pa.Array:
    """Return rows of a table (numpy; negative for none) as structs; null for none."""
    absent = rows < 0
    indices = pa.array(rows, pa.int64(), mask=absent)
    columns = [table.column(field.name).take(indices).combine_chunks() for field in kind]
    return pa.StructArray.from_arrays(columns, fields=list(kind), mask=pa.array(absent))


def _order_by(keys: pa.StructArray) -> pa.Array:
    """Return the row numbers in the order of the keys."""
    names = [f"k{index}" for index in range(keys.type.num_fields)]  # Arrow takes a dot for a path
    columns = pa.table(keys.flatten(), names=names)
    return pc.sort_indices(columns, sort_keys=[(name, "ascending") for name in names])
