"""Writes the rows of each bucket into one immutable Parquet file, in Spark tasks or in plain
Python.

Rows arrive in Arrow batches, already sorted. The file is written locally and uploaded under a name
that only this (attempt, bucket) uses. A retried or speculative task finds the object and returns
that one's facts (rows, key range, checksum: a `BucketFile`), so it changes nothing. There is no
committer, rename or listing: the facts that the tasks return are the content of the manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol
from uuid import uuid4

from dagster_adjunct.resources.bucketing.files import (
    KEYS,
    POSITION,
    TOMBSTONE,
    VALID_FROM,
    BucketFile,
    BucketLayout,
    Timeline,
    TimelineOptions,
    attempt_id,
    bucket_file_name,
    key_changes,
    pack_footer,
)
from dagster_adjunct.resources.bucketing.hashing import assign_buckets, row_hash
from dagster_adjunct.resources.errors import (
    ManifestMismatchError,
    NullKeyError,
    ObjectExistsError,
    PermanentError,
)
from dagster_adjunct.resources.lazy_modules import F, np, pa, pc, pq, pt
from dagster_adjunct.resources.objects.store import ObjectStore, StoreDescriptor, staged_file_errors
from dagster_adjunct.resources.reports import to_json_value
from dagster_adjunct.resources.schemas.arrow_values import as_lists, rename_columns
from dagster_adjunct.resources.schemas.records import RowPlace, cast_column
from dagster_adjunct.resources.schemas.schema import Schema, named_column, quote_name
from dagster_adjunct.resources.schemas.types import arrow_type, has_maps, is_nested
from dagster_adjunct.resources.schemas.values import first_unreadable, readable_value
from dagster_adjunct.resources.spark import tasks
from dagster_adjunct.resources.threads import REQUESTS_AT_ONCE, map_in_threads
from dagster_adjunct.resources.user_code import format_record

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


ROW = "__row"
DIGEST = "__digest"
ROWS_PER_GROUP = 65_536
GROUP_KEYS = b"adjunct-group-keys"
_FACTS = b"adjunct"
_LEFT_OUT = ("pruned", "forgotten", "incomplete", "late", "of_others", "superseded")
_SAMPLED = 4_096
_NAMED_KEYS = 5
_COPIED_AT_ONCE = 256 * 1024 * 1024


class RowCompleter(Protocol):
    """Fills in what the rows of one bucket leave out, before they are written. The rows of a key
    are adjacent.
    """

    def stats(self) -> dict[str, Any]:
        """Return what goes into the stats of the file: the "incomplete" rows, and how many were
        "late", "superseded", "carried" or "held".
        """
        ...

    def take(self, batch: pa.Table) -> pa.Table:
        """Add a batch; return the rows of this and earlier batches that are complete now, each
        once.
        """
        ...

    def rest(self) -> pa.Table | None:
        """Return the remaining rows, after the last batch; None if there are none."""
        ...


class Completion(Protocol):
    """Creates the row completer of each bucket; `input_columns` are columns that it needs
    besides the layout's.
    """

    @property
    def input_columns(self) -> tuple[str, ...]: ...

    def of_bucket(self, store: ObjectStore, bucket: int) -> RowCompleter: ...


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How the writer filters, completes and counts rows. Counts go into the stats of the file.

    `what` names the target in errors. `last_per_key` keeps only the last of the rows with equal
    key, which must be adjacent; it counts the others as superseded, and as conflicting those whose
    values differ from the next row's. `drop_tombstones` then omits tombstones; `forget_to` omits,
    and counts as forgotten, those up to this position. `name_conflicting` is how many keys of
    conflicting rows the stats name. `one_per_key` is a column, such as that of the record's
    partition: the stats count, and name a few, keys whose rows differ in values and in this column.
    `number_rows` adds `__row`, counted from 0. `range_of` is a timestamp column whose minimum and
    maximum, in microseconds since the epoch, and number of nulls go into the stats. `differing` are
    two integer columns: the stats count the rows in which they differ, a null being 0. `over_time`
    is for rows over time, whose layout's key ends in `__valid_from`; its range goes into the stats
    too. `completion` completes rows that leave out columns; the file then has no digest, and the
    stats list the incomplete rows. `digested` are the columns whose digest `write_buckets` computes
    (see `row_hash`), None for the schema's.
    """

    what: str
    last_per_key: bool = False
    drop_tombstones: bool = False
    forget_to: int | None = None
    name_conflicting: int = 0
    one_per_key: str | None = None
    number_rows: bool = False
    range_of: str | None = None
    differing: tuple[str, str] | None = None
    over_time: TimelineOptions | None = None
    completion: Completion | None = None
    digested: tuple[str, ...] | None = None


