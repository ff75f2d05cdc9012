"""The stored rows of the keys of one bucket, found in the files of several generations.

Only row groups that may have one of the keys are read, and of these only the columns that are
asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from dagster_adjunct.assets.reading.stored_file import StoredFile, column_paths
from dagster_adjunct.assets.reading.superseded import key_codes
from dagster_adjunct.assets.versions.version import POSITION, TOMBSTONE
from dagster_adjunct.resources.bucketing.files import (
    BucketLayout,
    Generation,
    conform_to_layout,
    unpack_footer,
)
from dagster_adjunct.resources.lazy_modules import np, pa, pc, pq
from dagster_adjunct.resources.objects.arrow_files import open_object
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.schemas.types import arrow_type


class FoundRows(NamedTuple):
    """The indices of the keys that were found, and the row of each."""

    keys: Any
    rows: pa.Table


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The rows of a bucket in the files of these generations, oldest first. `store` is None only if
    there are no generations.
    """

    store: ObjectStore | None
    dataset: str
    layout: BucketLayout
    generations: tuple[Generation, ...]
    bucket: int

    def iterate(
        self,
        keys: pa.Table,
        asked: Any,
        schema: pa.Schema,
        *,
        positions: bool,
        generations: Sequence[Generation] | None = None,
    ) -> Iterator[FoundRows]:
        """Yield for each file, newest generation first, the rows that it has of the `asked` keys.
        These, and the keys that are found, are given by their indices in `keys`.

        Rows have the columns of `schema`, position and tombstone. With `positions`, a key may be
        yielded from several generations. Without, it is yielded only from the newest that has it,
        and the position is not read: it is 0. `generations` are those to read, by default all.
        """
        generations_read = self.generations if generations is None else generations
        for generation in reversed(generations_read):
            for file in generation.files:
                if file.bucket != self.bucket or not len(asked):
                    continue
                assert self.store is not None, "there are generations in a store only"
                what = f"dataset {self.dataset!r}"
                opened = StoredFile(self.store, what, generation, file)
                asked_keys = keys.take(asked)
                find = partial(self._find_in_file, opened, asked_keys, schema, positions=positions)
                found = opened.reading(find)
                yield FoundRows(asked[found.keys], found.rows)
                if not positions:
                    asked = np.delete(asked, found.keys)

    def _find_in_file(
        self, stored: StoredFile, keys: pa.Table, schema: pa.Schema, *, positions: bool
    ) -> FoundRows:
        """Return which of the keys a file has, and their rows; see `iterate`."""
        file = _open_file(stored)
        position = arrow_type(dict(self.layout.hidden)[POSITION])
        row_schema = pa.schema([(POSITION, position), (TOMBSTONE, pa.bool_()), *schema])
        constants: dict[str, Any] = {}  # columns that need not be read
        if not positions:
            constants[POSITION] = 0
        if not stored.file.stats.get("tombstones"):
            constants[TOMBSTONE] = False
        names_read = [name for name in row_schema.names if name not in constants]
        layout = self._layout_with([*keys.column_names, *names_read])
        numbers = [np.zeros(0, int)]
        tables = [row_schema.empty_table()]
        for group in range(file.num_row_groups):
            candidates = self._keys_in_range(file.metadata, group, keys)
            if not len(candidates):
                continue
            stored_names = list(layout.stored.columns)
            group_rows = file.read_row_group(group, columns=stored_names, use_threads=False)
            key = group_rows.select(self.layout.stored_names(keys.column_names))
            matches = _match_keys(key.columns, keys.take(candidates))
            if not len(matches.rows):
                continue
            numbers.append(candidates[matches.keys])
            values = conform_to_layout(group_rows.take(matches.rows), layout)
            columns = []
            for field in row_schema:
                if field.name in constants:
                    constant = pa.scalar(constants[field.name], field.type)
                    columns.append(pa.repeat(constant, len(matches.rows)))
                else:
                    columns.append(values.column(field.name))
            tables.append(pa.table(columns, schema=row_schema))
        return FoundRows(np.concatenate(numbers), pa.concat_tables(tables))

    def _layout_with(self, names: Sequence[str]) -> BucketLayout:
        """Return the layout of these columns, hidden or not, for reading files."""
        known = self.layout.schema
        return replace(
            self.layout,
            schema=known.select([name for name in dict.fromkeys(names) if name in known]),
            bucket_by=(),
            partitions=1,
            key=(),
            hidden=tuple((name, kind) for name, kind in self.layout.hidden if name in names),
            projected=True,
        )

    def _keys_in_range(self, metadata: pq.FileMetaData, group: int, keys: pa.Table) -> Any:
        """Return the indices of keys that may be in the row group number `group`, by the statistics
        of its first key column; all if it has none.
        """
        name = keys.column_names[0]
        (stored_name,) = self.layout.stored_names([name])
        first = column_paths(metadata).index(stored_name)
        statistics = metadata.row_group(group).column(first).statistics
        if statistics is None or not statistics.has_min_max:
            return np.arange(keys.num_rows)
        column = keys.column(name)
        least = pa.scalar(statistics.min, column.type)
        greatest = pa.scalar(statistics.max, column.type)
        within = pc.and_(pc.greater_equal(column, least), pc.less_equal(column, greatest))
        return np.flatnonzero(within.to_numpy())


def _open_file(stored: StoredFile) -> pq.ParquetFile:
    """Open a stored file; its footer need not be read if the manifest has it."""
    footer = stored.file.footer
    metadata = None
    if footer is not None:
        metadata = pq.read_metadata(pa.BufferReader(unpack_footer(footer)))
    source = open_object(stored.store, stored.key, stored.file.size)
    return pq.ParquetFile(
        source, metadata=metadata, page_checksum_verification=True, pre_buffer=True
    )


class _Matches(NamedTuple):
    """Two arrays of the same length: indices of keys, and for each the index of its row."""

    keys: Any
    rows: Any


def _match_keys(rows: Sequence[pa.ChunkedArray], keys: pa.Table) -> _Matches:
    """Return which of the keys are among rows, of which the key columns are given."""
    columns = []
    for stored, wanted in zip(rows, keys.columns, strict=True):
        columns.append(pa.chunked_array([*stored.cast(wanted.type).chunks, *wanted.chunks]))
    codes = key_codes(columns)
    count = len(rows[0])
    places = pc.index_in(codes.slice(0, count), value_set=codes.slice(count))
    found = pc.indices_nonzero(pc.is_valid(places))
    return _Matches(places.take(found).to_numpy(), found.to_numpy())
