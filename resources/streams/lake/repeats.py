"""Repeated appends whose columns were renamed, dropped or widened since the first one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.bucketing.hashing import arrow_checksum, records_checksum
from dagster_adjunct.resources.lazy_modules import F, pa
from dagster_adjunct.resources.schemas.arrow_values import (
    cast_values,
    rename_columns,
    rename_values,
)
from dagster_adjunct.resources.schemas.evolution import is_widening
from dagster_adjunct.resources.schemas.records import fit_to_schema
from dagster_adjunct.resources.schemas.schema import (
    Schema,
    Steps,
    keep_steps,
    list_steps,
    named_column,
    quote_name,
    quote_text,
)
from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Struct,
    Type,
    arrow_type,
    is_same_family,
    parse_type,
    tree_from_spark,
    types_from_spark,
)
from dagster_adjunct.resources.streams.lake.manifest import OPTIONAL_META, LakeStreamDeclaration

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def is_table(data: Any) -> bool:
    """Whether records are a table of Arrow."""
    return type(data).__module__.startswith("pyarrow")  # without importing Arrow


@dataclass(frozen=True, slots=True)
class RepeatedAppend:
    """The columns of an append that is repeated, and those that the repeated records have.

    Both are the same columns of files, which may have been renamed in between.
    """

    before: LakeStreamDeclaration
    given: LakeStreamDeclaration

    def has_lost(self, retired: Collection[Steps]) -> bool:
        """Whether the records lack what they had at first, and has been dropped since."""
        stored = self.given.names.store(self.given.columns)
        first = self.before.names.store(self.before.columns)
        missing = list_steps(first) - list_steps(stored)
        return not missing.isdisjoint(retired)

    def without_lost(self, retired: Collection[Steps]) -> RepeatedAppend:
        """Return this with only those columns of the first append that the records have, too, and
        that were not dropped since.
        """
        there = list_steps(self.given.names.store(self.given.columns)) - set(retired)
        columns = keep_steps(self.before.columns, self.before.names, there)
        before = self.before.model_copy(update={"columns": columns})
        return RepeatedAppend(before, self.given)

    def checksum(self, data: Any, order_by: Sequence[str], what: str) -> str:
        """Return the checksum of the records with the columns of the first append."""
        translated = self._translate_renamed(data, order_by, what)
        if is_table(translated):
            return arrow_checksum(translated, self.before.columns)
        return records_checksum(translated, self.before.columns)

    def translate(self, data: Any, order_by: Sequence[str], what: str) -> Any:
        """Return the records with the columns, and their names, of the first append.

        If a value does not fit the earlier type, a Spark frame gets null for it; in an Arrow table
        the whole column stays as it is, and fails when it is written.
        """
        if self.before.names == self.given.names:
            return select_earlier_columns(data, self.before.columns, self.given.columns, order_by)
        return self._translate_renamed(data, order_by, what)

    def _translate_renamed(self, data: Any, order_by: Sequence[str], what: str) -> Any:
        """Return the records as `translate` does; columns are matched by their stored names, as
        some were renamed or dropped.
        """
        stored = self.given.names.store(self.given.columns)
        first = self.before.names.store(self.before.columns)
        if is_table(data):
            return self._translate_table(data, stored, first, what)
        return self._translate_frame(data, stored, first, order_by)

    def _translate_table(self, data: pa.Table, stored: Schema, first: Schema, what: str) -> Any:
        """Return a table with the columns of the first append. `stored` has the columns that the
        table has, `first` those of the first append, both under their stored names.
        """
        own = [name for name in data.column_names if name not in OPTIONAL_META]
        table = fit_to_schema(data.select(own), self.given.columns, what)
        table = rename_columns(table, stored.to_arrow())
        table = _narrow_table(table.select([n for n in first.names if n in stored]), first, stored)
        names = dict(zip(first.names, self.before.columns.names, strict=True))
        for place, name in enumerate(table.column_names):
            column = table.column(place)
            kind = self.before.columns.field(names[name]).type
            if column.type == arrow_type(first.field(name).type):  # else a value does not fit
                column = rename_values(column, arrow_type(kind))
            table = table.set_column(place, names[name], column)
        for name in data.column_names:
            if name in OPTIONAL_META:
                table = table.append_column(name, data.column(name))
        return table

    def _translate_frame(
        self, data: DataFrame, stored: Schema, first: Schema, order_by: Sequence[str]
    ) -> DataFrame:
        """Return a Spark frame with the columns of the first append; `stored` and `first` as in
        `_translate_table`.
        """
        types = {field.name: tree_from_spark(field.dataType) for field in data.schema.fields}
        columns = []
        for now, in_files in zip(self.given.columns.fields, stored.fields, strict=True):
            if in_files.name not in first or now.name not in types:
                continue  # who writes the records reports a missing column
            earlier = first.field(in_files.name)
            name = self.before.columns.names[first.names.index(in_files.name)]
            wanted = self.before.columns.field(name).type
            value = fitted_value_sql(quote_name(now.name), types[now.name], parse_type(now.type))
            value = f"CAST({value} AS {in_files.type})"  # renames members by their places
            kinds = (parse_type(in_files.type), parse_type(earlier.type))
            value = fitted_value_sql(value, *kinds, "TRY_CAST")
            columns.append(F.expr(f"CAST({value} AS {wanted})").alias(name))
        for name in types:
            if name in OPTIONAL_META or (name in order_by and name not in self.before.columns):
                columns.append(named_column(name))
        return data.select(*columns)


def select_earlier_columns(data: Any, before: Schema, now: Schema, order_by: Sequence[str]) -> Any:
    """Return the records with the columns `before` of their first append, so that the two can be
    compared. `now` are the stream's columns.

    If a value does not fit the earlier type, a Spark frame gets null for it; in an Arrow table the
    whole column stays as it is, and fails when it is written.
    """
    names = {*before.names, *OPTIONAL_META, *order_by}
    if is_table(data):
        table = data.select([name for name in data.column_names if name in names])
        return _narrow_table(table, before, now)
    types = types_from_spark(data.schema)
    columns = [_narrow_column(name, types[name], before) for name in types if name in names]
    return data.select(*columns)


def _narrow_table(table: pa.Table, before: Schema, now: Schema) -> pa.Table:
    """Return the table with the types `before` of its columns; a column stays as it is if a value
    does not fit, or if its type can't be sent as that of `now`.
    """
    for place, name in enumerate(table.column_names):
        column = table.column(place)
        if name in before and is_same_family(column.type, arrow_type(now.field(name).type)):
            with suppress(pa.ArrowInvalid):
                narrow = cast_values(column, before.field(name).type)
                table = table.set_column(place, name, narrow)
    return table


def _narrow_column(name: str, given: str, before: Schema) -> Column:
    """Return a column of the type `given`; if it was narrower in the first append, as that type,
    with null for values that do not fit.
    """
    if name not in before:
        return named_column(name)
    kind = before.field(name).type
    if kind == given or not is_widening(kind, given):
        return named_column(name)
    types = (parse_type(given), parse_type(kind))
    return F.expr(fitted_value_sql(quote_name(name), *types, "TRY_CAST")).alias(name)


def fitted_value_sql(
    value: str, given: Type, wanted: Type, cast: str = "CAST", depth: int = 0
) -> str:
    """Return the SQL of a value of type `given`, whose SQL is `value`, as one of type `wanted`.

    Members of structs are found by their names, and null where missing, unlike in Spark's casts of
    structs. Simple values are converted by `cast`. `depth` is the number of functions around it.
    """
    if given == wanted:
        return value
    if isinstance(wanted, Struct) and isinstance(given, Struct):
        members = []
        for member in wanted.members:
            found = given.member(member.name)
            if found is None:
                part = f"CAST(NULL AS {member.type})"
            else:
                name = f"{value}.{quote_name(member.name)}"
                part = fitted_value_sql(name, found.type, member.type, cast, depth)
            members.append(f"{quote_text(member.name)}, {part}")
        return f"CASE WHEN {value} IS NOT NULL THEN named_struct({', '.join(members)}) END"
    one = f"__v{depth}"
    if isinstance(wanted, Array) and isinstance(given, Array):
        part = fitted_value_sql(one, given.element, wanted.element, cast, depth + 1)
        return f"transform({value}, {one} -> {part})"
    if isinstance(wanted, Map) and isinstance(given, Map):
        part = fitted_value_sql(one, given.value, wanted.value, cast, depth + 1)
        return f"transform_values({value}, (__k, {one}) -> {part})"
    return f"{cast}({value} AS {wanted})"