class _WrittenRows:
    """What the stats of a file, and its digest, say about the rows that are written to it."""

    def __init__(self, layout: BucketLayout, options: WriteOptions) -> None:
        self.digest: int | None = None
        self._has_tombstones = TOMBSTONE in layout.columns
        self._has_positions = POSITION in layout.columns
        self._range_of = options.range_of if options.over_time is None else VALID_FROM
        self._compared = options.differing
        if self._compared and not set(self._compared) <= set(layout.columns):
            self._compared = None  # where one is missing, nothing is counted as differing
        self._tombstones = 0
        self._positions: tuple[Any, Any] | None = None
        self._range: tuple[int, int] | None = None
        self._range_nulls = 0
        self._differing = 0
        # Of rows over time, whose key ends in their time: how many keys there are without it.
        self._identity: list[str] = []
        if layout.key and layout.key[-1] == VALID_FROM:
            self._identity = list(layout.key[:-1])
        self._last_key: pa.Table | None = None
        self._keys = 0

    def add(self, batch: pa.Table) -> None:
        """Count rows that are written."""
        if self._identity and batch.num_rows:
            self._count_keys(batch.select(self._identity))
        if self._has_tombstones:
            self._tombstones += _count_true(batch.column(TOMBSTONE))
        if self._has_positions:
            self._positions = _widen(self._positions, batch.column(POSITION))
        if DIGEST in batch.column_names:
            with np.errstate(over="ignore"):
                part = int(batch.column(DIGEST).to_numpy().view(np.uint64).sum(dtype=np.uint64))
            self.digest = ((self.digest or 0) + part) % 2**64
        if self._range_of:
            times = batch.column(self._range_of)
            self._range_nulls += times.null_count
            self._range = _widen(self._range, times.cast("int64"))
        if self._compared:
            left, right = (pc.fill_null(batch.column(name), 0) for name in self._compared)
            self._differing += _count_true(pc.not_equal(left, right))

    def _count_keys(self, keys: pa.Table) -> None:
        """Count the keys that begin in these rows, which are in the order of their keys."""
        if self._last_key is None:
            self._keys += 1
        else:
            keys = pa.concat_tables([self._last_key, keys])
        self._keys += int(key_changes(keys, self._identity).sum())
        self._last_key = keys.slice(keys.num_rows - 1)

    def stats(self) -> dict[str, Any]:
        """Return these counts and ranges under their names in a file's stats."""
        return {
            KEYS: self._keys,
            "tombstones": self._tombstones,
            "range": list(self._range or ()),
            "positions": list(self._positions or ()),
            "range_nulls": self._range_nulls,
            "differing": self._differing,
        }


def _count_true(column: pa.Array | pa.ChunkedArray) -> int:
    """Return how many values are true."""
    return pc.sum(column).as_py() or 0


def _widen(bounds: tuple[Any, Any] | None, column: pa.ChunkedArray) -> tuple[Any, Any] | None:
    """Return the least and the greatest value of earlier ones (`bounds`, None without any) and of
    this column's; None if there are no values at all.
    """
    found = pc.min_max(column).as_py()
    if found["min"] is None:
        return bounds
    if bounds is None:
        return found["min"], found["max"]
    return min(bounds[0], found["min"]), max(bounds[1], found["max"])


