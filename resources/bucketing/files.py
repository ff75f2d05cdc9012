"""The Parquet files of a version or stream segment, one per bucket: their manifest entries and
layout, their reading as one bucketed table, and the form of rows over time."""

from __future__ import annotations

import base64
import binascii
import hashlib
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from cachetools import LRUCache

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.lazy_modules import np, pa, pc
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.schemas.arrow_values import cast_to, rename_columns
from dagster_adjunct.resources.schemas.equality import differing_values
from dagster_adjunct.resources.schemas.evolution import holds_values_of
from dagster_adjunct.resources.schemas.paths import Path, read_path
from dagster_adjunct.resources.schemas.schema import (
    AS_NAMED,
    Schema,
    StoredNames,
    named_column,
    quote_name,
    quote_text,
)
from dagster_adjunct.resources.schemas.types import (
    arrow_type,
    is_nested,
    parse_type,
    tree_from_arrow,
)
from dagster_adjunct.resources.spark.in_process import identify_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class BucketFile:
    """One immutable Parquet file, as a manifest lists it.

    `name` is "" if no file is stored because no row was left; then only `stats` counts. `size` is
    in bytes. `min_key` and `max_key` are the first and the last key, as `to_json_value` returns
    their values, and None where the layout has no key. `digest` is the sum of the rows' hashes
    modulo 2**64, so it does not depend on their order; None if the rows were written without
    hashes, as by a compaction. `stats` has counters of the writer, such as superseded rows.
    `footer` is the Parquet footer (see `pack_footer`), which saves key lookups a request; it is
    None for files without a key, and where it would make the manifest too large.
    """

    bucket: int
    name: str
    rows: int
    size: int
    sha256: str
    min_key: list[Any] | None = None
    max_key: list[Any] | None = None
    digest: int | None = None
    stats: Mapping[str, Any] = field(default_factory=dict)
    footer: str | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the entry as a manifest stores it."""
        item = {name: getattr(self, name) for name in self.__slots__}
        if self.footer is None:
            del item["footer"]
        return item

    @classmethod
    def from_json(cls, item: Any) -> BucketFile:
        """Return the entry that a manifest stores. Raises MalformedDocumentError."""
        try:
            return cls(**item)
        except TypeError as error:
            raise _malformed_error(
                "a file entry of a manifest", str(item)[:200], str(error)
            ) from error


@dataclass(frozen=True, slots=True)
class Generation:
    """The files of one attempt to write; `id` orders the generations of a dataset, or the
    segments of a stream.
    """

    id: int
    folder: str
    files: tuple[BucketFile, ...]

    @property
    def rows(self) -> int:
        """The number of rows in all files."""
        return sum(file.rows for file in self.files)

    @property
    def size(self) -> int:
        """The size of all files in bytes."""
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> int | None:
        """The digest of all rows, whatever their order: the sum of the files' digests, None if a
        file has none.
        """
        if any(file.digest is None for file in self.files):
            return None
        return sum(file.digest or 0 for file in self.files) % 2**64

    @property
    def footer_size(self) -> int:
        """The number of bytes that the footers of the files take in a manifest."""
        return sum(len(file.footer or "") for file in self.files)

    def without_footers(self) -> Generation:
        """Return this generation without footers, to keep a manifest small. Readers then fetch
        the footers.
        """
        return replace(self, files=tuple(replace(file, footer=None) for file in self.files))

    def to_json(self) -> dict[str, Any]:
        """Return the generation as a manifest stores it."""
        return {
            "id": self.id,
            "folder": self.folder,
            "files": [file.to_json() for file in self.files],
        }

    @classmethod
    def from_json(cls, item: Any) -> Generation:
        """Return the generation that a manifest stores. Raises MalformedDocumentError."""
        try:
            return cls(
                item["id"],
                item["folder"],
                tuple(BucketFile.from_json(file) for file in item["files"]),
            )
        except (KeyError, TypeError) as error:
            raise _malformed_error(
                "a generation of a manifest", str(item)[:200], repr(error)
            ) from error


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """How rows are laid out in files.

    `schema` is what users see; `hidden` are further stored columns (`__offset`, …) as (name, Spark
    type). Rows are hashed by the columns `bucket_by` into `partitions` buckets; if it is empty
    there is one bucket. `key` are the columns that identify a row and by which each file is
    ordered; it may end in hidden columns, and is empty for streams. Keys have no nulls, and are
    unique within one file, or once the files of a bucket are merged. Files have the columns under
    their stored names (`names`): see `stored`. With `projected`, the layout has other columns than
    the files of a version were written with.
    """

    schema: Schema
    bucket_by: tuple[str, ...]
    partitions: int
    key: tuple[str, ...] = ()
    hidden: tuple[tuple[str, str], ...] = ()
    names: StoredNames = AS_NAMED
    projected: bool = False

    def __post_init__(self) -> None:
        if not self.bucket_by and self.partitions != 1:
            problem = f"a layout of {self.partitions} buckets names no columns to hash."
            raise errors.SchemaMismatchError(
                problem, "Name a key, or use 1 bucket.", argument="bucket_by"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns, the hidden ones at the end."""
        return (*self.schema.names, *(name for name, _ in self.hidden))

    @property
    def types(self) -> dict[str, str]:
        """The type of each column."""
        return self.schema.types | dict(self.hidden)

    @property
    def key_types(self) -> tuple[str, ...]:
        """The types of the key's columns."""
        types = self.types
        return tuple(types[name] for name in self.key)

    @property
    def ddl(self) -> str:
        """All columns as Spark's DDL."""
        hidden = "".join(f", `{name}` {kind.upper()}" for name, kind in self.hidden)
        return self.schema.ddl() + hidden

    @property
    def stored(self) -> BucketLayout:
        """This layout with the names that files have, in the same order; itself if nothing was
        renamed.
        """
        if not self.names.names:
            return self
        return _stored_layout(self)

    def stored_names(self, columns: Sequence[str]) -> list[str]:
        """Return the names that files have for these columns, hidden or not."""
        return [self.names.of((), name) for name in columns]

    def arrow_schema(self) -> Any:
        """Return all columns with their Arrow types."""
        schema = self.schema.to_arrow()
        for name, kind in self.hidden:
            schema = schema.append(pa.field(name, arrow_type(kind)))
        return schema


