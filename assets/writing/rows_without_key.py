"""Where the records lie that have no key, for errors."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.streams.interface.stream_system import OFFSET, PARTITION

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame


def places_without_key(rows: DataFrame | pa.Table, key: tuple[str, ...], limit: int) -> list[tuple[int, int]]:
    """Return (partition, offset) of the first rows that lack a column of the key."""
    if hasattr(rows, "column_names"):
        import pyarrow.compute as pc

        table: pa.Table = rows
        lacking = table.filter(reduce(pc.or_, (table.column(name).is_null() for name in key)))
        lacking = lacking.sort_by([(PARTITION, "ascending"), (OFFSET, "ascending")]).slice(0, limit)
        return list(zip(*(lacking.column(name).to_pylist() for name in (PARTITION, OFFSET)), strict=True))
    frame: DataFrame = rows
    nulls = reduce(or_, (column(name).isNull() for name in key))
    places = frame.where(nulls).select(PARTITION, OFFSET).orderBy(PARTITION, OFFSET).limit(limit).collect()
    return [(row[0], row[1]) for row in places]