class BucketFileWriter:
    """Writes the file of one bucket: `write` batches, then `finish`, which uploads it and returns
    its `BucketFile`.

    Call `discard` in any case, also after an error.
    """

    def __init__(
        self,
        store: ObjectStore,
        folder: str,
        bucket: int,
        layout: BucketLayout,
        options: WriteOptions,
    ) -> None:
        self._store = store
        self._folder = folder
        self._bucket = bucket
        self._layout = layout
        self._options = options
        self._name = bucket_file_name(bucket, attempt_id(folder))
        # In the store's staging folder, from where a local lake links the file instead of copying
        # it.
        self._path = store.staging_dir() / f"{uuid4().hex}.parquet"
        self._writer: Any = None
        self._held: pa.Table | None = None  # with `last_per_key`: the last row so far
        self._waiting: list[pa.Table] = []  # for enough rows to make a row group
        self._waiting_rows = 0
        self._rows = self._superseded = self._conflicting = self._deleted = 0
        self._written = _WrittenRows(layout, options)
        self._maps: dict[str, str] = {}  # the types of columns with maps
        for name, kind in layout.types.items():
            if has_maps(arrow_type(kind)):
                self._maps[name] = kind
        self._conflicting_keys: list[str] = []
        self._scattered = None
        if options.one_per_key:
            self._scattered = _ScatteredKeys(layout.key, options.one_per_key)
        self._min: list[Any] | None = None  # the key of the first row
        self._group_keys: list[Any] = []
        self._last: pa.Table | None = None  # the last row that was queued
        self._over_time = None
        if options.over_time is not None:
            self._over_time = Timeline(layout.key[:-1], options.over_time)
        self._completing = None
        if options.completion:
            self._completing = options.completion.of_bucket(store, bucket)

    def write(self, batch: pa.Table) -> None:
        """Write rows, in order. They have the layout's columns, and `__digest` if the file is to
        have a digest. Raises what `_check` and `check_key_order` raise.
        """
        if not batch.num_rows:
            return
        self._check(batch)
        if self._completing is not None:
            if DIGEST in batch.column_names:  # which is that of the incomplete rows
                batch = batch.drop_columns([DIGEST])
            batch = self._completing.take(batch)
        self._write(batch)

    def _write(self, batch: pa.Table) -> None:
        """Write complete rows; with `last_per_key`, the last one waits in `_held` for the next."""
        if self._options.last_per_key and batch.num_rows:
            if self._held is not None:
                batch = pa.concat_tables([self._held, batch])
            self._held = batch.slice(batch.num_rows - 1)
            batch = self._without_superseded(batch)
        self._queue_with_ends(batch)

    def finish(self) -> BucketFile | None:
        """Close and upload the file, and return its entry for the manifest.

        If all rows were left out, nothing is uploaded, and the entry has an empty name and only
        stats, which count them. Returns None if there were no such rows either.
        """
        self._write_rest()
        if self._writer is None:
            stats = self._stats()
            if self._deleted or any(stats.get(name) for name in _LEFT_OUT):
                return BucketFile(self._bucket, "", 0, 0, "", stats=stats)
            return None
        facts = {
            "rows": self._rows,
            "min_key": self._min,
            "max_key": self._key_at(self._last, 0),
            "digest": self._written.digest,
            "stats": self._stats(),
        }
        self._writer.add_key_value_metadata({_FACTS: json.dumps(facts).encode()})
        if self._layout.key:
            self._writer.add_key_value_metadata({GROUP_KEYS: json.dumps(self._group_keys).encode()})
        with self._staged_file_errors():
            self._writer.close()
        return self._upload(facts)

    def _write_rest(self) -> None:
        """Write the rows that wait for later ones."""
        if self._completing is not None:
            rows = self._completing.rest()
            if rows is not None:
                self._write(rows)
        if self._held is not None:
            self._queue_with_ends(self._held)
        if self._over_time is not None:
            rows = self._over_time.rest()
            if rows is not None:
                self._queue(rows)
        self._flush()

    def discard(self) -> None:
        """Delete the local file; an uploaded object stays."""
        with suppress(OSError):  # closing may fail on a full disk
            if self._writer is not None and self._writer.is_open:
                self._writer.close()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _staged_file_errors(self) -> AbstractContextManager[None]:
        """Return a context in which errors of the local file name its folder and the target."""
        return staged_file_errors(self._store, self._path, self._options.what)

    def _check(self, batch: pa.Table) -> None:
        """Raise an error for rows that can't be stored: unreadable values, nulls in the key, rows
        of another bucket.
        """
        check_readable(batch, self._layout.schema, self._options.what, self._layout.key)
        for name in self._layout.key:
            nulls = batch.column(name).null_count
            if nulls:
                problem = (
                    f"{self._options.what}: {nulls} record(s) have a null in {name!r}, which is"
                    f" part of the key ({', '.join(self._layout.key)})."
                )
                raise NullKeyError(
                    problem, "Filter these records out, or give them a key.", column=name
                )
        if self._layout.bucket_by:
            # Spark checks each row by its own hash. Check by one row that our hash, which lookups
            # use, is the same.
            first = [batch.column(name).slice(0, 1) for name in self._layout.bucket_by]
            bucket = int(assign_buckets(first, self._layout.partitions)[0])
            if bucket != self._bucket:
                raise ManifestMismatchError(
                    f"{self._options.what}: a row of bucket {bucket} reached the task of bucket"
                    f" {self._bucket}: rows are not partitioned by"
                    f" {', '.join(self._layout.bucket_by)}.",
                    "Nothing was committed. Take back a function's keeps_partitioning=True; else"
                    " report this.",
                    partition_by=", ".join(self._layout.bucket_by),
                )

    def _without_superseded(self, batch: pa.Table) -> pa.Table:
        """Return the rows after which a row of another key follows, and count the others. Leaves
        out the last row, which waits in `_held`.
        """
        count = batch.num_rows - 1
        differs = pa.array(key_changes(batch, self._layout.key))
        last_of_keys = batch.slice(0, count).filter(differs)
        self._superseded += count - last_of_keys.num_rows
        if self._scattered is not None:
            self._scattered.add(batch, differs.to_numpy(zero_copy_only=False))
        if DIGEST in batch.column_names and last_of_keys.num_rows < count:
            digests = batch.column(DIGEST)
            has_other_values = pc.not_equal(digests.slice(0, count), digests.slice(1))
            conflicting = pc.and_(pc.invert(differs), has_other_values)
            self._conflicting += _count_true(conflicting)
            self._name_conflicting(batch.slice(0, count), conflicting)
        return last_of_keys

    def _name_conflicting(self, rows: pa.Table, conflicting: pa.Array) -> None:
        """Add the keys of the rows for which `conflicting` is true to those that the stats name."""
        room = self._options.name_conflicting - len(self._conflicting_keys)
        if room <= 0:
            return
        # Records of one key are adjacent, so comparing with the last named key is enough.
        for record in rows.select(list(self._layout.key)).filter(conflicting).to_pylist():
            key = _show_key(record)
            if key not in self._conflicting_keys[-1:]:
                self._conflicting_keys.append(key)
            if len(self._conflicting_keys) == self._options.name_conflicting:
                return

    def _queue_with_ends(self, batch: pa.Table) -> None:
        """Queue rows; those over time in the form in which they are stored."""
        if self._over_time is not None and batch.num_rows:
            batch = self._over_time.take(batch)
        self._queue(batch)

    def _queue(self, batch: pa.Table) -> None:
        """Count rows, without the tombstones to omit, and write them once they make a row group.
        Raises ManifestMismatchError if their keys do not ascend.
        """
        batch = self._without_deleted(batch)
        if not batch.num_rows:
            return
        check_key_order(self._layout.key, self._options.what, self._last, batch)
        self._written.add(batch)
        if self._min is None:
            self._min = self._key_at(batch, 0)
        self._last = batch.slice(batch.num_rows - 1)
        if self._options.number_rows:
            numbers = np.arange(self._rows, self._rows + batch.num_rows, dtype=np.int64)
            batch = batch.append_column(ROW, pa.array(numbers))
        self._rows += batch.num_rows
        self._waiting.append(batch.select(self._layout.columns))
        self._waiting_rows += batch.num_rows
        if self._waiting_rows >= ROWS_PER_GROUP:
            self._flush()

    def _without_deleted(self, batch: pa.Table) -> pa.Table:
        """Return the rows without the tombstones to omit, which are counted: all of them, or those
        up to the position `forget_to`.
        """
        forget_to = self._options.forget_to
        if not batch.num_rows:
            return batch
        if self._options.drop_tombstones:
            dropped = batch.column(TOMBSTONE)
        elif forget_to is not None:
            is_old = pc.less_equal(batch.column(POSITION), forget_to)
            dropped = pc.and_(batch.column(TOMBSTONE), is_old)
        else:
            return batch
        remaining = batch.filter(pc.invert(dropped))
        self._deleted += batch.num_rows - remaining.num_rows
        return remaining

    def _flush(self) -> None:
        """Write the waiting batches as row groups. A row group for each would be too small to be
        fast.
        """
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting)
        for name, kind in self._maps.items():  # Spark's maps have any order
            place = table.column_names.index(name)
            table = table.set_column(place, name, self._sort_maps(table, name, kind))
        table = table.cast(self._layout.arrow_schema())
        # The first key of each row group, since with several key columns statistics do not tell
        # which group has a key.
        for row in range(0, table.num_rows, ROWS_PER_GROUP):
            self._group_keys.append(self._key_at(table, row))
        if self._layout.stored is not self._layout:
            table = rename_columns(table, self._layout.stored.arrow_schema())
        if self._writer is None:
            self._writer = self._open_file(table)
        with self._staged_file_errors():
            self._writer.write_table(table, row_group_size=ROWS_PER_GROUP)
        self._waiting = []
        self._waiting_rows = 0

    def _sort_maps(self, table: pa.Table, name: str, kind: str) -> pa.ChunkedArray:
        """Return a column with sorted maps. Raises SchemaMismatchError for a key that is null or
        occurs twice.
        """
        schema = self._layout.schema
        return cast_column(
            table.column(name),
            name,
            kind,
            self._options.what,
            lambda row: RowPlace(describe_record(table, row, schema, self._layout.key), {}),
            sensitive=name in schema.sensitive,
        )

    def _open_file(self, first: pa.Table) -> pq.ParquetWriter:
        """Return the Parquet writer of the local file, whose encodings are chosen by the first
        rows.
        """
        encoding = None
        if self._options.number_rows:
            encoding = {ROW: "DELTA_BINARY_PACKED"}
        with self._staged_file_errors():
            return pq.ParquetWriter(
                self._path,
                first.schema,
                compression="zstd",
                use_dictionary=_repetitive_columns(first),
                column_encoding=encoding,
                # otherwise a flipped bit in a page may be read as another value
                write_page_checksum=True,
            )

    def _key_at(self, table: pa.Table | None, row: int) -> list[Any] | None:
        """Return the key of a row, as a manifest stores it; None without a table or key."""
        if table is None or not self._layout.key:
            return None
        return [to_json_value(table.column(name)[row].as_py()) for name in self._layout.key]

    def _stats(self) -> dict[str, Any]:
        """Return the stats of the file. Counts of 0 are left out, except of what the options ask
        for.
        """
        # Those that the options ask for are added again below, also if they are 0.
        found: dict[str, Any] = {
            "superseded": self._superseded,
            "conflicting": self._conflicting,
            "conflicting_keys": self._conflicting_keys,
        }
        if self._scattered is not None:
            found["scattered"] = self._scattered.count
            found["scattered_keys"] = self._scattered.named
        # Tombstones were omitted for one of two reasons.
        if self._options.drop_tombstones:
            found["deleted"] = self._deleted
        else:
            found["forgotten"] = self._deleted
        found |= self._written.stats()
        stats = {name: value for name, value in found.items() if value}
        if self._options.last_per_key:
            stats["superseded"] = self._superseded
        if self._options.drop_tombstones:
            stats["deleted"] = self._deleted
        if self._over_time is not None:
            stats |= self._over_time.stats()
        if self._completing is not None:
            stats |= self._completing.stats()
        return stats

    def _upload(self, facts: dict[str, Any]) -> BucketFile:
        """Upload the local file and return its entry; if its object exists already, the entry of
        that one.
        """
        key = f"{self._folder}/{self._name}"
        try:
            self._store.upload(self._path, key)
        except ObjectExistsError:
            # An earlier attempt of this task has uploaded the object, which is the valid one.
            with self._staged_file_errors():
                self._path.unlink()
            self._store.download(key, self._path)
            with self._staged_file_errors():
                facts = json.loads(pq.read_metadata(self._path).metadata[_FACTS])
        with self._staged_file_errors(), self._path.open("rb") as file:
            size = self._path.stat().st_size
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            footer = None
            if self._layout.key:
                footer = pack_footer(_footer_bytes(file, size))
        return BucketFile(
            self._bucket, self._name, size=size, sha256=sha256, footer=footer, **facts
        )