@lru_cache(maxsize=256)
def _stored_layout(layout: BucketLayout) -> BucketLayout:
    """Return the layout under the names that files have."""
    return replace(
        layout,
        schema=layout.names.store(layout.schema),
        bucket_by=tuple(layout.stored_names(layout.bucket_by)),
        key=tuple(layout.stored_names(layout.key)),
        names=StoredNames(retired=layout.names.retired),
    )


def bucket_file_name(bucket: int, attempt: str) -> str:
    """Return a file name from which Spark recognizes the bucket of a bucketed table."""
    return f"part-{bucket:05d}-{attempt}{bucket_file_suffix(bucket)}"


def bucket_file_suffix(bucket: int) -> str:
    """Return the end of the names of this bucket's files, which does not depend on the attempt."""
    return f"_{bucket:05d}.c000.zstd.parquet"


def attempt_id(folder: str) -> str:
    """Return the id of the attempt that writes to this folder: the last part of the path."""
    return folder.rsplit("/", 1)[-1]


def pack_footer(tail: bytes) -> str:
    """Return the end of a Parquet file (`tail`, from its footer on) compressed and in base64."""
    return base64.b64encode(zlib.compress(tail, 9)).decode()


def unpack_footer(text: str) -> bytes:
    """Return the bytes that `pack_footer` has packed. Raises MalformedDocumentError."""
    try:
        return zlib.decompress(base64.b64decode(text, validate=True))
    except (binascii.Error, zlib.error) as error:
        raise _malformed_error("a footer of a manifest", text[:60], str(error)) from error


def _malformed_error(what: str, found: str, reason: str) -> errors.MalformedDocumentError:
    """Return the error for a part of a manifest that can't be read."""
    step = "Restore the manifest from a backup, or roll back to the commit before."
    return errors.MalformedDocumentError(f"{what} reads {found!r}: {reason}.", step, document=what)


GENERATION_COLUMN = "__gen"
_MAX_TABLES = 64
_MAX_SESSIONS = 16
# By session: the names of its tables, the last used one at the end.
_tables: LRUCache[str, dict[str, None]] = LRUCache(_MAX_SESSIONS)
_tables_lock = threading.Lock()


