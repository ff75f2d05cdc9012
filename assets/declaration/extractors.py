"""Extractors turn records into a dataset's entries (SAMZA-1278, "Key and Value").

Without an extractor, an entry is the record itself. `Projection` computes columns with Spark
expressions, `PythonExtractor` calls a function on each record.

Tombstones have a key but no value, so they bypass the extractor. If it passes the dataset's key
columns on unchanged, a tombstone deletes the entry of its key. If the key is computed, it is
unknown which entry a tombstone deletes, and a version with one is rejected.

In a change stream, a record without entries deletes the earlier entry: it becomes a tombstone if
the key is passed on. If the key is computed, the earlier entry stays.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial, reduce
from importlib import import_module
from operator import and_
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast, runtime_checkable

from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    DatasetError,
    SchemaMismatchError,
)
from dagster_adjunct.resources.lazy_modules import F, pa
from dagster_adjunct.resources.schemas.equality import comparable_value
from dagster_adjunct.resources.schemas.evolution import is_widening
from dagster_adjunct.resources.schemas.exact_values import (
    NestedValueError,
    is_missing,
    to_exact_array,
)
from dagster_adjunct.resources.schemas.paths import path_expression
from dagster_adjunct.resources.schemas.schema import Field, Schema, quote_name
from dagster_adjunct.resources.schemas.types import (
    arrow_type,
    decimal_digits,
    is_nested,
    type_from_spark,
)
from dagster_adjunct.resources.schemas.values import first_unreadable, python_rows
from dagster_adjunct.resources.spark.tasks import (
    convert_in_tasks,
    first_message_line,
    names_by_position,
)
from dagster_adjunct.resources.sql.expression import parse_expression
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION, TOMBSTONE
from dagster_adjunct.resources.user_code import failing_line
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

UNDECIDED = "__undecided"
"""The metadata column that says which records lack the columns of the condition: as it was for
their entry, it stays.
"""
_DIGITS = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 19}
_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@validated
@runtime_checkable
class KeyValueExtractor(Protocol):
    """Turns input records into entries: none, one or several for each record.

    Extractors are frozen values, comparable and picklable. The manifest stores `describe()`.
    """

    def schema(self, records: Schema, what: str) -> Schema:
        """Return the columns of the entries; `what` names the dataset in errors. Raises
        SchemaMismatchError.
        """
        ...

    def keeps(self, columns: Sequence[str]) -> bool:
        """Return whether entries always have their record's own values in these columns.

        If these are the dataset's key, a tombstone says which entry to delete.
        """
        ...

    def apply(self, records: DataFrame, schema: Schema, what: str) -> DataFrame:
        """Return entries with the columns of `schema`; metadata columns, which begin with `__`,
        pass through.

        A tombstone stays one: the columns that are passed on have its values, the others are null.
        Raises DatasetError for an error in the extractor itself, and SchemaMismatchError, which
        rejects the version, for an error in the records. A change without entries is dropped: to
        delete the earlier entry, return a tombstone.
        """
        ...

    def describe(self) -> str:
        """Return a one-line description that is the same in every process: no addresses such as
        `<f at 0x…>`.
        """
        ...


@validated
@dataclass(frozen=True, slots=True)
class Projection:
    """Makes entries with the columns `columns` ("tailnum STRING, seats INT") from the records that
    satisfy `where`.

    `select` has a Spark SQL expression for each computed column. The other columns are copied from
    the record. The type of an expression must be the declared one, or fit into it without loss.

    In an unbounded dataset, a change that does not satisfy `where` deletes the entry of its key,
    provided that the key is copied from the record. If `select` computes the key, the entry to
    delete is unknown, so it stays.
    """

    columns: str
    select: Mapping[str, str] | tuple[tuple[str, str], ...] = ()
    where: str | None = None

    def __post_init__(self) -> None:
        # As pairs, so that projections are comparable, hashable and picklable.
        pairs = self.select.items() if isinstance(self.select, Mapping) else self.select
        object.__setattr__(self, "select", tuple((str(name), str(value)) for name, value in pairs))
        declared = Schema.from_ddl(self.columns, "a projection").names
        for name in self._computed:
            if name not in declared:
                raise ConfigurationError(
                    f"a projection computes {name!r}, which is not among its columns"
                    f" {', '.join(declared)}.",
                    "Name it in columns, with its type, or leave it out of select.",
                    argument="select",
                    column=name,
                )

    @property
    def _computed(self) -> dict[str, str]:
        """The expressions of the computed columns, by column."""
        return dict(self.select)

    def schema(self, records: Schema, what: str) -> Schema:
        declared = Schema.from_ddl(self.columns, what)
        for field in declared.fields:
            if field.name in self._computed:
                continue
            given = records.field(field.name, f"{what}: the record")
            if not is_assignable(given.type, field.type):
                raise SchemaMismatchError(
                    f"{what}: the projection declares {field.name} as {field.type}, the record"
                    f" has {given.type}.",
                    f"Declare it as {given.type}, or cast it in select.",
                    column=field.name,
                )
        return declared

    def record_columns(self, name: str, key: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the columns of the record that a column of the entry is made of.

        Columns that it copies to these of the `key` are left out: in all changes of an entry they
        are the same.
        """
        return self._list_columns(self._computed.get(name, quote_name(name)), key)

    def condition_columns(self, key: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the columns of the record that the condition reads, without those of the `key`."""
        if self.where is None:
            return ()
        return self._list_columns(self.where, key)

    def _list_columns(self, text: str, key: Sequence[str]) -> tuple[str, ...]:
        """Return the columns that an expression reads, without those of the key that are kept as
        they are.
        """
        copied = {name.lower() for name in key if self.keeps([name])}
        by_lower_name: dict[str, str] = {}
        for column in parse_expression(text).columns:
            if column.name.lower() not in copied:
                by_lower_name.setdefault(column.name.lower(), column.name)
        return tuple(by_lower_name.values())

    def problem_with_missing_columns(self, key: Sequence[str], *, in_any_order: bool) -> str:
        """Return why it can't be applied to records that lack columns; "" if it can. It can't if
        an expression hides which columns it reads.

        The condition of a record may come to hold by a change that lacks other columns of the row.
        By offset, such a change is known to be incomplete. `in_any_order`, it can't be told from
        one whose row is yet to come, so the condition must not change: it reads columns of the
        `key` only.
        """
        for name, text in self._computed.items():
            expression = parse_expression(text)
            if expression.unread or expression.star:
                return f"the expression for {name!r} can't be parsed"
        if self.where is None:
            return ""
        expression = parse_expression(self.where)
        if expression.unread or expression.star:
            return f"its condition ({self.where}) can't be parsed"
        columns = self.condition_columns(key)
        if in_any_order and columns:
            return (
                f"its condition ({self.where}) reads {', '.join(map(repr, columns))}, and a change"
                " that makes it true may leave out what the row had before"
            )
        return ""

    def keeps(self, columns: Sequence[str]) -> bool:
        computed = self._computed
        return all(computed.get(name, name) in (name, quote_name(name)) for name in columns)

    def apply(self, records: DataFrame, schema: Schema, what: str) -> DataFrame:
        if self.where is not None:
            records = records.where(F.col(TOMBSTONE) | self._passes(records, self.where, what))
        return self._make_entries(records, schema, what)

    def apply_to_changes(
        self, records: DataFrame, schema: Schema, what: str, key: Sequence[Sequence[str]]
    ) -> DataFrame:
        """Return the entries of `apply`, and a tombstone for each record that does not satisfy
        `where` and has all values of the key, which are at these steps.
        """
        if self.where is not None:
            has_key = reduce(and_, [F.expr(path_expression(steps)).isNotNull() for steps in key])
            tombstone = (  # null for records to leave out
                F.when(F.col(TOMBSTONE), True)
                .when(self._passes(records, self.where, what), False)
                .when(has_key, True)
            )
            records = records.withColumn(TOMBSTONE, tombstone).where(F.col(TOMBSTONE).isNotNull())
        return self._make_entries(records, schema, what)

    @property
    def needs_spark(self) -> bool:
        """Whether it has expressions, which only Spark evaluates."""
        return bool(self.select) or self.where is not None

    def apply_arrow(
        self, records: pa.Table, schema: Schema, what: str, deleting: Sequence[Sequence[str]] = ()
    ) -> pa.Table:
        """Return the entries of records in Arrow, for a projection without expressions. Every
        record has an entry then, so none becomes a tombstone of the key at the steps `deleting`.
        """
        columns = {}
        for field in schema.fields:
            columns[field.name] = records.column(field.name).cast(arrow_type(field.type))
        for name in metadata_columns(records.column_names):
            columns[name] = records.column(name)
        return pa.table(columns)

    def _passes(self, records: DataFrame, where: str, what: str) -> Column:
        """Return the condition `where`, true also for undecided records. Raises DatasetError for
        one that Spark can't plan.
        """
        from pyspark.errors import PySparkException

        try:  # without a result: Spark plans the condition here, and raises
            records.where(F.col(TOMBSTONE) | F.expr(where))
        except PySparkException as error:
            raise _planning_error(what, "where", where, error) from error
        passes = F.expr(where)
        if UNDECIDED in records.columns:
            passes = F.col(UNDECIDED) | passes
        return passes

    def _make_entries(self, records: DataFrame, schema: Schema, what: str) -> DataFrame:
        """Return the entries of the records. In tombstones, computed columns are null.

        Raises DatasetError for an expression that can't be planned, or has another type than is
        declared.
        """
        from pyspark.errors import PySparkException

        tombstone = F.col(TOMBSTONE)
        computed = self._computed
        expressions = {name: F.expr(computed.get(name, quote_name(name))) for name in schema.names}
        try:
            planned = records.select(*expressions.values()).schema.fields
        except PySparkException:
            for name, expression in expressions.items():  # one by one, to find the one that failed
                try:
                    records.select(expression)
                except PySparkException as error:
                    raise _planning_error(
                        what, f"the expression for {name!r}", computed[name], error
                    ) from error
            raise
        columns = []
        for field, given in zip(schema.fields, planned, strict=True):
            kind = type_from_spark(given.dataType)
            expression = expressions[field.name]
            if not is_assignable(kind, field.type):
                raise DatasetError(
                    f"{what}: the projection declares {field.name} as {field.type}, but "
                    f"{computed.get(field.name, field.name)!r} is {kind}.",
                    f"Declare it as {kind}, or cast it in the expression.",
                    column=field.name,
                )
            if not self.keeps([field.name]):
                expression = F.when(~tombstone, expression)
            columns.append(expression.cast(field.type).alias(field.name))
        return records.select(*columns, *metadata_columns(records.columns))

    def describe(self) -> str:
        computed = [f"{value} AS {quote_name(name)}" for name, value in self._computed.items()]
        parts = (f"projection ({self.columns})", ", ".join(computed), self.where)
        return "; ".join(filter(None, parts))


@validated
@dataclass(frozen=True, slots=True)
class PythonExtractor:
    """Entries that a Python function returns: none, one or several for each record.

    `factory` is "package.module:name". It is called without arguments in each task and returns the
    function, which takes a record as a dict and returns its entries, an iterable of dicts with
    exactly the columns of `columns` ("tailnum STRING, seats INT"). Values must have their column's
    type: nothing is parsed, rounded or truncated. The module is imported where the tasks run.
    `unchanged` are columns that the function passes on from the record unchanged, which is checked.
    Errors show no values of `sensitive` columns, which include those of the dataset, nor the
    message of the function's own error if there are any.

    In an unbounded dataset a change without entries deletes the entry of its key, if `unchanged`
    has the whole key. If the function computes the key, the entries of an earlier change are
    unknown, and stay until a change writes or deletes them by their own key.
    """

    factory: str
    columns: str
    unchanged: tuple[str, ...] = ()
    sensitive: tuple[str, ...] = ()

    needs_spark: ClassVar[bool] = False  # the function can be called in this process

    def __post_init__(self) -> None:
        if not _FACTORY.fullmatch(self.factory):
            raise ConfigurationError(
                f"a Python extractor has the factory {self.factory!r}: expected"
                " package.module:name.",
                "Name a function that can be imported where the tasks run.",
                argument="factory",
            )
        declared = Schema.from_ddl(self.columns, f"extractor {self.factory}")
        for name in self.unchanged:
            declared.field(name, f"extractor {self.factory}")

    def schema(self, records: Schema, what: str) -> Schema:
        declared = Schema.from_ddl(self.columns, what)
        for name in self.unchanged:
            given = records.field(name, f"{what}: the record")
            field = declared.field(name)
            if given.type != field.type:
                raise SchemaMismatchError(
                    f"{what}: extractor {self.factory} declares {name} as unchanged and as"
                    f" {field.type}, but in the record it is {given.type}.",
                    f"Declare it as {given.type}.",
                    column=name,
                )
        return declared

    def keeps(self, columns: Sequence[str]) -> bool:
        return set(columns) <= set(self.unchanged)

    def apply(self, records: DataFrame, schema: Schema, what: str) -> DataFrame:
        return self.apply_to_changes(records, schema, what, ())

    def apply_to_changes(
        self, records: DataFrame, schema: Schema, what: str, key: Sequence[Sequence[str]]
    ) -> DataFrame:
        """Return the entries of `apply`, and a tombstone for each record that has no entries and
        has all values of the key, which are at these steps.
        """
        load_function(self, what)  # fail here instead of in every task
        declared = Schema.from_ddl(self.columns, what)
        metadata = metadata_columns(records.columns)
        columns = [(field.name, field.type) for field in declared.fields]
        columns += [(name, type_from_spark(records.schema[name].dataType)) for name in metadata]
        names = records.columns
        extract = partial(
            _extract, extractor=self, names=names, schema=declared, what=what, deleting=tuple(key)
        )
        entries = convert_in_tasks(records, extract, columns)
        return entries.select(*map(quote_name, schema.names), *metadata)

    def apply_arrow(
        self, records: pa.Table, schema: Schema, what: str, deleting: Sequence[Sequence[str]] = ()
    ) -> pa.Table:
        """Return the entries of records in Arrow, from calls of the function in this process.

        A record without entries becomes a tombstone if it has all values of the key, which are at
        the steps `deleting`.
        """
        declared = Schema.from_ddl(self.columns, what)
        names = records.column_names
        batches = records.combine_chunks().to_batches(max_chunksize=_BATCH) or [
            pa.RecordBatch.from_pylist([], schema=records.schema)
        ]
        entries = pa.Table.from_batches(
            list(_extract(iter(batches), self, names, declared, what, deleting))
        )
        metadata = metadata_columns(names)
        return entries.rename_columns([*declared.names, *metadata]).select(
            [*schema.names, *metadata]
        )

    def describe(self) -> str:
        return f"{self.factory} ({self.columns})"


def mask_columns(extractor: KeyValueExtractor, sensitive: Sequence[str]) -> KeyValueExtractor:
    """Return a PythonExtractor whose errors also mask values of these columns; other extractors
    unchanged.
    """
    if not isinstance(extractor, PythonExtractor) or not sensitive:
        return extractor
    return replace(extractor, sensitive=tuple(dict.fromkeys((*extractor.sensitive, *sensitive))))


def is_assignable(given: str, declared: str) -> bool:
    """Whether every value of the given type can be stored as the declared type without loss.

    That is so if Spark reads the one as the other, for a column of nulls only ("void"), and for
    integers whose digits fit into the float or decimal.
    """
    if given == "void" or is_widening(given, declared):
        return True
    decimal = decimal_digits(declared)
    if decimal is not None:
        precision, scale = decimal
        return given in _DIGITS and _DIGITS[given] <= precision - scale
    return declared == "float" and given in ("tinyint", "smallint")


def metadata_columns(names: Sequence[str]) -> list[str]:
    """Return the metadata columns among these: META and further ones, which all begin with `__`."""
    return [name for name in names if name.startswith("__")]


def _planning_error(what: str, part: str, expression: str, error: Exception) -> DatasetError:
    """Return the error for an expression of a projection that Spark can't plan."""
    return DatasetError(
        f"{what}: {part} of the projection, {expression!r}, can't be planned:"
        f" {first_message_line(error)}",
        "Correct the expression: it must be Spark SQL over the record's columns, without"
        " aggregates.",
        function=expression,
    )


Function = Callable[[dict[str, Any]], Iterable[dict[str, Any]]]
_CLASSES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "float": (float, int),
    "double": (float, int),
    "date": (dt.date,),
    "timestamp": (dt.datetime,),
    "binary": (bytes, bytearray),
}
_BATCH = 65_536