class _ScatteredKeys:
    """Counts the keys whose rows differ in their values and also in the column `scatters`.

    The rows of a key are adjacent, over several batches: the last row of a batch is the first one
    of the next.
    """

    def __init__(self, key: Sequence[str], scatters: str) -> None:
        self._key = list(key)
        self._scatters = scatters
        # Of the key whose rows the last batch ended with.
        self._moves = False
        self._varies = False
        self.count = 0
        self.named: list[str] = []

    def add(self, batch: pa.Table, differs: Any) -> None:
        """Add a batch; `differs` says for each row but the last whether the next one is of
        another key.
        """
        # By row but the last: whether the next row is of the same key, and differs in the column
        # `scatters`, or in its values.
        count = batch.num_rows - 1
        moves = key_changes(batch, [self._scatters]) & ~differs
        varies = key_changes(batch, [DIGEST, TOMBSTONE]) & ~differs
        # By key: whether that holds for any of its rows. The first key may continue the last batch.
        key_of_row = np.concatenate([[0], np.cumsum(differs)])
        keys = int(key_of_row[-1]) + 1
        moved = np.bincount(key_of_row[:count], moves, keys) > 0
        varied = np.bincount(key_of_row[:count], varies, keys) > 0
        moved[0] |= self._moves
        varied[0] |= self._varies
        found = moved & varied
        if self._moves and self._varies:  # counted with an earlier batch
            found[0] = False
        self.count += int(found.sum())
        # The last row of each key.
        ends = np.concatenate([np.nonzero(differs)[0], [count]])
        room = max(0, _NAMED_KEYS - len(self.named))
        self.named += map(_show_key, batch.select(self._key).take(ends[found][:room]).to_pylist())
        self._moves = bool(moved[-1])
        self._varies = bool(varied[-1])