def bucketed_frame(
    spark: SparkSession,
    store: ObjectStore,
    what: str,
    layout: BucketLayout,
    generations: Sequence[Generation],
) -> DataFrame:
    """Return the rows of all generations, with the column `__gen` (int), as one bucketed scan, so
    that joins on the key need no exchange.

    A single generation is read in the order of the layout's key, and Spark knows it: a join on the
    key, or on its first columns, does not sort. `what` names the dataset or stream in errors.
    Raises ManifestMismatchError when a folder holds other files than its generation lists.

    The scan is a table in the session's in-memory catalog, with one partition per generation. Spark
    lists the folders itself, so its list of files is compared with the manifest's.
    """
    wanted = [generation for generation in generations if generation.files]
    stored = layout.stored
    content = [store.url, stored.ddl, str(stored.partitions), *stored.bucket_by, "", *stored.key]
    content += [f"{g.id}:{g.folder}" for g in wanted]
    name = f"adjunct_{hashlib.sha256('|'.join(content).encode()).hexdigest()[:24]}"
    # Datasets advance in threads of one session, each of which may drop the oldest table.
    with _tables_lock:
        known = _tables.setdefault(identify_session(spark), {})
        if name in known:
            # Move it to the end, to be dropped last: a frame's table must exist when the frame is
            # planned.
            known.pop(name, None)
        else:
            _create_table(spark, store, name, stored, wanted)
            try:
                _check_files(spark, name, what, wanted)
            except BaseException:
                spark.sql(f"DROP TABLE IF EXISTS {name}")
                raise
        known[name] = None
        while len(known) > _MAX_TABLES:
            oldest = next(iter(known))
            known.pop(oldest, None)
            spark.sql(f"DROP TABLE IF EXISTS {oldest}")
        return _with_names(spark.table(name), layout)


def _with_names(frame: DataFrame, layout: BucketLayout) -> DataFrame:
    """Return a frame of files with the names that users see, at every depth. Renamed columns keep
    the frame's buckets and order.
    """
    if layout.stored is layout:
        return frame
    columns = []
    for stored, (name, kind) in zip(layout.stored.types, layout.types.items(), strict=True):
        column = named_column(stored)
        if is_nested(kind) and kind != layout.stored.types[stored]:
            column = column.cast(kind)  # matches members of structs by their places
        columns.append(column.alias(name) if name != stored or is_nested(kind) else column)
    return frame.select(*columns, GENERATION_COLUMN)


def _create_table(
    spark: SparkSession,
    store: ObjectStore,
    name: str,
    layout: BucketLayout,
    generations: Sequence[Generation],
) -> None:
    """Create the bucketed table over the folders of these generations, in the session's catalog."""
    clustered = ""
    if layout.bucket_by:
        clustered = f" CLUSTERED BY ({', '.join(map(quote_name, layout.bucket_by))})"
        if layout.key:  # the writer refuses rows in another order
            clustered += f" SORTED BY ({', '.join(map(quote_name, layout.key))})"
        clustered += f" INTO {layout.partitions} BUCKETS"
    # The table's own location is never read, and need not exist: rows are in the partitions.
    # Without any, the scan is empty but bucketed.
    root = quote_text(store.spark_uri("_adjunct"))
    spark.sql(
        f"CREATE TABLE IF NOT EXISTS {name} ({layout.ddl}, `{GENERATION_COLUMN}` INT) USING parquet"
        f" PARTITIONED BY (`{GENERATION_COLUMN}`){clustered} LOCATION {root}"
    )
    if not generations:
        return
    parts = " ".join(
        f"PARTITION (`{GENERATION_COLUMN}`={g.id}) LOCATION {quote_text(store.spark_uri(g.folder))}"
        for g in generations
    )
    spark.sql(f"ALTER TABLE {name} ADD IF NOT EXISTS {parts}")


def _check_files(
    spark: SparkSession, name: str, what: str, generations: Sequence[Generation]
) -> None:
    """Raise ManifestMismatchError if Spark has listed other files for a table than the generations
    have.
    """
    parents = {attempt_id(g.folder): g.folder for g in generations}
    listed = set()
    for generation in generations:
        attempt = attempt_id(generation.folder)
        listed |= {f"{attempt}/{file.name}" for file in generation.files}
    seen = set()
    for uri in spark.table(name).inputFiles():
        attempt, file_name = unquote(uri).rsplit("/", 2)[-2:]
        seen.add(f"{attempt}/{file_name}")
    if listed == seen:
        return
    missing = sorted(listed - seen)
    stray = sorted(seen - listed)
    problem = f"{what}: the manifest lists {len(listed)} files, Spark found {len(seen)}"
    if missing:
        problem += f"; missing: {', '.join(missing[:3])}"
    if stray:
        problem += f"; not listed: {', '.join(stray[:3])}"
    step = "Remove files that are not listed, or restore missing ones. Nothing was read."
    folder, _, file = (missing or stray)[0].partition("/")
    raise errors.ManifestMismatchError(
        f"{problem}.", step, key=f"{parents.get(folder, folder)}/{file}"
    )


