"""Indexes of records by key: which rows of a segment have a key, without reading its files.

    streams/NAME/data/ATTEMPT/_keys-DIGEST.parquet

An index has the keys of all records of one segment with their places, ordered by a hash, in small
row groups: their statistics say which few of them may have a key. Keys with a null are left out. As
it is next to the segment's files, which never change, it is never out of date, and is deleted with
them. Spark ignores names that begin with `_`.

DIGEST is that of the stored names and types of the key's columns. So an index stays valid if they
are renamed, and is not used if they are dropped or widened.

An index is a cache: if it is missing or damaged, the files are read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from dagster_adjunct.resources.bucketing.hashing import spark_hash
from dagster_adjunct.resources.errors import ObjectExistsError, ObjectNotFoundError, file_error
from dagster_adjunct.resources.lazy_modules import np, pa, pq, pt
from dagster_adjunct.resources.objects.arrow_files import open_object
from dagster_adjunct.resources.objects.store import staged_file_errors
from dagster_adjunct.resources.schemas.arrow_values import cast_values
from dagster_adjunct.resources.schemas.matching_keys import WantedKeys
from dagster_adjunct.resources.schemas.paths import read_path, require_path
from dagster_adjunct.resources.schemas.schema import Steps
from dagster_adjunct.resources.schemas.types import arrow_type
from dagster_adjunct.resources.streams.lake.manifest import (
    LakeStreamDeclaration,
    Segment,
    StreamFiles,
)
from dagster_adjunct.resources.streams.lake.read import (
    SegmentFile,
    iter_row_groups,
    open_segment_file,
    read_rows,
)

INDEX_NAME = "_keys-"
"""The beginning of the names of indexes."""
FEWEST_RECORDS = 10_000
"""The fewest records of a segment that has an index: fewer are read as quickly."""
_FORMAT = 2
_DIGEST_BYTES = hashlib.sha256().digest_size
_PARQUET_END = 8  # the length of the footer in 4 bytes, and the magic
_LARGE_SEGMENT = 1_000_000
_ROWS_PER_GROUP = 2_048  # of a large segment, so that a key is found among few rows
_MOST_PER_GROUP = 16_384  # of others, which have few groups: opening one costs as much as its rows
_BYTES_SORTED = 128 * 1024 * 1024  # of keys that are sorted at once
_GROUPS_READ = 256  # at once
_HASH = "hash"
_PLACE = "place"


if TYPE_CHECKING:
    from dagster_adjunct.resources.streams.lake.read import Rows


@dataclass(frozen=True, slots=True)
class StoredKey:
    """The columns of a key, as files have them: the stored steps to each value, and its type.

    They are in one order, whatever the order in which users name them.
    """

    steps: tuple[Steps, ...]
    types: tuple[str, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, names: Iterable[str], declaration: LakeStreamDeclaration, what: str) -> StoredKey:
        """Return the key with the columns, or paths, of these names. Raises SchemaMismatchError, in
        which `what` names the stream.
        """
        paths = {name: require_path(name, declaration.columns.types, what) for name in names}
        stored = {name: declaration.names.of_steps(path.steps) for name, path in paths.items()}
        ordered = sorted(stored, key=lambda name: stored[name])
        return cls(
            tuple(stored[name] for name in ordered),
            tuple(paths[name].type for name in ordered),
            tuple(ordered),
        )

    @property
    def file_name(self) -> str:
        """The name of the indexes by this key."""
        content = json.dumps([_FORMAT, self.steps, self.types])
        return f"{INDEX_NAME}{hashlib.sha256(content.encode()).hexdigest()[:16]}.parquet"

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the values in Parquet files."""
        return tuple(".".join(steps) for steps in self.steps)

    def read(self, parquet: SegmentFile, group: int) -> KeyRows:
        """Return the keys of a row group."""
        rows = read_rows(parquet, group, self.paths)
        values = []
        for steps, kind in zip(self.steps, self.types, strict=True):
            if _has_steps(rows.table.schema, steps):
                values.append(cast_values(read_path(rows.table, steps), kind))
            else:
                nulls = pa.nulls(len(rows.numbers), arrow_type(kind))
                values.append(pa.chunked_array([nulls]))
        return KeyRows(rows.numbers, values)


