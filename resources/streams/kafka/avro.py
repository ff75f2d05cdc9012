"""The Avro format: reading and writing of messages."""

from __future__ import annotations

import base64
import datetime as dt
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from typing import Any

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import pa, pc
from dagster_adjunct.resources.schemas.arrow_values import map_parts, split_parts, with_nulls
from dagster_adjunct.resources.schemas.avro import (
    TIMES,
    avro_converters,
    avro_type,
    is_json_text,
    is_nullable,
    type_name,
    without_null,
)
from dagster_adjunct.resources.schemas.parsed_columns import CONVERSION_ERRORS, Unfit, check_cases
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.schemas.types import Array, Simple, Struct, write_name
from dagster_adjunct.resources.streams.kafka import formats, schema_registry
from dagster_adjunct.resources.streams.kafka.formats import FormatReader, FormatWriter
from dagster_adjunct.resources.streams.kafka.schema_registry import HEADER_BYTES, SchemaRegistry
from dagster_adjunct.resources.validation import validated


def parse_avro_schema(text: str, references: Sequence[str] = (), *, expand: bool = False) -> Any:
    """Return the schema of this JSON text, parsed by fastavro. Raises ConfigurationError if it is
    invalid.

    `references` are the JSON texts of schemas that it refers to, each after those that it needs
    itself. With `expand`, types stand in place of their names, except within themselves.
    """
    try:
        from fastavro import parse_schema
        from fastavro.schema import SchemaParseException, UnknownType
    except ImportError as error:
        raise formats.missing_package_error("Avro", "fastavro", error) from error
    named: dict[str, Any] = {}
    try:
        for reference in references:
            parse_schema(json.loads(reference), named_schemas=named)
        return parse_schema(json.loads(text), named_schemas=named, expand=expand)
    except (
        SchemaParseException,
        UnknownType,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
    ) as error:
        problem = (
            f"an Avro format declares an invalid schema: {type(error).__name__}:"
            f" {str(error)[:200]}."
        )
        raise ConfigurationError(
            problem, "Give the schema's JSON text.", argument="schema"
        ) from error


def avro_fields(text: str) -> list[tuple[str, Any]]:
    """Return (name, declared type) of each field of a record schema. Raises ConfigurationError
    for other schemas.
    """
    from fastavro.schema import expand_schema

    parse_avro_schema(text)
    schema = expand_schema(json.loads(text))  # expands types that are only referred to by name
    if not isinstance(schema, dict) or schema.get("type") != "record":
        problem = "an Avro format declares a schema that is not a record, so it has no columns."
        raise ConfigurationError(problem, "Declare a record.", argument="schema")
    return [(field["name"], field["type"]) for field in schema["fields"]]


_JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "record": (dict,),
    "array": (list,),
    "map": (dict,),
    "boolean": (bool,),
    "int": (int,),
    "long": (int,),
    "float": (int, float),
    "double": (int, float),
    "null": (),
}
"""The types of a JSON value that is of an Avro type; else text."""