def columns_problem(stored: pa.Schema, layout: BucketLayout) -> str:
    """Return why a file's columns can't be read as those of the layout, "" if they can.

    If the layout is projected or has hidden columns, as for streams and unbounded datasets, files
    may be older than the layout: they may lack columns, have narrower ones, except in the key, and
    have dropped ones. A version of a bounded dataset is written at once, so its files must have
    exactly its own layout's columns.
    """
    wanted = layout.stored.arrow_schema()
    if stored.remove_metadata().equals(wanted) or _fits_later_layout(stored, layout.stored):
        return ""
    return f"its columns are {', '.join(f'{field.name} {field.type}' for field in stored)}"


def _fits_later_layout(found: pa.Schema, layout: BucketLayout) -> bool:
    """Whether a file with these columns may be from before columns of the layout were added,
    widened or dropped; both have stored names.

    Files of a layout without hidden columns are never older than it, unless it is projected. Those
    that may be older have each column once, and have all that never changed: those of the key and
    the buckets, and hidden ones except `__set_at`, which older files lack.
    """
    names = set(found.names)
    fixed = {*layout.key, *layout.bucket_by, *dict(layout.hidden)} - {SET_AT}
    is_later = layout.hidden or layout.projected
    if not is_later or len(names) < len(found.names) or not fixed <= names:
        return False
    types = layout.types
    for each in found:
        if (each.name,) in layout.names.retired:
            continue
        if each.name not in types:
            return False
        if each.type == arrow_type(types[each.name]):
            continue
        if each.name in fixed or not _holds_field(types[each.name], each, layout.names):
            return False
    return True


def _holds_field(wide: str, found: pa.Field, names: StoredNames) -> bool:
    """Whether a column of a file can be read with the type `wide`, without the members that were
    dropped.
    """
    try:
        narrow = tree_from_arrow(found.type, found.name)
    except errors.AdjunctError:
        return False
    return holds_values_of(parse_type(wide), names.without_retired(narrow, (found.name,)))


def conform_to_layout(table: pa.Table, layout: BucketLayout) -> pa.Table:
    """Return rows of a file, under stored names, with the columns of the layout: added columns are
    null, widened ones cast, dropped ones left out.

    Raises pyarrow's ArrowInvalid for columns that can't be converted.
    """
    wanted = layout.stored.arrow_schema()
    if not table.schema.equals(wanted):
        problem = columns_problem(table.schema, layout)
        if problem:
            raise pa.ArrowInvalid(problem)
        there = set(table.schema.names)
        columns = []
        for each in wanted:
            if each.name in there:
                columns.append(cast_to(table.column(each.name), each.type))
            else:
                columns.append(pa.nulls(table.num_rows, each.type))
        table = pa.table(columns, schema=wanted)
    if layout.stored is layout:
        return table
    return rename_columns(table, layout.arrow_schema())


VALID_FROM = "__valid_from"
VALID_TO = "__valid_to"
IS_FIRST = "__first"
HAS_ENDS = "has_ends"
KEYS = "keys"
"""In the stats of a file of rows over time: how many keys it has."""
POSITION = "__position"
TOMBSTONE = "__tombstone"
SET_AT = "__set_at"
"""Which changes have set the columns of a row: see assets/unbounded/merge_columns.py. Files from
before changes left out columns lack it.
"""


@dataclass(frozen=True, slots=True)
class TimelineOptions:
    """How rows over time are written. All times are in microseconds since the epoch.

    With `fills_ends`, each row gets its end (`__valid_to`) and whether it is its key's first
    (`__first`), and rows are pruned: those that ended at or before `edge`, where the history
    begins, and tombstones at or before `forget` that are the only row left of their key. Otherwise
    both columns are null, as in a delta. Rows that begin before `newest` are counted as corrections
    of the past. Adjacent entries of a key with equal values at the paths `compared` are one
    interval: the row with which the one that lasts beyond the edge begins is not pruned.
    """

    fills_ends: bool = False
    edge: int | None = None
    forget: int | None = None
    newest: int | None = None
    compared: tuple[Path, ...] = ()


