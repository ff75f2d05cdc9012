"""Avro's types as columns, and values of both."""

from __future__ import annotations

import base64
import datetime as dt
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.streams.kafka.formats import (
    FAIL,
    UNFIT,
    Convert,
    Problems,
    Reader,
    Unfit,
    Writer,
    check_malformed,
    columns_of,
    rows_of,
)
from dagster_adjunct.resources.streams.kafka.schema_registry import HEADER_BYTES, SchemaRegistry, header, number_of

if TYPE_CHECKING:
    import pyarrow as pa

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_PLAIN = {
    "int": "int", "long": "bigint", "float": "float", "double": "double", "boolean": "boolean", "string": "string",
    "bytes": "binary", "fixed": "binary", "enum": "string",
}  # fmt: skip


def parsed(text: str, references: Sequence[str] = ()) -> Any:
    """Return the schema as fastavro uses it. Raises ConfigurationError where it is none."""
    try:
        from fastavro import parse_schema
        from fastavro.schema import SchemaParseException, UnknownType
    except ImportError as error:
        raise ConfigurationError(
            f"a Kafka stream is in Avro, and fastavro is not installed ({error}).",
            'Install it wherever tasks run: pip install "dagster-adjunct[kafka]".',
            package="fastavro",
        ) from error
    named: dict[str, Any] = {}
    try:
        for reference in references:
            parse_schema(json.loads(reference), named_schemas=named)
        return parse_schema(json.loads(text), named_schemas=named)
    except (SchemaParseException, UnknownType, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(
            f"an Avro format declares what is no Avro schema: {type(error).__name__}: {str(error)[:200]}.",
            "Give the schema's JSON text.",
            argument="schema",
        ) from error


def fields_of(text: str) -> list[tuple[str, Any]]:
    """Return the fields of a record schema: the name and the declared type of each."""
    from fastavro.schema import expand_schema

    parsed(text)
    schema = expand_schema(json.loads(text))  # a type that is used again is there by its name only
    if not isinstance(schema, dict) or schema.get("type") != "record":
        raise ConfigurationError(
            "an Avro format declares a schema that is no record, so that it has no columns.",
            "Declare the record's.",
            argument="schema",
        )
    return [(field["name"], field["type"]) for field in schema["fields"]]


def _bare(declared: Any) -> Any:
    """Return a type without null, where null is all that it can be besides."""
    if isinstance(declared, list):
        others = [branch for branch in declared if branch != "null"]
        return others[0] if len(others) == 1 else declared
    return declared


def _named(declared: Any) -> tuple[str, str | None]:
    """Return the name of a type that is not a union, and its logical type."""
    kind = _bare(declared)
    if isinstance(kind, dict):
        return str(kind["type"]), kind.get("logicalType")
    return ("union", None) if isinstance(kind, list) else (str(kind), None)


def column_type(declared: Any) -> str:
    """Return the type of the column that a field of this Avro type becomes."""
    name, logical = _named(declared)
    if logical == "decimal":
        kind = _bare(declared)
        return f"decimal({kind['precision']},{kind.get('scale', 0)})"
    if logical in ("timestamp-millis", "timestamp-micros"):
        return "timestamp"
    if logical == "date":
        return "date"
    if logical in ("uuid", "time-millis", "time-micros", "local-timestamp-millis", "local-timestamp-micros"):
        return "string"
    return _PLAIN.get(name, "string")


def is_mixed(declared: Any) -> bool:
    """Whether values are JSON text in the column: those of records, lists and maps, and of unions of several types."""
    return _named(declared)[0] not in _PLAIN


def from_avro(declared: Any) -> Convert | None:
    """Return how what fastavro read becomes a value of the column, None where it is one.

    fastavro reads by the writer's logical type, which an older schema may lack.
    """
    logical = _named(declared)[1]
    kind = column_type(declared)
    if kind == "timestamp":
        return _moment(1000 if logical == "timestamp-millis" else 1)
    if kind == "date":
        return _day
    if kind.startswith("decimal"):
        return _exact(int(kind.rstrip(")").split(",")[1]))
    if kind in ("int", "bigint", "float", "double", "boolean", "binary") or is_mixed(declared):
        return None
    return _as_text


def _moment(factor: int) -> Convert:
    def convert(value: Any) -> dt.datetime:
        if isinstance(value, dt.datetime) and value.tzinfo is not None:
            return value
        if type(value) is not int:
            raise Unfit(": a time without a zone" if isinstance(value, dt.datetime) else "")
        return _EPOCH + dt.timedelta(microseconds=value * factor)

    return convert


def _day(value: Any) -> dt.date:
    if type(value) is int:
        return dt.date(1970, 1, 1) + dt.timedelta(days=value)
    if not isinstance(value, dt.date) or isinstance(value, dt.datetime):
        raise Unfit("")
    return value


def _exact(scale: int) -> Convert:
    def convert(value: Any) -> Decimal:
        if isinstance(value, bytes):
            return Decimal(int.from_bytes(value, "big", signed=True)).scaleb(-scale)
        if not isinstance(value, Decimal):
            raise Unfit("")
        return value

    return convert


def _as_text(value: Any) -> str:
    if isinstance(value, dt.time | dt.datetime):
        return value.isoformat()
    if isinstance(value, str | UUID):
        return str(value)
    raise Unfit("")


def as_json(value: Any) -> str | None:
    if value is None:
        return None
    return json.dumps(value, default=_in_json, ensure_ascii=False, separators=(",", ":"))


def _in_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    return str(value)


def to_avro(column: pa.Array, declared: Any, name: str, what: str) -> list[Any]:
    """Return the values of a column as fastavro takes them. Raises SchemaMismatchError."""
    import pyarrow as pa

    nullable = declared == "null" or (isinstance(declared, list) and "null" in declared)
    if column.null_count and not nullable:
        raise SchemaMismatchError(
            f"{what} is null in {column.null_count} records, and its Avro schema has no null there.",
            "Fill it, or declare it as a union with null.",
            column=name,
        )
    name, logical = _named(declared)
    if logical == "timestamp-millis":  # fastavro would cut
        try:
            column = column.cast(pa.timestamp("ms", tz="UTC"), safe=True)
        except pa.ArrowInvalid as error:
            raise SchemaMismatchError(
                f"{what} holds microseconds, and its Avro schema milliseconds.",
                "Truncate it, or declare micros.",
                column=name,
            ) from error
    values: list[Any] = column.to_pylist()
    if name == "string" and logical is None:
        return values
    read: Mapping[str | None, Callable[[str], Any]] = {
        "time-millis": dt.time.fromisoformat,
        "time-micros": dt.time.fromisoformat,
        "local-timestamp-millis": dt.datetime.fromisoformat,
        "local-timestamp-micros": dt.datetime.fromisoformat,
    }
    parse = read.get(logical, (lambda text: _from_json(json.loads(text), declared)) if is_mixed(declared) else None)
    if parse is None:
        return values
    try:
        return [None if value is None else parse(value) for value in values]
    except (*UNFIT, AttributeError) as error:
        form = "JSON of its Avro type" if is_mixed(declared) else "an ISO time"
        raise SchemaMismatchError(f"{what} holds a text that is not {form}.", "Correct it.", column=name) from error


def _from_json(value: Any, declared: Any) -> Any:
    """Return a nested value as fastavro takes it, from the JSON that `_json` makes of it."""
    kind = _bare(declared)
    name, logical = _named(kind)
    if value is None or isinstance(kind, list):
        return value
    if name == "record":
        return {field["name"]: _from_json(value.get(field["name"]), field["type"]) for field in kind["fields"]}
    if name == "array":
        return [_from_json(item, kind["items"]) for item in value]
    if name == "map":
        return {key: _from_json(item, kind["values"]) for key, item in value.items()}
    if logical == "decimal":
        return Decimal(value)
    if logical is not None and isinstance(value, str) and logical != "uuid":
        made = dt.time if logical.startswith("time-") else dt.date if logical == "date" else dt.datetime
        return made.fromisoformat(value)
    return base64.b64decode(value, validate=True) if name in ("bytes", "fixed") else value


# What bytes that are not of the schema raise in fastavro, whichever part of it stumbles over them.
_UNREADABLE = (
    ValueError, EOFError, LookupError, TypeError, ArithmeticError, MemoryError, AttributeError, OSError, RecursionError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Avro:
    """An Avro record a message; `schema` is the reader's schema, as JSON text.

    Without a registry messages are bare Avro of exactly this schema. With one they begin with Confluent's five bytes,
    and each is read as its writer's schema says, then resolved to this one: fields that it adds have their default.
    Columns are the record's fields: nested ones and unions of several types are JSON text in a STRING. Writing looks
    the schema up under `subject` (topic + "-value" or "-key" unless given), and registers it where it is not there.
    """

    schema: str
    registry: SchemaRegistry | None = None
    subject: str | None = None
    malformed: str = FAIL

    def __post_init__(self) -> None:
        check_malformed(self.malformed, self.columns(), "an Avro format")

    def columns(self) -> Schema:
        return Schema(tuple(Field(name, column_type(declared)) for name, declared in fields_of(self.schema)))

    def reader(self) -> Reader:
        schema = self.columns()
        declared = dict(fields_of(self.schema))
        converts = {name: convert for name, kind in declared.items() if (convert := from_avro(kind)) is not None}
        mixed = [name for name, kind in declared.items() if is_mixed(kind)]
        read_one = _by_id(self.schema, self.registry) if self.registry else _whole(parsed(self.schema), None)

        def parse(datum: bytes) -> dict[str, Any]:
            try:
                record = read_one(datum)
                for name in mixed:
                    record[name] = as_json(record[name])
            except Unfit:
                raise
            except _UNREADABLE as error:
                problem = "it ends too early" if isinstance(error, EOFError | IndexError) else type(error).__name__
                raise Unfit(f"not Avro of its schema: {problem}") from error
            return record

        def read(data: Sequence[bytes | None], problems: Problems) -> list[pa.Array]:
            return columns_of(rows_of(data, problems, parse), schema, converts, problems)

        return read

    def writer(self, what: str, subject: str) -> Writer:
        from fastavro import schemaless_writer

        schema, head = parsed(self.schema), b""
        if self.registry is not None:
            head = header(self.registry.register(self.subject or _needed(subject, what), self.schema))
        declared = fields_of(self.schema)

        def write(columns: Sequence[pa.Array]) -> list[bytes]:
            given = [to_avro(column, kind, name, f"{what}: column {name!r}")
                     for column, (name, kind) in zip(columns, declared, strict=True)]  # fmt: skip
            names = [name for name, _ in declared]
            made: list[bytes] = []
            for values in zip(*given, strict=True):
                out = io.BytesIO()
                out.write(head)
                try:
                    schemaless_writer(out, schema, dict(zip(names, values, strict=True)), strict=True)
                except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
                    raise SchemaMismatchError(
                        f"{what}: a record does not fit its Avro schema ({type(error).__name__}).",
                        "Look at nested columns, which must hold JSON of the declared form, and at enums.",
                        stream=what,
                    ) from error
                made.append(out.getvalue())
            return made

        return write

    def describe(self) -> str:
        return "Avro" if self.registry is None else "Avro of a schema registry"


def _needed(subject: str, what: str) -> str:
    if not subject:
        raise ConfigurationError(
            f"{what}: no subject is known for its Avro schema.", "Give it: Avro(subject=…).", argument="subject"
        )
    return subject


def _whole(writer: Any, reader: Any) -> Callable[[bytes], dict[str, Any]]:
    from fastavro import schemaless_reader
    from fastavro.read import SchemaResolutionError

    def read(data: bytes) -> dict[str, Any]:
        source = io.BytesIO(data)
        try:
            record: Any = schemaless_reader(source, writer, reader)
        except SchemaResolutionError as error:
            raise Unfit(f"its writer's schema does not go with the declared one: {str(error)[:100]}") from error
        if rest := len(data) - source.tell():
            raise Unfit(f"not Avro of its schema: {rest} bytes are left over")
        return dict(record)

    return read


def _by_id(declared: str, registry: SchemaRegistry) -> Callable[[bytes], dict[str, Any]]:
    known: dict[int, Callable[[bytes], dict[str, Any]]] = {}
    reader = parsed(declared)

    def made(number: int) -> Callable[[bytes], dict[str, Any]]:
        try:
            registered = registry.schema(number)
        except SchemaMismatchError as error:
            raise Unfit(error.problem.rstrip(".")) from error
        if registered.kind != "AVRO":
            raise Unfit(f"schema {number} of the registry is {registered.kind}, not Avro")
        try:
            writer = parsed(registered.text, registered.references)
        except ConfigurationError as error:
            raise Unfit(f"schema {number} of the registry is no Avro schema") from error
        same = json.loads(registered.text) == json.loads(declared)
        return _whole(writer, None if same else reader)

    def read(data: bytes) -> dict[str, Any]:
        number = number_of(data)
        if number is None:
            raise Unfit(f"not Avro with a schema id: it begins with {data[:HEADER_BYTES].hex() or 'nothing'}")
        if number not in known:
            known[number] = made(number)
        return known[number](data[HEADER_BYTES:])

    return read