def load_function(extractor: PythonExtractor, what: str) -> Function:
    """Import the factory and return its function. Raises ConfigurationError."""
    module, _, path = extractor.factory.partition(":")
    try:
        factory = reduce(getattr, path.split("."), import_module(module))
        function = None
        if callable(factory):
            function = factory()
    except AdjunctError:
        raise
    except Exception as error:  # the user's code
        if isinstance(error, ImportError | AttributeError | SyntaxError):
            failed = "can't be imported"
        else:
            failed = "failed"
        raise ConfigurationError(
            f"{what}: the extractor's factory {extractor.factory} {failed} ({type(error).__name__}:"
            f" {error}).",
            "Correct the name or the module, and install the module on all machines that run"
            " tasks.",
            argument="factory",
        ) from error
    if not callable(function):
        raise ConfigurationError(
            f"{what}: the extractor's factory {extractor.factory} returns"
            f" {type(function).__name__}: expected a function of a record.",
            "Return the function that takes a record and returns its entries.",
            argument="factory",
        )
    return cast(Function, function)


def _extract(
    batches: Iterator[pa.RecordBatch],
    extractor: PythonExtractor,
    names: list[str],
    schema: Schema,
    what: str,
    deleting: Sequence[Sequence[str]] = (),
) -> Iterator[pa.RecordBatch]:
    """Yield the entries of these records: the columns of `schema`, then the metadata columns.

    `names` are the records' columns in order. A record without entries becomes a tombstone if none
    of its values at the steps `deleting`, which are the key, is null.
    """
    calls = _FunctionCalls(extractor, schema, what, load_function(extractor, what))
    for batch in batches:
        table = pa.Table.from_batches([batch]).rename_columns(names)
        columns = calls.entry_columns(table, deleting)
        yield pa.RecordBatch.from_arrays(columns, names_by_position(columns))