class Timeline:
    """Converts a file's rows over time, batch by batch and in order, to the form in which they are
    stored.

    Each row gets its end; rows that ended before the history begins are pruned (see
    `TimelineOptions`). The rows of a key are adjacent, in the order of `__valid_from`, and have
    different times:

        key  valid_from  tombstone      valid_to  first
        a    1           no             4         yes
        a    4           yes            9         no      deleted from 4 to 9
        a    9           no             -         no      valid now
        b    2           no             -         yes

    If the history begins at 5 (`edge`), the first row of key a is pruned, because it ended before.
    Its second row becomes its first.

    An interval may begin before the edge and last beyond it, in several rows. So that it always
    begins at the same time, its first row stays, as an *anchor*:

        key  valid_from  value          valid_to  first
        a    1           7              4         yes     the anchor
        a    2           7                                pruned
        a    4           7              9         no
        a    9           8              -         no
    """

    def __init__(self, key: tuple[str, ...], options: TimelineOptions) -> None:
        self._key = key
        self._options = options
        self._last: pa.Table | None = None
        self._anchor: pa.Table | None = None  # where the interval of `_last` begins, if pruned
        # Whether the next row follows a row of its key that was kept.
        self._follows_kept = False
        self._pruned = self._forgotten = self._corrections = self._current = 0
        self._forgotten_to: int | None = None

    def take(self, batch: pa.Table) -> pa.Table:
        """Return the rows that can be written now. If ends are filled in, the last one waits for
        the next batch.
        """
        if self._options.newest is not None:
            self._corrections += int((_micros(batch) < self._options.newest).sum())
        if not self._options.fills_ends:
            return _with_ends(
                batch,
                pa.nulls(batch.num_rows, arrow_type("timestamp")),
                pa.nulls(batch.num_rows, pa.bool_()),
            )
        if self._last is not None:
            rows = pa.concat_tables([self._last, batch])
        else:
            rows = batch
        self._last = rows.slice(rows.num_rows - 1)
        return self._fill_ends(rows, rows.num_rows - 1)

    def rest(self) -> pa.Table | None:
        """Return the row that still waits, after the last batch; None if none does."""
        last = self._last
        self._last = None
        if last is None:
            return None
        return self._fill_ends(last, 1)

    def stats(self) -> dict[str, Any]:
        """Return counters for the file's stats, without those of which nothing was counted;
        `current` is the number of rows that are valid now.
        """
        stats: dict[str, Any] = {HAS_ENDS: self._options.fills_ends}
        if self._options.fills_ends:
            stats["current"] = self._current
        if self._corrections:
            stats["corrections"] = self._corrections
        if self._pruned:
            stats["pruned"] = self._pruned
        if self._forgotten:
            stats["forgotten"] = self._forgotten
            stats["forgotten_to"] = self._forgotten_to
        return stats

    def _fill_ends(self, rows: pa.Table, count: int) -> pa.Table:
        """Return the first `count` rows with their ends, without pruned ones; `rows` may have
        one more row.
        """
        # By row: whether the next row is of the same key, which is where this one ends.
        same = np.append(~key_changes(rows, self._key), False)[:count]
        begins = _micros(rows)
        ends = np.append(begins[1:], 0)[:count]
        if self._options.edge is not None:
            in_history = ~(same & (ends <= self._options.edge))
        else:
            in_history = np.ones(count, dtype=bool)
        self._pruned += count - int(in_history.sum())
        kept = in_history
        tombstones = _deletions(rows.slice(0, count))
        if self._options.forget is not None:
            kept = kept & ~self._forgettable(kept, same, tombstones, begins[:count])
        if count:
            # A row that follows a kept row of its key is not the key's first.
            first = ~np.append([self._follows_kept], same[:-1] & kept[:-1])[:count]
            self._follows_kept = bool(same[-1] and kept[-1])
        else:
            first = kept  # both are empty
        self._current += int((kept & ~same & ~tombstones).sum())
        if self._anchor is not None or not in_history.all():
            return self._keep_anchors(rows, ends, same, first, in_history, kept)
        filled = _with_ends(rows.slice(0, count), _ends_array(ends, same), pa.array(first))
        return filled if kept.all() else filled.filter(pa.array(kept))

    def _keep_anchors(
        self, rows: pa.Table, ends: Any, same: Any, first: Any, in_history: Any, kept: Any
    ) -> pa.Table:
        """Return the kept rows with their ends, each after the anchor of its interval; `rows` may
        have one more row.

        The other arguments say of each row: when it ends; whether the next row is of the `same`
        key; whether it is its key's `first`; whether it did not end before the history begins
        (`in_history`); and whether it is `kept`.
        """
        # Whether the next row continues the interval of a row that ended before the history.
        continued = np.zeros(len(ends), np.bool_)
        old = np.nonzero(~in_history)[0]
        continued[old] = self._are_continued(rows, old)
        rows = rows.slice(0, len(ends))
        if self._anchor is not None:  # it comes before the first of these rows
            rows = pa.concat_tables([self._anchor, rows])
            continued = np.append([True], continued)
            same = np.append([True], same)
            ends = np.append([0], ends)
            first, in_history, kept = (
                np.append([False], mask) for mask in (first, in_history, kept)
            )
        # The place of the row with which each row's interval begins.
        places = np.arange(len(ends))
        starts = np.maximum.accumulate(np.where(np.append([True], ~continued[:-1]), places, 0))
        self._anchor = rows.slice(starts[-1], 1) if continued[-1] else None
        # The last rows before the history of intervals that go on in it.
        reaching = np.nonzero(continued[:-1] & in_history[1:])[0]
        anchors = starts[reaching]
        self._pruned -= len(anchors)
        kept = kept.copy()
        kept[anchors] = True
        # The anchor ends where the first row in the history begins, and is the key's first row.
        ends[anchors] = _micros(rows)[reaching + 1]
        first[reaching + 1] = False
        first[anchors] = True
        filled = _with_ends(rows, _ends_array(ends, same), pa.array(first))
        return filled.filter(pa.array(kept))

    def _are_continued(self, rows: pa.Table, places: Any) -> Any:
        """Return whether the rows after these, which are of the same keys, are entries that equal
        them.
        """
        before = rows.take(places)
        after = rows.take(places + 1)
        differs = _deletions(before) | _deletions(after)
        for path in self._options.compared:
            old = read_path(before, path.steps).combine_chunks()
            new = read_path(after, path.steps).combine_chunks()
            differs |= differing_values(old, new)
        return ~differs

    def _forgettable(self, kept: Any, same: Any, tombstones: Any, begins: Any) -> Any:
        """Return which rows to forget, and count them: kept tombstones, not after the time
        `forget`, that are the only row left of their key.
        """
        follows_none = ~np.append([self._follows_kept], same[:-1] & kept[:-1])[: len(kept)]
        are_alone = follows_none & ~same
        forgotten = kept & tombstones & are_alone & (begins <= self._options.forget)
        if forgotten.any():
            self._forgotten += int(forgotten.sum())
            highest = int(begins[forgotten].max())
            if self._forgotten_to is not None:
                highest = max(highest, self._forgotten_to)
            self._forgotten_to = highest
        return forgotten