def _show_key(record: dict[str, Any]) -> str:
    """Return a key as stats name it: a single value, or a tuple of values."""
    values = list(record.values())
    if len(values) == 1:
        return repr(values[0])
    return repr(tuple(values))


def check_key_order(key: Sequence[str], what: str, last: pa.Table | None, rows: pa.Table) -> None:
    """Raise ManifestMismatchError unless keys ascend within `rows`, and from `last`, the row
    before, to the first one.

    Lookups and joins rely on this order. Keys have no nulls; adjacent rows may have equal keys.
    """
    keys = pa.concat_tables([table.select(key) for table in (last, rows) if table is not None])
    count = max(0, keys.num_rows - 1)
    descends = np.zeros(count, bool)
    equal = np.ones(count, bool)
    for column in keys.columns:
        before = column.slice(0, count)
        after = column.slice(1)
        descends |= equal & pc.greater(before, after).to_numpy()
        equal &= pc.equal(before, after).to_numpy()
    if descends.any():
        problem = f"{what}: rows of a file are not ordered by {', '.join(key)}."
        raise ManifestMismatchError(
            problem, "Nothing was committed. Report this as a bug, with the physical plan."
        )


def check_readable(
    rows: pa.Table | pa.RecordBatch,
    schema: Schema,
    what: str,
    key: Sequence[str] = (),
    **about: Any,
) -> None:
    """Raise SchemaMismatchError for a value that could be stored but not read again, with the key
    of its record.

    `about` are further fields of the error.
    """
    found = first_unreadable(rows)
    if found is not None:
        place = describe_record(rows, found.row, schema, key)
        raise found.error(what, place, hidden=found.column in schema.sensitive, **about)


