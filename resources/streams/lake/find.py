"""Finds the records of a lake stream that have one of many keys, by the indexes of segments and by
reading the columns of the key, and reads records at their places.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_adjunct.resources.bucketing.writer import ROW
from dagster_adjunct.resources.lazy_modules import np, pa, pt
from dagster_adjunct.resources.schemas.matching_keys import WantedKeys
from dagster_adjunct.resources.schemas.paths import Path, read_path, require_path
from dagster_adjunct.resources.streams import system
from dagster_adjunct.resources.streams.lake import key_index, manifest
from dagster_adjunct.resources.streams.lake.key_index import StoredKey
from dagster_adjunct.resources.streams.lake.manifest import (
    LakeStreamDeclaration,
    Span,
    StreamFiles,
    StreamState,
)
from dagster_adjunct.resources.streams.lake.read import (
    FilePart,
    LakeReads,
    RecordForm,
    SegmentFile,
    find_parts,
    iter_groups_between,
    iter_row_groups,
    open_segment_file,
    spans_from_ranges,
)
from dagster_adjunct.resources.streams.system import (
    OFFSET,
    PARTITION,
    RECORD_META,
    OffsetRange,
    SystemStreamPartition,
    check_places,
)
from dagster_adjunct.resources.threads import map_in_threads
from dagster_adjunct.resources.validation import validated_methods

if TYPE_CHECKING:
    from dagster_adjunct.resources.streams.lake.read import Rows

_PLACE = (PARTITION, OFFSET)


@dataclass(frozen=True, slots=True)
class _Values:
    """The values of found records that are returned: by name, the path of each, None for a column
    of RECORD_META.
    """

    paths: Mapping[str, Path | None]
    form: RecordForm

    @classmethod
    def of(cls, names: Sequence[str], declared: LakeStreamDeclaration, what: str) -> _Values:
        """Return the values of these names, after the places of the records. Raises
        SchemaMismatchError, in which `what` names the stream.
        """
        types = declared.columns.types
        paths: dict[str, Path | None] = dict.fromkeys((*_PLACE, *names))
        for name in names:
            if name not in RECORD_META:
                paths[name] = require_path(name, types, what)
        columns = dict.fromkeys(path.column for path in paths.values() if path is not None)
        schema = declared.columns.select(columns)
        return cls(paths, RecordForm.of(schema, declared.names, positions=False))

    @property
    def are_places(self) -> bool:
        """Whether only the places of records are returned."""
        return tuple(self.paths) == _PLACE

    def select(self, records: pa.Table) -> pa.Table:
        """Return these values of records, which have the columns of `form`."""
        values = {}
        for name, path in self.paths.items():
            values[name] = read_path(records, (name,) if path is None else path.steps)
        return pa.table(values)


@validated_methods
class LakeFinds(LakeReads):
    """The operations of `LakeStreams` that find records and read them by place."""

    def find_records(
        self,
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        keys: pa.Table,
        columns: Sequence[str] = (),
    ) -> pa.Table:
        """Return where the records of these ranges are that have one of the `keys`; see
        `StreamSystem.find_records`.

        Segments with an index by these columns (`find_by`) are looked up; of others, the columns of
        the key are read. Other columns are read where there is a record.
        """
        at = self._locate(ranges)
        declared = at.state.declaration
        what = f"{self.name}.{system.require_one_stream(self.name, ranges)}"
        values = _Values.of(columns, declared, what)
        key = StoredKey.of(keys.column_names, declared, what)
        wanted = WantedKeys.of(keys.select(key.names), declared.columns.types, what)
        scan = _Scan.of(key, wanted)
        parts = find_parts(at.segments, at.spans) if wanted.keys.num_rows else []
        segments = {part.segment.id: part.segment for part in parts}
        look_up = partial(key_index.look_up, at.files, key, wanted)
        looked_up = map_in_threads(look_up, segments.values())
        rows_by_segment = dict(zip(segments, looked_up, strict=True))

        def read(part: FilePart) -> list[pa.Table]:
            rows = rows_by_segment[part.segment.id]
            if rows is None:  # the segment has no index
                return list(_scan_file(at.files, part, scan, values))
            here = rows.get(part.file.partition, np.empty(0, np.int64))
            first, last = np.searchsorted(here, [part.low, part.high])
            return list(_read_values(at.files, part, here[first:last], values))

        nothing = values.select(values.form.schema.empty_table())
        return pa.concat_tables([nothing, *chain.from_iterable(map_in_threads(read, parts))])

    def read_records(
        self, stream: str, places: pa.Table, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return the records at these places; reads only the row groups that have one. See
        `StreamSystem.read_records`.
        """
        _, state = self.state(stream)
        files = self.files_of(stream)
        declared = state.declaration
        schema = declared.columns
        if columns is not None:
            schema = schema.select(columns)
        form = RecordForm.of(schema, declared.names, positions=False)

        def read(chosen: _ChosenRows) -> list[pa.Table]:
            return list(_read_rows(files, chosen.part, chosen.rows, form))

        found = map_in_threads(read, self._find_rows(stream, state, places))
        records = pa.concat_tables([form.schema.empty_table(), *chain.from_iterable(found)])
        return check_places(self, stream, places, records)

    def count_files(self, stream: str, places: pa.Table) -> int:
        """Return how many files have the records at these places."""
        _, state = self.state(stream)
        return len(self._find_rows(stream, state, places))

    def measure(self, ranges: Mapping[SystemStreamPartition, OffsetRange]) -> system.StoredSize:
        """Return the files that have records of these ranges: how many, and their bytes."""
        at = self._locate(ranges)
        parts = find_parts(at.segments, at.spans)
        return system.StoredSize(len(parts), sum(part.file.size for part in parts))

    def _find_rows(self, stream: str, state: StreamState, places: pa.Table) -> list[_ChosenRows]:
        """Return the rows at these places, by file. The places of a partition are in order. Raises
        OffsetOutOfRangeError.
        """
        partitions = places.column(PARTITION).to_numpy()
        offsets = places.column(OFFSET).to_numpy()
        spans: dict[int, Span] = {}
        for partition in np.unique(partitions).tolist():
            ssp = SystemStreamPartition(self.name, stream, partition)
            here = offsets[partitions == partition]
            span = OffsetRange(str(here[0]), str(here[-1] + 1))
            spans |= spans_from_ranges(state, {ssp: span})
        segments = manifest.list_overlapping(state, self.files_of(stream), spans)
        found = []
        for part in find_parts(segments, spans):
            partition = part.file.partition
            here = offsets[partitions == partition]
            base = part.segment.base[partition]
            first, last = np.searchsorted(here, [base, part.segment.next[partition]])
            if first < last:
                found.append(_ChosenRows(part, here[first:last] - base))
        return found