class KeyRows(NamedTuple):
    """The `__row` of each row of a row group, and the values of each of the key's columns."""

    numbers: Rows
    values: list[pa.ChunkedArray]


def _has_steps(schema: pa.Schema, steps: Steps) -> bool:
    """Return whether a file has a value at these steps: it may be older than the column, or than
    the member of a struct.
    """
    if steps[0] not in schema.names:
        return False
    kind = schema.field(steps[0]).type
    for step in steps[1:]:
        if kind.get_field_index(step) < 0:
            return False
        kind = kind.field(step).type
    return True


def index_key(files: StreamFiles, segment: Segment, key: StoredKey) -> str:
    """Return the object key of the segment's index by this key."""
    return f"{segment.folder(files.prefix)}/{key.file_name}"


def write_index(files: StreamFiles, segment: Segment, key: StoredKey) -> None:
    """Store the index of a segment, unless it exists."""
    path = files.store.staging_dir() / f"{uuid4().hex}.parquet"
    try:
        with staged_file_errors(files.store, path, files.prefix):
            size = _ROWS_PER_GROUP if segment.rows >= _LARGE_SEGMENT else _MOST_PER_GROUP
            _write_file(str(path), key, _iter_keys(files, segment, key), size)
            _append_digest(path)
        with suppress(ObjectExistsError):
            files.store.upload(path, index_key(files, segment, key))
    finally:
        path.unlink(missing_ok=True)


def _write_file(path: str, key: StoredKey, parts: Iterator[pa.Table], size: int) -> None:
    """Write an index in row groups of this size."""
    schema = _index_schema(key)
    encodings = {}
    for field in schema:
        encodings[field.name] = "DELTA_BINARY_PACKED"
        if pt.is_string(field.type) or pt.is_binary(field.type) or pt.is_decimal(field.type):
            encodings[field.name] = "DELTA_BYTE_ARRAY"
    with pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        use_dictionary=False,
        column_encoding=encodings,
        write_page_checksum=True,
    ) as writer:
        for table in parts:
            order = np.argsort(table.column(_HASH).to_numpy(), kind="stable")
            writer.write_table(table.take(pa.array(order)), row_group_size=size)


def _append_digest(path: Path) -> None:
    """Append the SHA-256 of its footer to an index. Pages have checksums; a damaged footer may hide
    row groups, or end the process that reads it.
    """
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(size - _PARQUET_END)
        length = int.from_bytes(file.read(4), "little")
        file.seek(size - _PARQUET_END - length)
        file.write(hashlib.sha256(file.read()).digest())


def _read_footer(source: Any, size: int) -> bytes | None:
    """Return the footer of an index, None if it is damaged."""
    length_at = size - _DIGEST_BYTES - _PARQUET_END
    source.seek(max(0, length_at))
    end = source.read(_PARQUET_END + _DIGEST_BYTES)
    start = length_at - int.from_bytes(end[:4], "little")
    if start < 0:
        return None
    source.seek(start)
    footer: bytes = source.read(size - _DIGEST_BYTES - start)
    if hashlib.sha256(footer).digest() != end[_PARQUET_END:]:
        return None
    return footer


def _index_schema(key: StoredKey) -> pa.Schema:
    """Return the columns of an index: the hash of each key, its place, and its values."""
    own = [(_HASH, pa.int32()), (_PLACE, pa.int64())]
    values = [(f"k{number}", arrow_type(kind)) for number, kind in enumerate(key.types)]
    return pa.schema([*own, *values])


def _first_places(segment: Segment) -> Rows:
    """Return the place of the first row of each partition: places count the rows of a segment, one
    partition after the other.
    """
    widths = np.subtract(segment.next, segment.base)
    return np.cumsum(widths) - widths