@dataclass(frozen=True, slots=True)
class AvroValues:
    """Makes the values of a column, in the form in which fastavro writes them.

    `what` names the stream, `column` the column, and `path` the values, in errors.
    """

    what: str
    column: str
    path: str

    def _within(self, step: str) -> AvroValues:
        """Return the maker of parts of these values; `step` is what their path adds."""
        return replace(self, path=self.path + step)

    def _error(self, problem: str, step: str) -> SchemaMismatchError:
        """Return the error of the column with this problem."""
        text = f"{self.what}: column {self.path!r} {problem}."
        return SchemaMismatchError(text, step, column=self.column)

    def convert(self, values: pa.Array, declared: Any) -> list[Any]:
        """Return values of this Avro type. Raises SchemaMismatchError for one that does not fit."""
        if values.null_count and not is_nullable(declared):
            problem = f"is null in {values.null_count} records, but its Avro type is not nullable"
            raise self._error(problem, "Fill it, or declare a union with null.")
        kind = without_null(declared)
        type_ = avro_type(declared)
        if isinstance(type_, Simple):
            return self._convert_simple(values, declared)
        if isinstance(type_, Struct):
            return self._convert_records(values, kind["fields"])
        if isinstance(type_, Array):
            items = self._within("[]").convert(pc.list_flatten(values), kind["items"])
            made: list[Any] = list(map(list, split_parts(values, items)))
        else:
            keys, entries = map_parts(values)
            parts = self._within("[*]").convert(entries, kind["values"])
            pairs = list(zip(keys.to_pylist(), parts, strict=True))
            made = list(map(dict, split_parts(values, pairs)))
        return with_nulls(made, values, None)

    def _convert_records(self, values: pa.Array, fields: Sequence[Any]) -> list[Any]:
        """Return structs as dictionaries, None for null."""
        present = values.drop_null()
        parts = {}
        for each, part in zip(fields, present.flatten(), strict=True):
            name = each["name"]
            parts[name] = self._within(f".{write_name(name)}").convert(part, each["type"])
        rows = zip(*parts.values(), strict=True)
        made = iter([dict(zip(parts, row, strict=True)) for row in rows])
        return [next(made) if valid else None for valid in values.is_valid().to_pylist()]

    def _convert_simple(self, values: pa.Array, declared: Any) -> list[Any]:
        """Return values that are no struct, array or map, as fastavro writes them. Raises
        SchemaMismatchError.
        """
        name, logical = type_name(declared)
        if logical == "timestamp-millis":  # fastavro would truncate
            try:
                values = values.cast(pa.timestamp("ms", tz="UTC"), safe=True)
            except pa.ArrowInvalid as error:
                problem = "has microseconds, but its Avro type milliseconds"
                raise self._error(problem, "Truncate it, or declare micros.") from error
        given: list[Any] = values.to_pylist()
        self._check_named(given, name, without_null(declared))
        parse: Callable[[str], Any]
        if is_json_text(declared):
            form = "JSON of its Avro type"
            parse = lambda text: _value_from_json(json.loads(text), declared)  # noqa: E731
        elif logical in TIMES and avro_type(declared) == Simple("string"):
            form = f"an ISO {logical}"
            parse = _PARSERS[logical]
        else:
            return given
        try:
            return [None if value is None else parse(value) for value in given]
        except _UNWRITABLE as error:
            reason = ""
            if isinstance(error, Unfit):
                reason = str(error)
            step = "Correct the value, or declare another Avro type."
            raise self._error(f"has a text that is not {form}{reason}", step) from error

    def _check_named(self, values: list[Any], name: str, kind: Any) -> None:
        """Raise SchemaMismatchError for a value that an enum or a fixed type does not have; `kind`
        is the declared type, and `name` what kind of type it is.
        """
        expected = ""
        if name == "enum" and not {*values} <= {None, *kind["symbols"]}:
            expected = f"one of {', '.join(kind['symbols'])}"
        elif name == "fixed" and avro_type(kind) == Simple("binary"):
            sizes = {len(value) for value in values if value is not None}
            if not sizes <= {kind["size"]}:
                expected = f"{kind['size']} bytes"
        if expected:
            problem = f"has a value that does not fit its Avro schema: expected {expected}"
            raise self._error(problem, "Correct the value, or declare another Avro type.")


def _value_from_json(value: Any, declared: Any) -> Any:
    """Return a nested value in the form in which fastavro writes it, from the JSON of
    `to_json_text`, its inverse.
    """
    kind = without_null(declared)
    name, logical = type_name(kind)
    is_union = isinstance(kind, list)  # of several types, of which fastavro chooses one
    if is_union or (value is None and is_nullable(declared)):
        return value
    if logical in _PARSERS:
        return _PARSERS[logical](value)
    _check_json_type(value, name)
    if name == "record":
        return {
            each["name"]: _value_from_json(value.get(each["name"]), each["type"])
            for each in kind["fields"]
        }
    if name == "array":
        return [_value_from_json(item, kind["items"]) for item in value]
    if name == "map":
        return {key: _value_from_json(item, kind["values"]) for key, item in value.items()}
    if name in ("bytes", "fixed"):
        return base64.b64decode(value, validate=True)
    return value


