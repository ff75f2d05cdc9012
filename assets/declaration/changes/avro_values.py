"""Avro values as JSON, in Spark's tasks: from there on, both forms of an envelope are read alike."""

from __future__ import annotations

import base64
import datetime as dt
import io
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.spark.spark_errors import wrapped

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

Schemas = Mapping[int | None, str]
_ANY_SCALE = "VariableScaleDecimal"  # Debezium's record
_HEADER = struct.Struct(">bI")  # Confluent's: a zero, then the schema's id
# What reading bytes that are not of the schema raises in fastavro, whichever part of it stumbles.
_UNREADABLE = (ValueError, EOFError, LookupError, TypeError, ArithmeticError, MemoryError, AttributeError, OSError)


def with_json(records: DataFrame, value: str, schemas: Schemas, names: tuple[str, str], what: str) -> DataFrame:
    """Return the records with two more columns: the value as JSON, and why it can't be read (null if it can).

    Null values give two nulls. Raises ConfigurationError without fastavro, or for a schema that is none.
    """
    from pyspark.sql import functions as F

    readers(schemas, what)  # what fails here would fail in every task
    given = records.columns
    types = [field.dataType.simpleString() for field in records.schema.fields] + ["string", "string"]
    ddl = ", ".join(f"c{index} {kind}" for index, kind in enumerate(types))
    plain = records.toDF(*[f"c{index}" for index in range(len(given))])
    read = plain.mapInArrow(_task(given.index(value), dict(schemas), what), ddl)
    return read.select(*[F.col(f"c{index}").alias(name) for index, name in enumerate((*given, *names))])


def readers(schemas: Schemas, what: str) -> dict[int | None, Callable[[bytes], Any]]:
    """Return functions that read one value each, by schema id."""
    try:
        from fastavro import parse_schema, schemaless_reader
        from fastavro.schema import SchemaParseException, UnknownType
    except ImportError as error:
        raise ConfigurationError(
            f"{what}: its changes are in Avro, and fastavro is not installed ({error}).",
            'Install it wherever tasks run: pip install "dagster-adjunct[avro]".',
            package="fastavro",
        ) from error

    def reader(text: str, which: int | None) -> Callable[[bytes], Any]:
        try:
            parsed = parse_schema(json.loads(text))
        except (SchemaParseException, UnknownType, LookupError, TypeError, ValueError) as error:
            name = "avro_schema" if which is None else f"avro_schema {which}"
            raise ConfigurationError(
                f"{what}: {name} is no Avro schema: {type(error).__name__}: {error}.",
                "Correct it.",
                argument="avro_schema",
            ) from error

        any_scale = _ANY_SCALE in text

        def read(data: bytes) -> Any:
            source = io.BytesIO(data)
            value = schemaless_reader(source, parsed, None)
            if rest := len(data) - source.tell():
                raise ValueError(f"{rest} bytes are left over")
            return _scaled(value) if any_scale else value

        return read

    return {which: reader(text, which) for which, text in schemas.items()}


def json_of(data: bytes | None, by_id: Mapping[int | None, Callable[[bytes], Any]]) -> tuple[str | None, str | None]:
    """Return an Avro value as JSON and None, or None and why it can't be read."""
    if data is None:
        return None, None
    read = by_id.get(None)
    if read is None:
        if len(data) < _HEADER.size or data[0] != 0:
            return None, f"not Avro with a schema id: it begins with {data[:5].hex() or 'nothing'}"
        number = _HEADER.unpack_from(data)[1]
        read, data = by_id.get(number), data[_HEADER.size :]
        if read is None:
            known = ", ".join(map(str, sorted(filter(None, by_id)))) or "none"
            return None, f"the Avro schema {number} is not declared: avro_schema has {known}"
    try:
        return json.dumps(read(data), default=_plain, ensure_ascii=False), None
    except _UNREADABLE as error:
        return None, f"not Avro of the declared schema: {type(error).__name__}: {error}"[:200]


def _scaled(value: Any) -> Any:
    """Return a value with decimals for what Debezium sends of a `numeric` without digits: each with its own scale."""
    if isinstance(value, list):
        return [_scaled(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"scale", "value"} and isinstance(value["value"], bytes):
        number = int.from_bytes(value["value"], "big", signed=True)
        return Decimal((int(number < 0), tuple(map(int, str(abs(number)))), -value["scale"]))
    return {name: _scaled(item) for name, item in value.items()}


def _plain(value: Any) -> str:
    """Return what JSON has no form for, as the text that Debezium's JSON has."""
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    if isinstance(value, dt.datetime | dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"a {type(value).__name__} has no form in JSON")


def _task(index: int, schemas: Schemas, what: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(batches: Iterator[Any]) -> Iterator[Any]:
        return wrapped(_read(batches, index, schemas, what))

    return run


def _read(batches: Iterator[pa.RecordBatch], index: int, schemas: Schemas, what: str) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    by_id = readers(schemas, what)
    for batch in batches:
        made = [json_of(data, by_id) for data in batch.column(index).to_pylist()]
        columns = [*batch.columns, *(pa.array(list(side), pa.string()) for side in zip(*made, strict=True))]
        if not made:
            columns = [*batch.columns, pa.array([], pa.string()), pa.array([], pa.string())]
        yield pa.RecordBatch.from_arrays(columns, [f"c{index}" for index in range(len(columns))])
