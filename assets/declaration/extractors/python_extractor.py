"""Runs a PythonExtractor's function in Spark's tasks, over Arrow batches; errors say which record they are of."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import ConfigurationError, DatasetError
from dagster_adjunct.resources.schemas.exact_array import exact_array, is_missing
from dagster_adjunct.resources.schemas.readable_values import first_unreadable
from dagster_adjunct.resources.schemas.schema import Field, Schema, arrow_type
from dagster_adjunct.resources.spark.spark_errors import wrapped
from dagster_adjunct.resources.streams.interface.stream_system import OFFSET, PARTITION, TOMBSTONE

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from dagster_adjunct.assets.declaration.extractors.extractor import PythonExtractor

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
_DECIMAL, _INTEGER = (Decimal, int), (int,)


def extracted(
    records: DataFrame, extractor: PythonExtractor, schema: Schema, what: str, deleting: tuple[str, ...] = ()
) -> DataFrame:
    """Return the entries of these records, with all columns of `schema` and those of the records that begin `__`.

    A record that makes none becomes a tombstone, where it has all columns of the key `deleting`.
    """
    from pyspark.sql import functions as F

    load(extractor, what)  # a name that can't be imported here will not be in a task either: say so without one
    names = records.columns
    by_position = records.toDF(*[f"c{index}" for index in range(len(names))])
    marks = _marks(names)
    given = [*schema.names, *marks]
    types = [field.type for field in schema.fields] + [records.schema[name].dataType.simpleString() for name in marks]
    ddl = ", ".join(f"c{index} {kind}" for index, kind in enumerate(types))
    frame = by_position.mapInArrow(_task(extractor, names, schema, what, deleting), ddl)
    return frame.select(*[F.col(f"c{index}").alias(name) for index, name in enumerate(given)])


def extracted_arrow(
    records: pa.Table, extractor: PythonExtractor, schema: Schema, what: str, deleting: tuple[str, ...] = ()
) -> pa.Table:
    """Return what `extracted` does, of records in Arrow."""
    import pyarrow as pa

    names = records.column_names
    batches = records.combine_chunks().to_batches(max_chunksize=_BATCH) or [
        pa.RecordBatch.from_pylist([], schema=records.schema)
    ]
    made = list(_entries(iter(batches), extractor, names, schema, what, deleting))
    return pa.Table.from_batches(made).rename_columns([*schema.names, *_marks(names)])


def load(extractor: PythonExtractor, what: str) -> Function:
    """Import the factory and return the function that it makes. Raises ConfigurationError."""
    module, _, path = extractor.factory.partition(":")
    try:
        factory = reduce(getattr, path.split("."), import_module(module))
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"{what}: the extractor's factory {extractor.factory} can't be imported ({error}).",
            "Correct the name, and install the module wherever tasks run.",
            argument="factory",
        ) from error
    function = factory() if callable(factory) else None
    if not callable(function):
        raise ConfigurationError(
            f"{what}: the extractor's factory {extractor.factory} gives {type(function).__name__}: expected a "
            "function of a record.",
            "Return the function that takes a record and returns its entries.",
            argument="factory",
        )
    made: Function = function
    return made


def _task(
    extractor: PythonExtractor, names: list[str], schema: Schema, what: str, deleting: tuple[str, ...]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(batches: Iterator[Any]) -> Iterator[Any]:
        return wrapped(_entries(batches, extractor, names, schema, what, deleting))

    return run


def _entries(
    batches: Iterator[pa.RecordBatch],
    extractor: PythonExtractor,
    names: list[str],
    schema: Schema,
    what: str,
    deleting: tuple[str, ...] = (),
) -> Iterator[pa.RecordBatch]:
    function = load(extractor, what)
    data = [name for name in names if not name.startswith("__")]
    for batch in batches:
        table = _named(batch, names)
        taken: list[int] = []
        entries: list[dict[str, Any]] = []
        marks = table.select([PARTITION, OFFSET, TOMBSTONE]).to_pylist()
        if (found := first_unreadable(table, data)) is not None:
            raise found.error(what, _place(marks[found.row]), hidden=_is_hidden(found.column, extractor))
        for row, record in enumerate(table.select(data).to_pylist()):
            made: list[dict[str, Any]] = []
            if not marks[row][TOMBSTONE]:
                made = _called(function, record, extractor, schema, f"{what}: {_place(marks[row])}")
                marks[row][TOMBSTONE] = not made and deleting and all(record[name] is not None for name in deleting)
            if marks[row][TOMBSTONE]:
                made = [{name: record[name] if name in extractor.unchanged else None for name in schema.names}]
            entries += made
            taken += [row] * len(made)
        places = [f"{what}: {_place(marks[row])}" for row in taken]
        if deleting:
            table = _marked(table, [bool(mark[TOMBSTONE]) for mark in marks])
        yield _batch(table, taken, entries, schema, extractor, places)


def _marks(names: list[str]) -> list[str]:
    """Return the columns that go with records and are not theirs: META, and others that begin with `__`."""
    return [name for name in names if name.startswith("__")]


def _named(batch: pa.RecordBatch, names: list[str]) -> pa.Table:
    import pyarrow as pa

    return pa.Table.from_batches([batch]).rename_columns(names)


def _marked(table: pa.Table, tombstones: list[bool]) -> pa.Table:
    import pyarrow as pa

    return table.set_column(table.column_names.index(TOMBSTONE), TOMBSTONE, pa.array(tombstones, pa.bool_()))


def _called(
    function: Function, record: dict[str, Any], extractor: PythonExtractor, schema: Schema, where: str
) -> list[dict[str, Any]]:
    kept = {name: record[name] for name in extractor.unchanged}
    try:
        made = function(record)
        iterable = isinstance(made, Iterable) and not isinstance(made, dict | str | bytes)
        entries = list(made) if iterable else []
    except Exception as error:
        # What the function says may hold any value of the record, whole or in parts.
        text = "what it says is left out, because columns are sensitive" if extractor.sensitive else str(error)
        raise DatasetError(
            f"{where}: extractor {extractor.factory} failed: {type(error).__name__}: {text}{_line(error)}.",
            "Correct the function or the record, and run it again: nothing was published.",
            function=extractor.factory,
        ) from error
    if not iterable:
        raise _mistaken(
            extractor.factory,
            where,
            f"returned {_told(made, bool(extractor.sensitive))}",
            f"an iterable of dicts with {_all(schema)}",
        )
    for entry in entries:
        _check_entry(entry, kept, extractor, schema, where)
    return entries


def _check_entry(entry: Any, kept: dict[str, Any], extractor: PythonExtractor, schema: Schema, where: str) -> None:
    returned, declared = "", f"a dict with {_all(schema)}"
    if not isinstance(entry, dict):
        returned = f"{_told(entry, bool(extractor.sensitive))} for an entry"
    elif missing := [name for name in schema.names if name not in entry]:
        returned = f"an entry without column {missing[0]!r}, with {', '.join(map(repr, entry)) or 'none'}"
    elif extra := [name for name in entry if name not in schema]:
        returned = f"an entry with column {extra[0]!r}, which is not declared"
    elif other := [name for name, value in kept.items() if entry[name] != value]:
        hidden = _is_hidden(other[0], extractor)
        returned = f"column {other[0]!r} as {_told(entry[other[0]], hidden)}"
        declared = f"it unchanged, as {_told(kept[other[0]], hidden)}"
    if returned:
        raise _mistaken(extractor.factory, where, f"returned {returned}", declared)


def _batch(
    table: pa.Table,
    taken: list[int],
    entries: list[dict[str, Any]],
    schema: Schema,
    extractor: PythonExtractor,
    places: list[str],
) -> pa.RecordBatch:
    import pyarrow as pa

    columns = [_column([entry[field.name] for entry in entries], field, extractor, places) for field in schema.fields]
    marks = table.select(_marks(table.column_names)).take(pa.array(taken, pa.int64())).combine_chunks()
    columns += [_one(column) for column in marks.columns]
    return pa.RecordBatch.from_arrays(columns, [f"c{index}" for index in range(len(columns))])


def _one(column: pa.ChunkedArray) -> pa.Array:
    import pyarrow as pa

    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _column(values: list[Any], field: Field, extractor: PythonExtractor, places: list[str]) -> pa.Array:
    import pyarrow as pa

    kind = arrow_type(field.type)
    for value, place in zip(values, places, strict=True):
        if value is not None and not _is(field.type, value) and not is_missing(value):
            raise _unfit(place, field, extractor, value)
    try:
        return exact_array(values, kind)
    except (pa.ArrowException, OverflowError, ValueError):
        for value, place in zip(values, places, strict=True):
            try:
                exact_array([value], kind)
            except (pa.ArrowException, OverflowError, ValueError) as error:
                raise _unfit(place, field, extractor, value) from error
        raise


def _is(kind: str, value: Any) -> bool:
    classes = _DECIMAL if kind.startswith("decimal") else _CLASSES.get(kind, _INTEGER)
    if not isinstance(value, classes) or (isinstance(value, bool) and kind != "boolean"):
        return False
    if isinstance(value, dt.datetime):
        return kind == "timestamp" and value.tzinfo is not None and value.utcoffset() is not None
    return True


def _unfit(place: str, field: Field, extractor: PythonExtractor, value: Any) -> DatasetError:
    told = _told(value, _is_hidden(field.name, extractor))
    return _mistaken(extractor.factory, place, f"returned column {field.name!r} as {told}", f"it as {field.type}")


def _is_hidden(column: str, extractor: PythonExtractor) -> bool:
    return column.lower() in {name.lower() for name in extractor.sensitive}


def _mistaken(factory: str, where: str, what_it_does: str, declared: str) -> DatasetError:
    """Return the error for a function that does not do what is declared: it says nothing of the version."""
    return DatasetError(
        f"{where}: extractor {factory} {what_it_does}, declared is {declared}.",
        "Correct the function, or declare what it returns, and run it again: nothing was published or rejected.",
        function=factory,
    )


def _told(value: Any, hidden: bool) -> str:
    zone = (
        " without a zone"
        if isinstance(value, dt.datetime) and not is_missing(value) and value.utcoffset() is None
        else ""
    )
    text = "that is not told, because it is sensitive" if hidden else repr(str(value)[:100])
    return f"the {type(value).__name__}{zone} {text}"


def _all(schema: Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema.fields)


def _place(marks: dict[str, Any]) -> str:
    return f"the record at offset {marks[OFFSET]} of partition {marks[PARTITION]}"


def _line(error: BaseException) -> str:
    """Return where in the user's code an error was raised."""
    trace, last = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        last = (
            "" if code.co_filename == __file__ else f" ({code.co_filename.rsplit('/', 1)[-1]}, line {trace.tb_lineno})"
        )
        trace = trace.tb_next
    return last