@dataclass(frozen=True, slots=True)
class _FunctionCalls:
    """Calls an extractor's function and checks what it returns; `schema` are the entries' columns.

    `what` names the dataset in errors.
    """

    extractor: PythonExtractor
    schema: Schema
    what: str
    function: Function

    def entry_columns(self, records: pa.Table, deleting: Sequence[Sequence[str]]) -> list[pa.Array]:
        """Return the columns of the entries, then their metadata columns, which are those of their
        records, except for TOMBSTONE.

        A record becomes a tombstone if it has no entries, and has all values of the key, which are
        at the steps `deleting`; without steps, none does.
        """
        metadata = records.select([PARTITION, OFFSET, TOMBSTONE]).to_pylist()
        wheres = [*map(self._describe_place, metadata)]
        data = [name for name in records.column_names if not name.startswith("__")]
        unreadable = first_unreadable(records, data)
        if unreadable is not None:
            where = _describe_record(metadata[unreadable.row])
            raise unreadable.error(self.what, where, hidden=self._is_hidden(unreadable.column))
        entries: list[dict[str, Any]] = []
        origins: list[int] = []  # the row of each entry's record
        tombstones: list[bool] = []
        for row, record in enumerate(python_rows(records.select(data))):
            extracted = []
            is_deleted = bool(metadata[row][TOMBSTONE])
            if not is_deleted:
                extracted = self._call(record, wheres[row])
                has_key = bool(deleting) and None not in [
                    _value_at(record, steps) for steps in deleting
                ]
                is_deleted = has_key and not extracted
            if is_deleted:
                extracted = [self._deleted_entry(record)]
            tombstones.append(is_deleted)
            entries += extracted
            origins += [row] * len(extracted)
        index = records.column_names.index(TOMBSTONE)
        marked = records.set_column(index, TOMBSTONE, pa.array(tombstones, pa.bool_()))
        metadata_rows = marked.select(metadata_columns(records.column_names))
        columns = []
        places = [wheres[row] for row in origins]
        for field in self.schema.fields:
            columns.append(self._column([entry[field.name] for entry in entries], field, places))
        for column in metadata_rows.take(pa.array(origins, pa.int64())).columns:
            columns.append(column.combine_chunks())
        return columns

    def _deleted_entry(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return the entry of a tombstone, which has the columns that are passed on."""
        entry = dict.fromkeys(self.schema.names)
        for name in self.extractor.unchanged:
            if name in entry:
                entry[name] = record[name]
        return entry

    def _call(self, record: dict[str, Any], where: str) -> list[dict[str, Any]]:
        """Return the entries of a record. Raises DatasetError for an error of the function, or a
        result that is not as declared.
        """
        unchanged = {name: record[name] for name in self.extractor.unchanged}
        try:
            returned = self.function(record)
            entries: list[Any] | None = None
            is_one_value = isinstance(returned, dict | str | bytes)
            if isinstance(returned, Iterable) and not is_one_value:
                entries = list(returned)
        except Exception as error:
            raise self._failure(error, where) from error
        if entries is None:
            shown = _describe_value(returned, bool(self.extractor.sensitive))
            raise self._violation(
                where, shown, f"an iterable of dicts with {_describe_columns(self.schema)}"
            )
        for entry in entries:
            self._check_entry(entry, unchanged, where)
        return entries

    def _failure(self, error: Exception, where: str) -> DatasetError:
        """Return the error for one that the function raised."""
        # The message may contain values of the record.
        if self.extractor.sensitive:
            text = "the message is not shown, because columns are sensitive"
        else:
            text = str(error)
        line = failing_line(error)
        if line is not None:
            text += f" ({line.describe()})"
        factory = self.extractor.factory
        return DatasetError(
            f"{where}: extractor {factory} failed: {type(error).__name__}: {text}.",
            "Fix the function or the record, and run it again: nothing was published.",
            function=factory,
        )

    def _check_entry(self, entry: Any, unchanged: dict[str, Any], where: str) -> None:
        """Raise DatasetError unless an entry has just the declared columns, and these `unchanged`
        values of the record.
        """
        declared = f"a dict with {_describe_columns(self.schema)}"
        if not isinstance(entry, dict):
            shown = _describe_value(entry, bool(self.extractor.sensitive))
            raise self._violation(where, f"{shown} for an entry", declared)
        for name in self.schema.names:
            if name not in entry:
                given = ", ".join(map(repr, entry)) or "none"
                raise self._violation(
                    where, f"an entry without column {name!r}, with {given}", declared
                )
        for name in entry:
            if name not in self.schema:
                raise self._violation(
                    where, f"an entry with column {name!r}, which is not declared", declared
                )
        for name, value in unchanged.items():
            if not _is_equal(entry[name], value):
                hidden = self._is_hidden(name)
                raise self._violation(
                    where,
                    f"column {name!r} as {_describe_value(entry[name], hidden)}",
                    f"it unchanged, as {_describe_value(value, hidden)}",
                )

    def _column(self, values: list[Any], field: Field, places: list[str]) -> pa.Array:
        """Return the values of a column in its declared type. Raises DatasetError, which names the
        place of its record, for the first one that does not fit.
        """
        kind = arrow_type(field.type)
        for value, place in zip(values, places, strict=True):
            is_null = value is None or is_missing(value)
            if not is_null and not _has_type(field.type, value):
                raise self._misfit(place, field, value)
        try:
            return to_exact_array(values, kind)
        except (pa.ArrowException, OverflowError, ValueError):
            for value, place in zip(values, places, strict=True):  # find the value that failed
                try:
                    to_exact_array([value], kind)
                except NestedValueError as error:
                    raise self._inner_misfit(place, field, error) from None
                except (pa.ArrowException, OverflowError, ValueError) as error:
                    raise self._misfit(place, field, value) from error
            raise

    def _inner_misfit(self, where: str, field: Field, error: NestedValueError) -> DatasetError:
        """Return the error for a part of a nested value, by its path."""
        reason = "*** (sensitive)" if self._is_hidden(field.name) else error.reason
        returned = f"column '{field.name}{error.path}' with a value that does not fit: {reason}"
        return self._violation(where, returned, f"{field.name!r} as {field.type}")

    def _misfit(self, where: str, field: Field, value: Any) -> DatasetError:
        """Return the error for a value that does not fit its column."""
        shown = _describe_value(value, self._is_hidden(field.name))
        return self._violation(where, f"column {field.name!r} as {shown}", f"it as {field.type}")

    def _violation(self, where: str, returned: str, declared: str) -> DatasetError:
        """Return the error for a function that violates its declaration, which does not reject the
        version.
        """
        factory = self.extractor.factory
        return DatasetError(
            f"{where}: extractor {factory} returned {returned}: expected {declared}.",
            "Fix the function or its declaration, and run it again: nothing was published or"
            " rejected.",
            function=factory,
        )

    def _is_hidden(self, column: str) -> bool:
        """Whether errors must not show values of this column."""
        return column.lower() in map(str.lower, self.extractor.sensitive)

    def _describe_place(self, metadata: dict[str, Any]) -> str:
        """Return the dataset and where a record is, from its metadata columns."""
        return f"{self.what}: {_describe_record(metadata)}"


def _value_at(record: dict[str, Any], steps: Sequence[str]) -> Any:
    """Return the value at these steps, null in a null struct."""
    value: Any = record
    for step in steps:
        if value is not None:
            value = value[step]
    return value


def _is_equal(returned: Any, value: Any) -> bool:
    """Whether a returned value equals that of the record; NaN equals NaN. Arrays of NumPy, which
    have no single answer, do not.
    """
    try:
        if returned is value or bool(returned == value):
            return True
        if isinstance(value, dict | list):
            return bool(comparable_value(returned) == comparable_value(value))
        return bool(returned != returned) and value != value  # noqa: PLR0124
    except ValueError:  # the truth value of an array
        return False


def value_classes(kind: str) -> tuple[type, ...]:
    """Return the Python classes whose values are accepted for this type."""
    if kind.startswith("decimal"):
        return (Decimal, int)
    return _CLASSES.get(kind, (int,))


def _has_type(kind: str, value: Any) -> bool:
    """Whether a value that a function returned is of this type."""
    if is_nested(kind):
        return True  # its parts are checked when they are converted
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, dt.datetime):
        return kind == "timestamp" and value.utcoffset() is not None
    return isinstance(value, value_classes(kind))


def _describe_value(value: Any, hidden: bool) -> str:
    """Return a value that a function returned, with its Python type, for errors."""
    text = "*** (sensitive)" if hidden else repr(str(value)[:100])
    kind = type(value).__name__
    is_time = isinstance(value, dt.datetime) and not is_missing(value)
    if is_time and value.utcoffset() is None:
        kind += " without a zone"
    return f"the {kind} {text}"


def _describe_columns(schema: Schema) -> str:
    """Return columns with their types, for errors."""
    return ", ".join(f"{field.name} {field.type}" for field in schema.fields)


def _describe_record(metadata: dict[str, Any]) -> str:
    """Return where a record is, from its metadata columns."""
    return f"the record at offset {metadata[OFFSET]} of partition {metadata[PARTITION]}"
