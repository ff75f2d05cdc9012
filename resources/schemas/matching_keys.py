"""Finds which records have one of many keys, in Arrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import pa, pc
from dagster_adjunct.resources.schemas.arrow_values import cast_to
from dagster_adjunct.resources.schemas.paths import Path, require_path
from dagster_adjunct.resources.schemas.schema import Schema, check_key_types
from dagster_adjunct.resources.schemas.types import arrow_type, type_from_arrow


@dataclass(frozen=True, slots=True)
class WantedKeys:
    """Keys without null to find records by, each once; `paths` are the values of records that are
    compared with them.

    Keys are numbered one column after the other: `distinct` has the values of each column, and
    `prefixes` the numbers that the columns up to it make together, so that every number is less
    than the square of the number of keys.
    """

    paths: tuple[Path, ...]
    keys: pa.Table
    distinct: tuple[pa.Array, ...]
    prefixes: tuple[pa.Array, ...]

    @classmethod
    def of(cls, keys: pa.Table, types: Mapping[str, str], what: str) -> WantedKeys:
        """Return the rows of a table as keys; its columns are named as columns of these `types`, or
        as paths of values in them, and have their types.

        Raises ConfigurationError for a table without columns, and SchemaMismatchError for a name
        that does not exist, or another type; `what` names whose columns these are.
        """
        if not keys.num_columns:
            raise argument_error("the table of keys has no columns", "one or more", argument="keys")
        paths = tuple(require_path(name, types, what) for name in keys.column_names)
        check_key_types(Schema.of(dict(types)), keys.column_names, what)
        columns = []
        for path, field, column in zip(paths, keys.schema, keys.columns, strict=True):
            found = type_from_arrow(field)
            if found != path.type:
                problem = f"{what}: keys have {field.name!r} as {found}: expected {path.type}."
                step = "Cast the keys to the types of the columns that they are found by."
                raise SchemaMismatchError(problem, step, column=field.name)
            columns.append(cast_to(column, arrow_type(path.type)))
        present = pa.table(columns, names=keys.column_names).drop_null()
        unique = present.group_by(present.column_names).aggregate([]).combine_chunks()
        distinct = []
        prefixes: list[pa.Array] = []
        numbers = None
        for column in unique.columns:
            distinct.append(pc.unique(column))
            numbers = _number(column, distinct[-1], numbers)
            prefixes.append(pc.unique(numbers))
            numbers = pc.index_in(numbers, prefixes[-1])
        return cls(paths, unique, tuple(distinct), tuple(prefixes))

    def find(self, values: Sequence[pa.ChunkedArray]) -> pa.ChunkedArray:
        """Return whether each record has one of the keys; `values` are its values at the paths."""
        numbers = None
        for column, distinct, prefixes in zip(values, self.distinct, self.prefixes, strict=True):
            numbers = pc.index_in(_number(column, distinct, numbers), prefixes)
        return pc.is_valid(numbers)


def _number(column: Any, distinct: pa.Array, before: Any) -> Any:
    """Return the number of each value among the distinct ones, combined with the number `before` it
    (None for the first column); null for a value that is not among them.
    """
    place = pc.index_in(column, distinct).cast(pa.int64())
    if before is None:
        return place
    return pc.add(pc.multiply(before.cast(pa.int64()), len(distinct)), place)