def _check_json_type(value: Any, name: str) -> None:
    """Raise Unfit for a JSON value of another type: fastavro would write 1.5 as the int 1, and null
    as false.
    """
    if type(value) not in _JSON_TYPES.get(name, (str,)):
        raise Unfit(f": expected {name}, found {type(value).__name__}")
    bits = {"int": 31, "long": 63}.get(name)
    if bits is not None and not -(2**bits) <= value < 2**bits:
        raise Unfit(f": a number out of the range of {name}")


def _parse_time(logical: str, text: str) -> dt.time | dt.datetime:
    """Return the value of an ISO text for one of the logical types of times (TIMES).

    Raises ValueError for a text that is not ISO, and Unfit, with the reason, for a time that
    fastavro would change.
    """
    kind, _, unit = logical.rpartition("-")
    value = dt.time.fromisoformat(text) if kind == "time" else dt.datetime.fromisoformat(text)
    has_zone = value.tzinfo is not None
    if kind == "timestamp" and not has_zone:
        raise Unfit(f": a {logical} needs a time zone")
    if kind != "timestamp" and has_zone:
        raise Unfit(f": a {logical} has no time zone")
    if unit == "millis" and value.microsecond % 1000:
        raise Unfit(f": a {logical} can't hold digits below a millisecond")
    return value


# By logical type, the function that parses its JSON value.
_PARSERS: Mapping[str | None, Callable[[Any], Any]] = {
    "decimal": Decimal,
    "date": dt.date.fromisoformat,
    **{logical: partial(_parse_time, logical) for logical in TIMES},
}
# The errors of fastavro for values that do not match the schema.
_UNWRITABLE = (*CONVERSION_ERRORS, AttributeError)
# The errors of fastavro for bytes that do not match the schema.
_UNREADABLE = (*_UNWRITABLE, EOFError, MemoryError, OSError, RecursionError)


@validated
@dataclass(frozen=True, slots=True)
class Avro:
    """One Avro record per message; `schema` is the reader's schema, as JSON text.

    Without a registry messages are bare Avro of exactly this schema. With one they begin with
    Confluent's five bytes, and each is read by its writer's schema and resolved to this one, whose
    added fields have their defaults. Columns are the record's fields: records are structs,
    and unions of several types JSON text in a STRING, as are records without fields, and within
    themselves. Writing looks up the schema under `subject` (default: topic + "-value" or "-key"),
    and registers it if it is missing.
    """

    schema: str
    registry: SchemaRegistry | None = None
    subject: str | None = None
    malformed: str = formats.FAIL

    def __post_init__(self) -> None:
        formats.check_malformed(self.malformed, self.columns(), "an Avro format")

    def columns(self) -> Schema:
        return Schema(
            tuple(
                Field(name, str(avro_type(declared))) for name, declared in avro_fields(self.schema)
            )
        )

    def reader(self) -> FormatReader:
        declared = dict(avro_fields(self.schema))
        converters = {name: avro_converters(kind) for name, kind in declared.items()}
        if self.registry:
            read_one = _registry_reader(self.schema, self.registry)
        else:
            read_one = _record_reader(parse_avro_schema(self.schema), None)

        def parse(datum: bytes) -> dict[str, Any]:
            try:
                return read_one(datum)
            except Unfit:
                raise
            except _UNREADABLE as error:
                if isinstance(error, EOFError | IndexError):
                    problem = "it ends too early"
                else:
                    problem = type(error).__name__
                raise Unfit(f"not Avro of its schema: {problem}") from error

        return formats.row_reader(parse, self.columns(), converters)

    def writer(self, what: str, subject: str) -> FormatWriter:
        from fastavro import schemaless_writer

        schema = parse_avro_schema(self.schema)
        head = b""
        if self.registry is not None:
            head = schema_registry.encode_schema_id(
                self.registry.register(self.subject or subject, self.schema)
            )
        declared = avro_fields(self.schema)

        def write(columns: Sequence[pa.Array]) -> list[bytes]:
            given = {
                name: AvroValues(what, name, name).convert(column, kind)
                for column, (name, kind) in zip(columns, declared, strict=True)
            }
            made: list[bytes] = []
            for values in zip(*given.values(), strict=True):
                out = io.BytesIO()
                out.write(head)
                try:
                    schemaless_writer(
                        out, schema, dict(zip(given, values, strict=True)), strict=True
                    )
                except _UNWRITABLE as error:
                    problem = (
                        f"{what}: a record does not fit its Avro schema ({type(error).__name__})."
                    )
                    step = "Check the columns that are JSON text, for unions of several types."
                    raise SchemaMismatchError(problem, step, stream=what) from error
                made.append(out.getvalue())
            return made

        return write

    def describe(self) -> str:
        if self.registry is None:
            return "Avro"
        return "Avro of a schema registry"