class _ChosenRows(NamedTuple):
    """Rows of a file, in order."""

    part: FilePart
    rows: Rows


@dataclass(frozen=True, slots=True)
class _Scan:
    """A search for keys by reading their columns. `ordered` are the values of each column in order,
    None for a type whose statistics are not compared.
    """

    key: StoredKey
    wanted: WantedKeys
    ordered: tuple[list[Any] | None, ...]

    @classmethod
    def of(cls, key: StoredKey, wanted: WantedKeys) -> _Scan:
        """Return the search for these keys."""
        ordered: list[list[Any] | None] = []
        for values in wanted.distinct:
            if pt.is_integer(values.type) or pt.is_string(values.type):
                ordered.append(sorted(values.to_pylist()))
            else:
                ordered.append(None)
        return cls(key, wanted, tuple(ordered))

    def may_find(self, parquet: SegmentFile, group: int) -> bool:
        """Return whether a row group may have one of the keys, by the statistics of its columns."""
        facts = parquet.metadata.row_group(group)
        paths = [facts.column(place).path_in_schema for place in range(facts.num_columns)]
        for path, ordered in zip(self.key.paths, self.ordered, strict=True):
            # A column whose name has a dot may be written like a value inside another one.
            if ordered is None or paths.count(path) != 1:
                continue
            stats = facts.column(paths.index(path)).statistics
            if stats is None or not stats.has_min_max:
                continue
            place = bisect_left(ordered, stats.min)
            if place == len(ordered) or ordered[place] > stats.max:  # no value is in its range
                return False
        return True


def _scan_file(
    files: StreamFiles, part: FilePart, scan: _Scan, values: _Values
) -> Iterator[pa.Table]:
    """Yield the values of those records of a part of a file that have one of the keys."""
    parquet = open_segment_file(files, part.segment, part.file, for_few=True)
    for group in iter_groups_between(parquet, part.low, part.high):
        if not scan.may_find(parquet, group):
            continue
        keys = scan.key.read(parquet, group)
        first, last = np.searchsorted(keys.numbers, [part.low, part.high])
        found = scan.wanted.find([column.slice(first, last - first) for column in keys.values])
        chosen = np.nonzero(found.to_numpy())[0] + first
        if not chosen.size:
            continue
        if values.are_places:
            yield _places(part, keys.numbers[chosen])
            continue
        rows = values.form.read(parquet, group).take(chosen)
        yield values.select(values.form.finish(rows, part.segment, part.file.partition))


def _read_values(
    files: StreamFiles, part: FilePart, rows: Rows, values: _Values
) -> Iterator[pa.Table]:
    """Yield the values of the records at these rows of a file, which are in order."""
    if values.are_places:
        yield _places(part, rows)
        return
    for records in _read_rows(files, part, rows, values.form):
        yield values.select(records)


def _places(part: FilePart, rows: Rows) -> pa.Table:
    """Return the places of these rows of a file."""
    partition = part.file.partition
    partitions = pa.array(np.full(len(rows), partition, np.int32))
    return pa.table([partitions, pa.array(rows + part.segment.base[partition])], names=_PLACE)


def _read_rows(
    files: StreamFiles, part: FilePart, rows: Rows, form: RecordForm
) -> Iterator[pa.Table]:
    """Yield the records at these rows of a file, which are in order, by row group; reads only the
    row groups that have one.
    """
    if not len(rows):
        return
    parquet = open_segment_file(files, part.segment, part.file, for_few=True)
    for stats in iter_row_groups(parquet, ROW):
        wanted = rows
        if stats.least is not None:  # without statistics, the group may have any row
            first, last = np.searchsorted(rows, [stats.least, stats.greatest + 1])
            wanted = rows[first:last]
        if not len(wanted):
            continue
        there = form.read(parquet, stats.group)
        places = np.nonzero(np.isin(there.numbers, wanted))[0]
        yield form.finish(there.take(places), part.segment, part.file.partition)