def _with_ends(rows: pa.Table, ends: Any, first: Any) -> pa.Table:
    """Return the rows with these values as `__valid_to` and `__first`."""
    rows = rows.drop_columns([name for name in (VALID_TO, IS_FIRST) if name in rows.column_names])
    return rows.append_column(VALID_TO, ends).append_column(IS_FIRST, first)


def _ends_array(ends: Any, same: Any) -> Any:
    """Return the ends, in microseconds, as times; null for the last row of a key."""
    return pa.array(ends, pa.int64(), mask=~same).cast(arrow_type("timestamp"))


def _deletions(rows: pa.Table) -> Any:
    """Return which rows are tombstones, as a NumPy array."""
    return rows.column(TOMBSTONE).to_numpy().astype(bool)


def key_changes(rows: pa.Table, key: Sequence[str]) -> Any:
    """Return, for each row except the first, whether its key differs from that of the row
    before.
    """
    count = max(0, rows.num_rows - 1)
    differs = np.zeros(count, bool)
    for name in key:
        column = rows.column(name)
        differs |= pc.not_equal(column.slice(1), column.slice(0, count)).to_numpy()
    return differs


def _micros(rows: pa.Table) -> Any:
    """Return the valid-from times of rows, in microseconds since the epoch."""
    return rows.column(VALID_FROM).cast(arrow_type("timestamp")).cast("int64").to_numpy()