def _iter_keys(files: StreamFiles, segment: Segment, key: StoredKey) -> Iterator[pa.Table]:
    """Yield the rows of a segment's index, in parts that are sorted at once."""
    schema = _index_schema(key)
    firsts = _first_places(segment)
    waiting: list[pa.Table] = []
    waiting_bytes = 0
    for file in segment.files:
        parquet = open_segment_file(files, segment, file)
        for group in range(parquet.metadata.num_row_groups):
            rows = key.read(parquet, group)
            places = pa.array(rows.numbers + firsts[file.partition])
            keys = pa.table([places, *rows.values], names=schema.names[1:])
            keys = keys.drop_null().combine_chunks()
            if not keys.num_rows:
                continue
            hashes = pa.array(spark_hash(keys.columns[1:]))
            waiting.append(keys.add_column(0, _HASH, hashes).cast(schema))
            waiting_bytes += waiting[-1].nbytes
            if waiting_bytes >= _BYTES_SORTED:
                yield pa.concat_tables(waiting)
                waiting.clear()
                waiting_bytes = 0
    if waiting:
        yield pa.concat_tables(waiting)


def look_up(
    files: StreamFiles, key: StoredKey, wanted: WantedKeys, segment: Segment
) -> dict[int, Rows] | None:
    """Return the rows of a segment that have one of these keys, by partition, in order; None if the
    segment has no index that can be read.

    The columns of the wanted keys have the order of `key`. Errors of this process or machine are
    raised: they say nothing about the index.
    """
    name = index_key(files, segment, key)
    info = files.store.head(name)
    if info is None:
        return None
    try:
        source = open_object(files.store, name, info.size)
        footer = _read_footer(source, info.size)
        if footer is None:
            return None
        places = _find_places(source, footer, key, wanted)
    except pa.ArrowCancelled:
        raise
    except OSError as error:
        if error.errno is not None:  # of the system: Arrow's own about contents have none
            raise file_error(error, files.store.url, f"index {name!r}") from error
        return None
    except (ObjectNotFoundError, pa.ArrowException):
        return None
    firsts = _first_places(segment)
    # Where the places of each partition begin, and those of the last one end.
    edges = np.searchsorted(places, [*firsts, np.iinfo(np.int64).max])
    rows = {}
    for partition, (first, last) in enumerate(pairwise(edges.tolist())):
        if first < last:
            rows[partition] = places[first:last] - firsts[partition]
    return rows


def _find_places(source: Any, footer: bytes, key: StoredKey, wanted: WantedKeys) -> Rows:
    """Return the places of an index that have one of these keys, in order."""
    schema = _index_schema(key)
    metadata = pq.read_metadata(pa.BufferReader(footer))
    parquet = pq.ParquetFile(
        source, metadata=metadata, pre_buffer=True, page_checksum_verification=True
    )
    hashes = np.sort(spark_hash(wanted.keys.columns))
    found = [np.empty(0, np.int64)]
    for groups in _groups_to_read(parquet, hashes):
        table = parquet.read_row_groups(groups, use_threads=False).cast(schema)
        is_found = wanted.find(table.columns[2:])
        found.append(table.column(_PLACE).filter(is_found).to_numpy())
    return np.sort(np.concatenate(found))


def _groups_to_read(parquet: pq.ParquetFile, hashes: Any) -> Iterator[list[int]]:
    """Yield the row groups that may have one of the hashes, which are in order; as many at once as
    fit into memory.
    """
    bounds = [(stats.least, stats.greatest) for stats in iter_row_groups(parquet, _HASH)]
    lows, highs = np.array(bounds, np.int64).reshape(-1, 2).T
    has_some = np.searchsorted(hashes, lows) < np.searchsorted(hashes, highs, "right")
    groups = np.nonzero(has_some)[0].tolist()
    for first in range(0, len(groups), _GROUPS_READ):
        yield groups[first : first + _GROUPS_READ]
