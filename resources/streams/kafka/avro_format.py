"""Avro values: with a schema that is declared, and the writer's from a schema registry where there is one."""

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

from resources.errors import ConfigurationError, SchemaMismatchError
from resources.schema import Field, Schema
from resources.streams.kafka.codec import FAIL, Reader, Writer, check_malformed
from resources.streams.kafka.registry import HEADER_BYTES, SchemaRegistry, header, number_of
from resources.streams.kafka.values import UNFIT, Convert, Problems, Unfit, columns_of

if TYPE_CHECKING:
    import pyarrow as pa

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_PLAIN = {
    "int": "int", "long": "bigint", "float": "float", "double": "double", "boolean": "boolean", "string": "string",
    "bytes": "binary", "fixed": "binary", "enum": "string",
}  # fmt: skip
# What bytes that are not of the schema raise in fastavro, whichever part of it stumbles over them.
_UNREADABLE = (
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    ArithmeticError,
    MemoryError,
    AttributeError,
    OSError,
    RecursionError,
)


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
        return Schema(tuple(Field(name, _column_type(declared)) for name, declared in _fields(self.schema)))

    def reader(self, what: str) -> Reader:
        schema = self.columns()
        declared = dict(_fields(self.schema))
        converts = {name: convert for name, each in declared.items() if (convert := _convert(each)) is not None}
        mixed = [name for name, each in declared.items() if _is_mixed(each)]
        read_one = _by_id(self.schema, self.registry) if self.registry else _whole(_parsed(self.schema), None)

        def read(data: Sequence[bytes | None], problems: Problems) -> list[pa.Array]:
            rows: list[dict[str, Any] | None] = []
            for row, each in enumerate(data):
                found = None
                if each is not None:
                    try:
                        found = read_one(each)
                        for name in mixed:
                            found[name] = _json(found[name])
                    except Unfit as error:
                        problems[row], found = str(error), None
                    except _UNREADABLE as error:
                        ended = isinstance(error, EOFError | IndexError)
                        said = "it ends too early" if ended else type(error).__name__
                        problems[row] = f"not Avro of its schema: {said}"
                rows.append(found)
            return columns_of(rows, schema, converts, problems)

        return read

    def writer(self, what: str, subject: str) -> Writer:
        from fastavro import schemaless_writer

        parsed, head = _parsed(self.schema), b""
        if self.registry is not None:
            head = header(self.registry.register(self.subject or _needed(subject, what), self.schema))
        declared = _fields(self.schema)

        def write(columns: Sequence[pa.Array]) -> list[bytes]:
            given = [_to_avro(column, kind, f"{what}: column {name!r}")
                     for column, (name, kind) in zip(columns, declared, strict=True)]  # fmt: skip
            names = [name for name, _ in declared]
            made: list[bytes] = []
            for values in zip(*given, strict=True):
                out = io.BytesIO()
                out.write(head)
                try:
                    schemaless_writer(out, parsed, dict(zip(names, values, strict=True)), strict=True)
                except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
                    raise SchemaMismatchError(
                        f"{what}: a record does not fit its Avro schema ({type(error).__name__}).",
                        "Look at nested columns, which must hold JSON of the declared form, and at enums.",
                    ) from error
                made.append(out.getvalue())
            return made

        return write

    def describe(self) -> str:
        return "Avro" if self.registry is None else "Avro of a schema registry"


def _needed(subject: str, what: str) -> str:
    if not subject:
        raise ConfigurationError(f"{what}: no subject is known for its Avro schema.", "Give it: Avro(subject=…).")
    return subject


# -- schemas