def _record_reader(writer: Any, reader: Any) -> Callable[[bytes], dict[str, Any]]:
    """Return a function that reads records of the schema `writer`; `reader`, if it is not None, is
    the one to which they are resolved. Raises Unfit.
    """
    from fastavro import schemaless_reader
    from fastavro.read import SchemaResolutionError

    def read(data: bytes) -> dict[str, Any]:
        source = io.BytesIO(data)
        try:
            record: Any = schemaless_reader(source, writer, reader)
        except SchemaResolutionError as error:
            raise Unfit(
                f"its writer's schema can't be resolved to the declared one: {str(error)[:100]}"
            ) from error
        if rest := len(data) - source.tell():
            raise Unfit(f"not Avro of its schema: {rest} bytes are left over")
        return dict(record)

    return read


def _check_record_cases(writer: Any, reader: Any) -> None:
    """Raise Unfit for a field of the reader's that no alias finds among the writer's, while one of
    these differs from it by case only; also in records within records, arrays and maps.
    """
    sent = without_null(writer)
    wanted = without_null(reader)
    if not isinstance(sent, dict) or not isinstance(wanted, dict):
        return
    for inner in ("items", "values"):
        if inner in sent and inner in wanted:
            _check_record_cases(sent[inner], wanted[inner])
    types = {field["name"]: field["type"] for field in sent.get("fields", ())}
    fields = []
    for field in wanted.get("fields", ()):
        if not set(field.get("aliases", ())) & set(types):
            fields.append(field)
    check_cases(types, [field["name"] for field in fields])
    for field in fields:
        _check_record_cases(types.get(field["name"]), field["type"])


def _registry_reader(declared: str, registry: SchemaRegistry) -> Callable[[bytes], dict[str, Any]]:
    """Return a function that reads messages by the schemas that they name, resolved to the declared
    one.
    """
    readers: dict[int, Callable[[bytes], dict[str, Any]]] = {}  # by the id of the writer's schema
    reader = parse_avro_schema(declared)

    def read(data: bytes) -> dict[str, Any]:
        registered = schema_registry.read_schema_id(data, registry, "AVRO", "Avro")
        if registered.id not in readers:
            try:
                writer = parse_avro_schema(registered.text, registered.references)
            except ConfigurationError as error:
                raise Unfit(
                    f"schema {registered.id} of the registry is not a valid Avro schema"
                ) from error
            expanded = parse_avro_schema(registered.text, registered.references, expand=True)
            _check_record_cases(expanded, parse_avro_schema(declared, expand=True))
            same = json.loads(registered.text) == json.loads(declared)  # nothing to resolve
            readers[registered.id] = _record_reader(writer, None if same else reader)
        return readers[registered.id](data[HEADER_BYTES:])

    return read
