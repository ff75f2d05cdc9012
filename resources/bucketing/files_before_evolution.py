"""Files that were written when a layout had fewer or narrower columns, read as it is now.

Only layouts with hidden columns, those of streams and of change streams' tables, outlive their files' columns: a
version of a bounded dataset is written at once. Keys never change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import AdjunctError
from dagster_adjunct.resources.schemas.schema import Schema, widens

if TYPE_CHECKING:
    import pyarrow as pa

    from dagster_adjunct.resources.bucketing.bucket_files import BucketLayout


def columns_problem(stored: pa.Schema, layout: BucketLayout) -> str:
    """Return why columns can't be read as those of the layout, "" where they can."""
    wanted = layout.arrow_schema()
    if stored.remove_metadata().equals(wanted):
        return ""
    fixed = {*layout.key, *layout.bucket_by, *(name for name, _ in layout.hidden)}
    fits = bool(layout.hidden) and len(set(stored.names)) == len(stored.names) and fixed <= set(stored.names)
    for field in stored:
        index = wanted.get_field_index(field.name)
        fits = fits and index >= 0 and (
            field.type == wanted.field(index).type or (field.name not in fixed and _widens(field, wanted.field(index)))
        )  # fmt: skip
    return "" if fits else f"its columns are {', '.join(f'{field.name} {field.type}' for field in stored)}"


def as_laid_out(table: pa.Table, layout: BucketLayout) -> pa.Table:
    """Return rows with the columns of the layout: added ones are null, widened ones cast.

    Raises pyarrow's ArrowInvalid for columns that can't be read so.
    """
    import pyarrow as pa

    wanted = layout.arrow_schema()
    if table.schema.equals(wanted):
        return table
    problem = columns_problem(table.schema, layout)
    if problem:
        raise pa.ArrowInvalid(problem)
    there = set(table.schema.names)
    columns = [
        table.column(field.name).cast(field.type) if field.name in there else pa.nulls(table.num_rows, field.type)
        for field in wanted
    ]
    return pa.table(columns, schema=wanted)


def _widens(narrow: pa.Field, wide: pa.Field) -> bool:
    import pyarrow as pa

    try:
        (was,), (now,) = (Schema.from_arrow(pa.schema([field])).fields for field in (narrow, wide))
    except AdjunctError:
        return False
    return widens(was.type, now.type)
