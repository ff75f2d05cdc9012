"""Finds which stored rows of a version are entries: reads these as Arrow tables, or filters Spark's
scans by masks.

Of a key's rows the one with the highest (position, generation) counts, and a tombstone is no entry.
A *mask* of a version with deltas has a bit for each stored row, set if the row is no entry. It is
made after a commit from the keys of all files, and stored next to the files of the newest
generation, so that it is deleted with them; its name is made of the folders of all generations, so
that a mask of other files is never read. It is a cache: a version whose mask is missing, torn or
not made yet is merged by its keys, with the same result.

Spark gets the bits as one array of 64-bit words. A row finds its bit by generation, bucket and its
number in the file, so that the scan of the files needs no join.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cachetools import LRUCache

from dagster_adjunct.assets.reading.stored_file import (
    StoredFile,
    list_stored_files,
    read_stored_file,
)
from dagster_adjunct.assets.versions.version import POSITION, TOMBSTONE, SealedVersion
from dagster_adjunct.resources.bucketing.files import GENERATION_COLUMN, VALID_FROM
from dagster_adjunct.resources.errors import AdjunctError
from dagster_adjunct.resources.lazy_modules import F, np, pa, pc, pt
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.schemas.records import frame_from_arrow
from dagster_adjunct.resources.schemas.schema import named_column
from dagster_adjunct.resources.spark.in_process import identify_session
from dagster_adjunct.resources.threads import map_in_threads

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

FEWEST_ROWS = 200_000
"""Versions with fewer stored rows have no mask: merging them by key costs about as little as
looking for one.
"""
MOST_ROWS = 64_000_000
"""Versions with more stored rows have no mask: every task would get a copy of more than 8 MB."""
_SECONDS_A_ROW = 0.2e-6
_MAX_SESSIONS = 4  # of Spark, whose frames a mask keeps
_making = threading.Lock()
_MOST_CODES = 2**62
_DIGEST_BYTES = hashlib.sha256().digest_size


class StoredRows(NamedTuple):
    """Stored rows of a version, and the number of the generation of each (numpy)."""

    rows: pa.Table
    generations: Any


class NumberedValues(NamedTuple):
    """A number for each row (numpy), the same for equal values, all below `limit`, which is 1 or
    more.
    """

    numbers: Any
    limit: int


def read_stored_rows(
    store: ObjectStore,
    dataset: str,
    sealed: SealedVersion,
    bucket: int | None = None,
    *,
    threads: bool = False,
) -> StoredRows:
    """Return the stored rows of a bucket, or of all (None). `threads` decodes columns in
    parallel.
    """
    stored = []
    for one in list_stored_files(store, dataset, sealed):
        if bucket in (None, one.file.bucket):
            stored.append(one)
    read = partial(read_stored_file, layout=sealed.layout, threads=threads)
    tables = [sealed.layout.arrow_schema().empty_table(), *map_in_threads(read, stored)]
    return StoredRows(pa.concat_tables(tables), _list_generations(stored))


def _list_generations(files: Sequence[StoredFile]) -> Any:
    """Return the number of the generation of each row in these files (numpy)."""
    numbers = np.array([stored.generation.id for stored in files], np.int64)
    return np.repeat(numbers, [stored.file.rows for stored in files])


def mark_entries(stored: StoredRows, key: Sequence[str], *, by_time: bool = False) -> Any:
    """Return a mask (numpy) of the rows that are entries: the newest row of their key, and no
    tombstone.

    The rows have the key, `__position` and `__tombstone`. Only keys in deltas are sorted; the other
    rows of the base are kept. With history (`by_time`) a key has a row for each `__valid_from`, and
    the highest (valid_from, position, generation) counts.
    """
    rows, generations = stored
    is_entry: Any = ~rows.column(TOMBSTONE).to_numpy()
    in_deltas = generations != generations.min()
    if not by_time and not in_deltas.any():  # a generation has one row of a key
        return is_entry
    codes = key_codes(rows.select(key).columns)
    # In the order in which lexsort takes them: the last one counts most.
    ranks = [generations, sortable_positions(rows.column(POSITION))]
    if by_time:
        ranks.append(rows.column(VALID_FROM).cast("int64").to_numpy())
        contested = np.arange(rows.num_rows)
    else:
        has_key_in_deltas = pc.is_in(codes, value_set=codes.filter(in_deltas)).to_numpy()
        contested = np.flatnonzero(has_key_in_deltas)
    keys = number_values(codes.take(contested)).numbers
    order = np.lexsort([*[rank[contested] for rank in ranks], keys])
    next_has_same_key = np.diff(keys[order]) == 0
    superseded = contested[order[:-1][next_has_same_key]]
    is_entry = is_entry.copy()
    is_entry[superseded] = False
    return is_entry


def key_codes(columns: Sequence[pa.ChunkedArray]) -> pa.ChunkedArray:
    """Return one column with equal values for rows in which all of `columns` are equal.

    It is the only column itself, or has a number for each combination of several.
    """
    if len(columns) == 1:
        return columns[0]
    codes: Any = np.zeros(len(columns[0]), np.int64)
    span = 1  # all codes are below
    for column in columns:
        numbers, limit = number_values(column)
        if span * limit > _MOST_CODES:  # they would not fit: number those that occur
            codes, span = number_values(pa.chunked_array([pa.array(codes)]))
        codes = codes * limit + numbers
        span *= limit
    return pa.chunked_array([pa.array(codes, pa.int64())])


def number_values(column: pa.ChunkedArray) -> NumberedValues:
    """Return a number for each row of a column without nulls, the same for equal values."""
    encoded = column.dictionary_encode().unify_dictionaries()
    if not encoded.num_chunks:
        return NumberedValues(np.zeros(0, np.int64), 1)
    numbers = [chunk.indices.to_numpy().astype(np.int64) for chunk in encoded.chunks]
    count = len(encoded.chunk(0).dictionary)
    return NumberedValues(np.concatenate(numbers), max(1, count))


def sortable_positions(positions: pa.ChunkedArray) -> Any:
    """Return an array of numbers that sort as the positions do, which may be strings."""
    if pt.is_string(positions.type):
        positions = pc.rank(positions, tiebreaker="dense")
    return positions.to_numpy()


def can_have_mask(sealed: SealedVersion) -> bool:
    """Whether a version may have a mask: without history, with deltas, FEWEST_ROWS to MOST_ROWS
    stored rows.

    A column `_metadata` would hide Spark's own, with the row numbers, so tables with such a column
    have no masks.
    """
    if not sealed.positioned or sealed.history is not None:
        return False
    if "_metadata" in map(str.lower, sealed.columns.names):
        return False
    has_deltas = len(sealed.nonempty) > 1
    return has_deltas and FEWEST_ROWS <= sealed.stored_rows <= MOST_ROWS


def is_mask_due(sealed: SealedVersion, seconds: float) -> bool:
    """Whether to make the mask of a version whose commit took `seconds`: not if that is expected
    to take longer.
    """
    return can_have_mask(sealed) and sealed.stored_rows * _SECONDS_A_ROW <= seconds


@dataclass(frozen=True, slots=True)
class Mask:
    """Which stored rows of a version are no entries.

    `bits` has, by (generation, bucket), a bit for each row of that file, set if the row is no
    entry; the first row has the lowest bit of the first byte. A file without such rows has no bits.
    `frames` caches, by session of Spark, what `_words_in` returns.
    """

    bits: Mapping[tuple[int, int], bytes]
    frames: LRUCache[str, DataFrame] = field(
        default_factory=lambda: LRUCache(_MAX_SESSIONS), compare=False, repr=False
    )

    def drop_superseded(self, rows: DataFrame, sealed: SealedVersion) -> DataFrame:
        """Return the entries among `rows`, a scan of all stored rows with Spark's
        `_metadata.row_index`.

        The bucket of a row is computed from its partition columns. The number of its task would be
        wrong where Spark reads several buckets in one task.
        """
        if not self.bits:
            return rows
        partitions = sealed.layout.partitions
        words = self._words_in(rows.sparkSession, partitions).scalar()
        if sealed.partition_by:
            bucket = F.pmod(F.hash(*map(named_column, sealed.partition_by)), F.lit(partitions))
        else:
            bucket = F.lit(0)
        head_start = _head_start_column(self._head_starts(partitions))
        first_bit = F.get(words, head_start + bucket)
        bit_number = first_bit + F.col("_metadata.row_index")
        word = F.get(words, F.shiftright(bit_number, 6).cast("int"))
        bit = F.getbit(word, bit_number.bitwiseAND(F.lit(63)).cast("int"))
        is_entry = (first_bit < 0) | (bit == 0)  # null for a generation without bits
        return rows.where(F.coalesce(is_entry, F.lit(True)))

    def _words_in(self, spark: SparkSession, partitions: int) -> DataFrame:
        """Return the words as a frame of one row, which is kept for the session."""
        session = identify_session(spark)
        with _making:
            frame = self.frames.get(session)
            if frame is None:
                words = pa.array([self._words(partitions)], pa.list_(pa.int64()))
                frame = frame_from_arrow(spark, pa.table({"words": words})).coalesce(1)
                self.frames[session] = frame
        return frame

    def _head_starts(self, partitions: int) -> dict[int, int]:
        """Return the index in the head of the words (see `_words`) where the part of each
        generation begins.
        """
        numbers = sorted({generation for generation, _ in self.bits})
        return {generation: index * partitions for index, generation in enumerate(numbers)}

    def _words(self, partitions: int) -> Any:
        """Return one array of 64-bit words (numpy): a head, then the bits of all files.

        The head has, for each generation and each bucket in it, the number of the first bit of that
        file, counted from the start of the array; -1 for a file without bits.
        """
        starts = self._head_starts(partitions)
        head = np.full(len(starts) * partitions, -1, np.int64)
        parts = [head]
        end = len(head)
        for (generation, bucket), packed in self.bits.items():
            head[starts[generation] + bucket] = end * 64
            padding = bytes(-len(packed) % 8)  # to whole words
            words = np.frombuffer(packed + padding, "<i8")
            parts.append(words)
            end += len(words)
        return np.concatenate(parts)

    def to_bytes(self, files: str) -> bytes:
        """Return the mask as it is stored: a digest, and an Arrow table with the digest `files`
        in its metadata.
        """
        files_with_bits = np.array(list(self.bits), np.int64).reshape(-1, 2)
        table = pa.table(
            {
                "generation": files_with_bits[:, 0],
                "bucket": files_with_bits[:, 1],
                "bits": pa.array(list(self.bits.values()), pa.large_binary()),
            }
        ).replace_schema_metadata({"files": files})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(
            sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
        ) as writer:
            writer.write_table(table)
        content: bytes = sink.getvalue().to_pybytes()
        return hashlib.sha256(content).digest() + content

    @classmethod
    def from_bytes(cls, data: bytes, files: str) -> Mask | None:
        """Return the stored mask, or None if it is torn or damaged, or was made for other files
        than `files`.
        """
        digest = data[:_DIGEST_BYTES]
        content = data[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            return None
        table = pa.ipc.open_stream(content).read_all()
        if table.schema.metadata != {b"files": files.encode()}:
            return None
        generations, buckets, bits = table.to_pydict().values()
        return cls(dict(zip(zip(generations, buckets, strict=True), bits, strict=True)))


def _head_start_column(starts: Mapping[int, int]) -> Column:
    """Return the column with the value in `starts`, which is not empty, of each row's generation;
    null for a generation that is not in it.
    """
    remaining = iter(starts.items())
    first, start = next(remaining)
    found = F.when(F.col(GENERATION_COLUMN) == first, F.lit(start))
    for generation, start in remaining:
        found = found.when(F.col(GENERATION_COLUMN) == generation, F.lit(start))
    return found


def digest_files(sealed: SealedVersion) -> str:
    """Return a digest of the folders of a version's generations; it stands for their files,
    which never change.
    """
    folders = "\n".join(generation.folder for generation in sealed.nonempty)
    return hashlib.sha256(folders.encode()).hexdigest()


_MASK_NAME = "_mask-"  # Spark skips files whose names begin with "_"


def mask_key(sealed: SealedVersion) -> str:
    """Return the key of the object that stores a version's mask."""
    return f"{sealed.nonempty[-1].folder}/{_MASK_NAME}{digest_files(sealed)[:24]}"


