"""The rows of a table in this process: all of the generations that are merged are held in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.declaration.changes.change_formats import PROBLEM
from dagster_adjunct.assets.reading.entries_in_arrow import read_stored_file
from dagster_adjunct.assets.reading.stored_files import StoredFile
from dagster_adjunct.assets.sources.changes_in_arrow import with_problems
from dagster_adjunct.assets.sources.order_by_column import too_late
from dagster_adjunct.assets.versions.sealed_version import POSITION
from dagster_adjunct.resources.streams.interface.stream_system import OFFSET, PARTITION, TOMBSTONE
from dagster_adjunct.resources.times import microseconds

if TYPE_CHECKING:
    import pyarrow as pa

    from dagster_adjunct.resources.bucketing.bucket_files import BucketLayout, Generation
    from dagster_adjunct.resources.objects.object_store import ObjectStore

_GENERATION = "__gen"
Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ArrowRows:
    """TableRows over Arrow tables."""

    def stored(
        self, store: ObjectStore, what: str, layout: BucketLayout, generations: Sequence[Generation]
    ) -> pa.Table:
        import pyarrow as pa

        tables = [layout.arrow_schema().empty_table().append_column(_GENERATION, pa.array([], pa.int32()))]
        for generation in generations:
            for file in generation.files:
                rows = read_stored_file(StoredFile(store, what, generation.folder, file), layout)
                tables.append(rows.append_column(_GENERATION, pa.array([generation.id] * rows.num_rows, pa.int32())))
        return pa.concat_tables(tables)

    def positions(self, rows: pa.Table) -> tuple[int | None, int | None]:
        import pyarrow.compute as pc

        bounds = pc.min_max(rows.column(POSITION)).as_py()
        return bounds["min"], bounds["max"]

    def without_forgotten(
        self, rows: pa.Table, key: tuple[str, ...], horizon: int | None
    ) -> tuple[pa.Table, Callable[[], dict[str, int]]]:
        order = [(name, "ascending") for name in (*key, POSITION, _GENERATION)]
        rows = rows.sort_by(order)
        last = {row: index for index, row in enumerate(_keys(rows, key))}
        winners = rows.take(list(last.values()))
        deleted, positions = (winners.column(name).to_pylist() for name in (TOMBSTONE, POSITION))
        gone = [
            mark and horizon is not None and position <= horizon
            for mark, position in zip(deleted, positions, strict=True)
        ]
        counts = {"keys": len(last), "forgotten": sum(gone), "tombstones": sum(deleted) - sum(gone)}
        return _where(winners, [not mark for mark in gone]), lambda: counts

    def not_expired(self, rows: pa.Table, expires: str, watermark: datetime) -> pa.Table:
        import pyarrow.compute as pc

        return rows.filter(pc.greater(rows.column(expires).cast("int64"), microseconds(watermark)))

    def at_stored_positions(self, changes: pa.Table, stored: pa.Table, key: tuple[str, ...]) -> pa.Table:
        import pyarrow as pa

        held = _held(stored, key)
        rows = zip(_keys(changes, key), changes.column(POSITION).to_pylist(), strict=True)
        positions = [max(position, held.get(own, position)) for own, position in rows]
        return changes.set_column(changes.column_names.index(POSITION), POSITION, pa.array(positions, pa.int64()))

    def late_beside(
        self, changes: pa.Table, stored: pa.Table, key: tuple[str, ...], horizon: int
    ) -> tuple[pa.Table, pa.Table, int]:
        held, own = _held(stored, key), list(_keys(changes, key))
        good = [problem is None for problem in changes.column(PROBLEM).to_pylist()]
        names = (POSITION, OFFSET, PARTITION, TOMBSTONE)
        places = list(zip(*(changes.column(name).to_pylist() for name in names), strict=True))
        newest: dict[Key, tuple[int, int, int, bool]] = {}
        for row, place, fine in zip(own, places, good, strict=True):
            if fine:
                newest[row] = max(place, newest.get(row, place))
        late = [fine and row not in held and newest[row][0] <= horizon for row, fine in zip(own, good, strict=True)]
        kept = [not (mark and newest[row][3]) for row, mark in zip(own, late, strict=True)]
        changes, late = _where(changes, kept), [mark for mark, stays in zip(late, kept, strict=True) if stays]
        reasons = [too_late(horizon) if mark else None for mark in late]
        return _where(changes, [not mark for mark in late]), with_problems(changes, reasons), sum(late)


def _keys(rows: pa.Table, key: tuple[str, ...]) -> Iterator[Key]:
    return zip(*(rows.column(name).to_pylist() for name in key), strict=True)


def _held(stored: pa.Table, key: tuple[str, ...]) -> dict[Key, int]:
    """Return the highest position that is stored of each key."""
    held: dict[Key, int] = {}
    for own, position in zip(_keys(stored, key), stored.column(POSITION).to_pylist(), strict=True):
        held[own] = max(position, held.get(own, position))
    return held


def _where(rows: pa.Table, mask: Sequence[bool]) -> pa.Table:
    import pyarrow as pa

    return rows.filter(pa.array(mask, pa.bool_()))