def describe_record(
    rows: pa.Table | pa.RecordBatch, row: int, schema: Schema, key: Sequence[str] = ()
) -> str:
    """Return how errors name a record: by its key, or without one by all its columns."""
    record = {name: readable_value(rows.column(name)[row]) for name in key or schema.names}
    return f"the record {format_record(record, schema.sensitive)}"


def _repetitive_columns(rows: pa.Table) -> list[str]:
    """Return the columns whose values repeat in a sample of the rows, for which a dictionary pays
    off; of nested columns, the Parquet paths of their parts whose values repeat.

    For other columns, building and then discarding the dictionary takes longer than writing the
    values. `__row`, which may have an encoding that excludes one, never repeats.
    """
    places = np.linspace(0, rows.num_rows - 1, min(rows.num_rows, _SAMPLED), dtype=np.int64)
    sample = rows.take(places)
    repetitive = []
    for name, column in zip(sample.column_names, sample.columns, strict=True):
        for path, values in _parquet_leaves(name, column):
            distinct = pc.count_distinct(values, mode="all").as_py()
            if distinct <= len(values) / 2:
                repetitive.append(path)
    return repetitive


def _parquet_leaves(path: str, values: Any) -> Iterator[tuple[str, Any]]:
    """Yield the simple values within a column, each with its path in a Parquet file."""
    kind = values.type
    if not pt.is_nested(kind):
        yield path, values
    elif pt.is_struct(kind):
        array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
        for field, part in zip(kind, array.flatten(), strict=True):
            yield from _parquet_leaves(f"{path}.{field.name}", part)
    else:
        array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
        elements = pc.list_flatten(as_lists(array))
        step = "key_value" if pt.is_map(kind) else "list.element"
        yield from _parquet_leaves(f"{path}.{step}", elements)