def is_mask(key: str) -> bool:
    """Whether the object with this key in a generation's folder is a mask, or a position delete
    file made from one.
    """
    _, _, name = key.rpartition("/")
    return name.startswith(_MASK_NAME)


def read_mask(store: ObjectStore, sealed: SealedVersion) -> Mask | None:
    """Return the stored mask of a version; None if it is missing, unreadable, torn or of other
    files. One request.
    """
    try:
        return Mask.from_bytes(store.get(mask_key(sealed)).data, digest_files(sealed))
    except AdjunctError:
        return None


def try_to_write_mask(store: ObjectStore, dataset: str, sealed: SealedVersion) -> str:
    """Make and store the mask of a version; return "", or why that failed.

    Raises nothing: readers do without the mask.
    """
    try:
        store.put(
            mask_key(sealed), make_mask(store, dataset, sealed).to_bytes(digest_files(sealed))
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, the version is committed
        if isinstance(error, AdjunctError):
            reason = error.problem
        else:
            reason = f"{type(error).__name__}: {error}"
        return f"none of version {sealed.id}: {reason}"
    return ""


def make_mask(store: ObjectStore, dataset: str, sealed: SealedVersion) -> Mask:
    """Return the mask of a version. Memory holds the keys of one bucket at a time."""
    by_bucket: dict[int, list[StoredFile]] = {}
    for stored in list_stored_files(store, dataset, sealed):
        by_bucket.setdefault(stored.file.bucket, []).append(stored)
    bits: dict[tuple[int, int], bytes] = {}  # by generation and bucket
    for bucket, files in sorted(by_bucket.items()):
        keys = pa.concat_tables([_keys_of(stored, sealed) for stored in files])
        is_entry = mark_entries(StoredRows(keys, _list_generations(files)), sealed.key)
        ends = np.cumsum([stored.file.rows for stored in files])
        for stored, part in zip(files, np.split(is_entry, ends[:-1]), strict=True):
            if not part.all():
                packed = np.packbits(~part, bitorder="little").tobytes()
                bits[stored.generation.id, bucket] = packed
    return Mask(bits)


def _keys_of(stored: StoredFile, sealed: SealedVersion) -> pa.Table:
    """Return the key, `__position` and `__tombstone` of a file's rows.

    By offset every change is newer than the rows of the base, so these get the lowest position
    instead of their own, which would be most of the bytes to read.
    """
    is_base = stored.generation.id == sealed.generations[0].id
    is_always_older = is_base and sealed.order_by is None
    columns = [*sealed.key, TOMBSTONE]
    if not is_always_older:
        columns.append(POSITION)
    rows = stored.reading(lambda: stored.open().read(columns=columns)).replace_schema_metadata()
    if rows.num_rows != stored.file.rows:
        raise stored.damaged(f"it has {rows.num_rows} rows")
    if not is_always_older:
        return rows.select(columns)
    lowest = pa.array(np.full(rows.num_rows, np.iinfo(np.int64).min))
    return rows.select(columns).append_column(POSITION, lowest)