def _parsed(text: str, references: Sequence[str] = ()) -> Any:
    """Return the schema as fastavro uses it. Raises ConfigurationError where it is none."""
    try:
        from fastavro import parse_schema
        from fastavro.schema import SchemaParseException, UnknownType
    except ImportError as error:
        raise ConfigurationError(
            f"a Kafka stream is in Avro, and fastavro is not installed ({error}).",
            'Install it wherever tasks run: pip install "dagster-adjunct[avro]".',
        ) from error
    named: dict[str, Any] = {}
    try:
        for each in references:
            parse_schema(json.loads(each), named_schemas=named)
        return parse_schema(json.loads(text), named_schemas=named)
    except (SchemaParseException, UnknownType, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(
            f"an Avro format declares what is no Avro schema: {type(error).__name__}: {str(error)[:200]}.",
            "Give the schema's JSON text.",
        ) from error


def _fields(text: str) -> list[tuple[str, Any]]:
    """Return the fields of a record schema: the name and the declared type of each."""
    from fastavro.schema import expand_schema

    _parsed(text)
    parsed = expand_schema(json.loads(text))  # a type that is used again is there by its name only
    if not isinstance(parsed, dict) or parsed.get("type") != "record":
        raise ConfigurationError(
            "an Avro format declares a schema that is no record, so that it has no columns.", "Declare the record's."
        )
    return [(field["name"], field["type"]) for field in parsed["fields"]]


def _bare(declared: Any) -> Any:
    """Return a type without null, where null is all that it can be besides."""
    if isinstance(declared, list):
        others = [each for each in declared if each != "null"]
        return others[0] if len(others) == 1 else declared
    return declared


def _named(declared: Any) -> tuple[str, str | None]:
    """Return the name of a type that is not a union, and its logical type."""
    kind = _bare(declared)
    if isinstance(kind, dict):
        return str(kind["type"]), kind.get("logicalType")
    return ("union", None) if isinstance(kind, list) else (str(kind), None)


def _column_type(declared: Any) -> str:
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


def _is_mixed(declared: Any) -> bool:
    """Whether values are written as JSON: of records, lists, maps, of named types used again, and of several types."""
    name, logical = _named(declared)
    return name not in _PLAIN and logical is None


# -- values


def _whole(writer: Any, reader: Any) -> Callable[[bytes], dict[str, Any]]:
    from fastavro import schemaless_reader
    from fastavro.read import SchemaResolutionError

    def read(data: bytes) -> dict[str, Any]:
        source = io.BytesIO(data)
        try:
            found: Any = schemaless_reader(source, writer, reader)
        except SchemaResolutionError as error:
            raise Unfit(f"its writer's schema does not go with the declared one: {str(error)[:100]}") from error
        if rest := len(data) - source.tell():
            raise Unfit(f"not Avro of its schema: {rest} bytes are left over")
        return dict(found)

    return read


def _by_id(declared: str, registry: SchemaRegistry) -> Callable[[bytes], dict[str, Any]]:
    known: dict[int, Callable[[bytes], dict[str, Any]]] = {}
    reader = _parsed(declared)

    def made(number: int) -> Callable[[bytes], dict[str, Any]]:
        try:
            found = registry.schema(number)
        except SchemaMismatchError as error:
            raise Unfit(error.problem.rstrip(".")) from error
        if found.kind != "AVRO":
            raise Unfit(f"schema {number} of the registry is {found.kind}, not Avro")
        try:
            writer = _parsed(found.text, found.references)
        except ConfigurationError as error:
            raise Unfit(f"schema {number} of the registry is no Avro schema") from error
        same = json.loads(found.text) == json.loads(declared)
        return _whole(writer, None if same else reader)

    def read(data: bytes) -> dict[str, Any]:
        number = number_of(data)
        if number is None:
            raise Unfit(f"not Avro with a schema id: it begins with {data[:HEADER_BYTES].hex() or 'nothing'}")
        if number not in known:
            known[number] = made(number)
        return known[number](data[HEADER_BYTES:])

    return read


def _convert(declared: Any) -> Convert | None:
    """Return how what fastavro read becomes a value of the column, None where it is one.

    fastavro reads by the writer's logical type, which an older schema may lack.
    """
    logical = _named(declared)[1]
    kind = _column_type(declared)
    if kind == "timestamp":
        return _moment(1000 if logical == "timestamp-millis" else 1)
    if kind == "date":
        return _day
    if kind.startswith("decimal"):
        return _exact(int(kind.rstrip(")").split(",")[1]))
    if kind in ("int", "bigint", "float", "double", "boolean", "binary") or _is_mixed(declared):
        return None
    return _as_text


def _moment(factor: int) -> Convert:
    def convert(value: Any) -> dt.datetime:
        if isinstance(value, dt.datetime):
            return value
        if type(value) is not int:
            raise Unfit("")
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


def _json(value: Any) -> str | None:
    if value is None:
        return None
    return json.dumps(value, default=_in_json, ensure_ascii=False, separators=(",", ":"))


def _in_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    return str(value)


def _to_avro(column: pa.Array, declared: Any, what: str) -> list[Any]:
    """Return the values of a column as fastavro takes them. Raises SchemaMismatchError."""
    import pyarrow as pa

    nullable = declared == "null" or (isinstance(declared, list) and "null" in declared)
    if column.null_count and not nullable:
        raise SchemaMismatchError(
            f"{what} is null in {column.null_count} records, and its Avro schema has no null there.",
            "Fill it, or declare it as a union with null.",
        )
    name, logical = _named(declared)
    if logical == "timestamp-millis":  # fastavro would cut
        try:
            column = column.cast(pa.timestamp("ms", tz="UTC"), safe=True)
        except pa.ArrowInvalid as error:
            raise SchemaMismatchError(
                f"{what} holds microseconds, and its Avro schema milliseconds.", "Truncate it, or declare micros."
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
    parse = read.get(logical, (lambda text: _from_json(json.loads(text), declared)) if _is_mixed(declared) else None)
    if parse is None:
        return values
    try:
        return [None if value is None else parse(value) for value in values]
    except (*UNFIT, AttributeError) as error:
        form = "JSON of its Avro type" if _is_mixed(declared) else "an ISO time"
        raise SchemaMismatchError(f"{what} holds a text that is not {form}.", "Correct it.") from error


def _from_json(value: Any, declared: Any) -> Any:
    """Return a nested value as fastavro takes it, from the JSON that `_json` makes of it."""
    kind = _bare(declared)
    name, logical = _named(kind)
    if value is None or isinstance(kind, list):
        return value
    if name == "record":
        return {field["name"]: _from_json(value.get(field["name"]), field["type"]) for field in kind["fields"]}
    if name == "array":
        return [_from_json(each, kind["items"]) for each in value]
    if name == "map":
        return {key: _from_json(each, kind["values"]) for key, each in value.items()}
    if logical == "decimal":
        return Decimal(value)
    if logical is not None and isinstance(value, str) and logical != "uuid":
        made = dt.time if logical.startswith("time-") else dt.date if logical == "date" else dt.datetime
        return made.fromisoformat(value)
    return base64.b64decode(value, validate=True) if name in ("bytes", "fixed") else value