def _footer_bytes(file: BinaryIO, size: int) -> bytes:
    """Return the end of a Parquet file: the footer, its length in 4 bytes, and the magic."""
    file.seek(size - 8)
    length = int.from_bytes(file.read(4), "little")
    file.seek(size - 8 - length)
    return file.read()


def write_arrow_buckets(
    table: pa.Table, store: ObjectStore, folder: str, layout: BucketLayout, options: WriteOptions
) -> list[BucketFile]:
    """Write a table in memory into one file per bucket without Spark; rows keep their order
    within a bucket.
    """
    if layout.bucket_by:
        bucket_of_row = assign_buckets(
            [table.column(name) for name in layout.bucket_by], layout.partitions
        )
    else:
        bucket_of_row = np.zeros(table.num_rows, dtype=np.int32)

    def write(bucket: int) -> BucketFile | None:
        rows = table.take(np.nonzero(bucket_of_row == bucket)[0])
        parts = (
            rows.slice(start, ROWS_PER_GROUP) for start in range(0, rows.num_rows, ROWS_PER_GROUP)
        )
        return write_bucket_file(BucketFileWriter(store, folder, bucket, layout, options), parts)

    buckets, rows = np.unique(bucket_of_row, return_counts=True)
    # Each call copies the rows of its bucket: limit how much is copied at the same time.
    at_once = _COPIED_AT_ONCE * table.num_rows // (table.nbytes * int(rows.max(initial=0)) + 1)
    files = map_in_threads(write, buckets.tolist(), min(at_once, REQUESTS_AT_ONCE))
    return [file for file in files if file]


_BUCKET = "__bucket"


def write_buckets(
    df: DataFrame,
    store: ObjectStore,
    folder: str,
    layout: BucketLayout,
    options: WriteOptions,
    *,
    order_by: Sequence[str],
    partitioned: bool = False,
    one_task: bool = False,
) -> list[BucketFile]:
    """Run one Spark job that writes `df` into one file per bucket; return the files, ordered by
    bucket.

    `folder` is only used by this attempt, whose id is the last part of the path. `df` has the
    layout's columns (without `__row`, which the writer adds) and may have more for `order_by`.
    `partitioned=True` claims that partition i of `df` already holds exactly bucket i, so that no
    exchange is needed; each row is checked: a wrong claim raises an error. With `one_task`, a
    single task writes all buckets, for frames of few rows. With `drop_tombstones`, `df` has
    `__tombstone`, and a bucket whose keys were all deleted is returned with stats but without a
    name.
    """
    one_task = one_task and bool(layout.bucket_by)  # one bucket is written by one task anyway
    digested = layout.schema.names if options.digested is None else options.digested
    types = layout.types
    digest = row_hash({name: types[name] for name in digested})
    if layout.bucket_by:
        df = _partition_by_bucket(df, layout, options, digest, partitioned, one_task)
    elif not partitioned:
        df = df.coalesce(1)
    by = [_order_of(name, types) for name in order_by]
    if one_task:
        by.insert(0, F.col(_BUCKET))
    if by:
        df = df.sortWithinPartitions(*by)
    if DIGEST not in df.columns:  # that of `_partition_by_bucket` also checks the buckets
        df = df.withColumn(DIGEST, digest)
    df = df.select(*map(quote_name, _input_columns(layout, options, df.columns)))
    with tasks.translate_spark_errors():
        task = _task(store.descriptor, folder, layout, options, all_buckets=one_task)
        rows = tasks.map_in_arrow(df, task, "facts string").collect()
    facts = [json.loads(row.facts) for row in rows]
    for file_facts in facts:
        if "error" in file_facts:
            raise tasks.error_from_json(file_facts)
    files = [BucketFile.from_json(file_facts) for file_facts in facts]
    return sorted(files, key=lambda file: file.bucket)


def _order_of(name: str, types: Mapping[str, str]) -> Column:
    """Return what rows are sorted by for a column: its values, or the hashes of nested ones, which
    have no order. Columns that are not among `types` are only for the order, and simple.
    """
    if is_nested(types.get(name, "")):
        return row_hash({name: types[name]})
    return named_column(name)


def _partition_by_bucket(
    df: DataFrame,
    layout: BucketLayout,
    options: WriteOptions,
    digest: Column,
    partitioned: bool,
    one_task: bool,
) -> DataFrame:
    """Return the frame with `__digest`, and the rows of a bucket in the partition of its number, or
    all in one partition, with `__bucket`.
    """
    keys = [F.col(quote_name(name)) for name in layout.bucket_by]
    bucket = F.pmod(F.hash(*keys), F.lit(layout.partitions))
    # Checked within the digest column, because one more column would have to be sent to Python.
    checked = F.when(bucket == F.spark_partition_id(), digest).otherwise(
        _misplaced_row_column(options.what, layout)
    )
    if one_task:
        # Both are computed for each partition of the frame, before all rows go to one task.
        columns = {_BUCKET: bucket, DIGEST: checked if partitioned else digest}
        return df.withColumns(columns).coalesce(1)
    if not partitioned:
        df = df.repartition(layout.partitions, *keys)
    return df.withColumn(DIGEST, checked)


def _input_columns(
    layout: BucketLayout, options: WriteOptions, there: Collection[str]
) -> list[str]:
    """Return the columns that the writer gets of a frame that has these."""
    wanted = list(layout.columns)
    if options.drop_tombstones and TOMBSTONE not in layout.columns:
        wanted.append(TOMBSTONE)
    if options.one_per_key:
        wanted.append(options.one_per_key)
    if options.completion is not None:
        wanted += options.completion.input_columns
    wanted += [DIGEST, _BUCKET]
    return [name for name in dict.fromkeys(wanted) if name in there]


def _misplaced_row_column(what: str, layout: BucketLayout) -> Column:
    """Return a column that fails the job: its value for a row in the task of another bucket."""
    problem = F.concat(
        F.lit(f"{what}: a row of another bucket reached the task of bucket "),
        F.spark_partition_id().cast("string"),
        F.lit(f": rows are not partitioned by {', '.join(layout.bucket_by)}."),
    )
    step = (
        "Nothing was committed. Take back a function's keeps_partitioning=True; else report this."
    )
    return tasks.raise_error_column(
        ManifestMismatchError, problem, step, partition_by=", ".join(layout.bucket_by)
    )


def _task(
    descriptor: StoreDescriptor,
    folder: str,
    layout: BucketLayout,
    options: WriteOptions,
    *,
    all_buckets: bool,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function of a Spark task that writes the rows of its bucket, or of `all_buckets`,
    and yields the facts of the files as JSON; if it fails for good, the error instead.
    """

    def write(batches: Iterator[Any]) -> Iterator[Any]:
        # Transient errors are raised, so that Spark retries the task.
        yield from tasks.encode_task_errors(write_files(batches))

    def write_files(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        bucket = 0
        if context is not None:
            bucket = context.partitionId()
        store = descriptor.open()
        facts = []
        rows = (pa.Table.from_batches([batch]) for batch in batches)
        parts = _split_by_bucket(rows) if all_buckets else [(bucket, rows)]
        try:
            for number, tables in parts:
                writer = BucketFileWriter(store, folder, number, layout, options)
                file = write_bucket_file(writer, tables)
                if file:
                    facts += [json.dumps(file.to_json())]
        except PermanentError as error:
            # Returned instead of raised, since Spark would retry the task, and wrap the error.
            facts = [json.dumps(tasks.error_to_json(error))]
            deque(batches, maxlen=0)  # Spark reuses a worker only if its input is drained
        yield pa.RecordBatch.from_pydict({"facts": pa.array(facts, pa.string())})

    return write


def write_bucket_file(writer: BucketFileWriter, tables: Iterable[pa.Table]) -> BucketFile | None:
    """Write these rows as one file and return what `finish` returns; discard the writer in any
    case.
    """
    try:
        for table in tables:
            writer.write(table)
        return writer.finish()
    finally:
        writer.discard()


def _split_by_bucket(tables: Iterator[pa.Table]) -> Iterator[tuple[int, Iterator[pa.Table]]]:
    """Yield each bucket with its rows, given rows that are sorted by bucket. Consume them before
    the next bucket.
    """
    for bucket, parts in groupby(_runs(tables), key=itemgetter(0)):
        yield bucket, (part for _, part in parts)


def _runs(tables: Iterator[pa.Table]) -> Iterator[tuple[int, pa.Table]]:
    """Yield (bucket, rows without the bucket column) for each run of consecutive rows of the
    same bucket. Rows are sorted by bucket, so that a table has one run of each.
    """
    for table in tables:
        buckets = table.column(_BUCKET)
        rows = table.drop_columns([_BUCKET])
        start = 0
        while start < len(buckets):
            bucket = buckets[start].as_py()
            end = start + pc.sum(pc.equal(buckets.slice(start), bucket)).as_py()
            yield bucket, rows.slice(start, end - start)
            start = end
