"""The formats of Kafka messages: JSON, text, raw bytes and text keys, and exact conversion to
declared types.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import np, pa, pc
from dagster_adjunct.resources.objects.arrow_files import read_json_lines
from dagster_adjunct.resources.schemas.arrow_values import map_parts, split_parts, with_nulls
from dagster_adjunct.resources.schemas.parsed_columns import (
    Converter,
    Converters,
    RowProblems,
    Unfit,
    build_column,
    check_cases,
    describe_value,
    has_decimals,
    simple_types,
)
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.schemas.types import (
    Array,
    Simple,
    Struct,
    Type,
    arrow_type,
    parse_type,
    write_name,
)
from dagster_adjunct.resources.validation import validated

_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,6}0*)?)?(Z|[+-]\d\d:?[0-5]\d)", re.ASCII
)
_INTEGER = re.compile(r"[+-]?\d{1,40}", re.ASCII)
_DECIMAL = re.compile(r"[+-]?\d{1,80}(\.\d{1,80})?", re.ASCII)
_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def _converter(
    fits: Callable[[Any], object], convert: Converter = lambda value: value, reason: str = ""
) -> Converter:
    """Return a function that returns `convert(value)` if `fits(value)`, else raises Unfit with
    the reason.
    """

    def converted(value: Any) -> Any:
        if not fits(value):
            raise Unfit(reason)
        return convert(value)

    return converted


def _is_text(value: object, pattern: re.Pattern[str] | None = None) -> bool:
    """Whether a value is a text, and matches the pattern as a whole."""
    if not isinstance(value, str):
        return False
    return pattern is None or pattern.fullmatch(value) is not None


_TEXT_FORMS: Mapping[str, Converter] = {
    "date": _converter(
        partial(_is_text, pattern=_DATE), dt.date.fromisoformat, ": expected a text like 2024-01-31"
    ),
    "timestamp": _converter(
        partial(_is_text, pattern=_TIME),
        lambda text: dt.datetime.fromisoformat(text).astimezone(dt.UTC),
        ": expected a text like 2024-01-31T09:30:00Z, with a zone and at most six decimals",
    ),
    "binary": _converter(_is_text, partial(base64.b64decode, validate=True)),
}
_decimal = _converter(
    lambda value: type(value) is int or isinstance(value, Decimal) or _is_text(value, _DECIMAL),
    Decimal,
)


def json_converters(field: Field, timestamps: str | None) -> Converters:
    """Return the converters from parsed JSON values to a column; `timestamps` is the unit of
    integers (`Json`).
    """
    kinds = simple_types(field)
    return {path: _json_converter(kind, timestamps) for path, kind in kinds.items()}


def _json_converter(kind: str, timestamps: str | None) -> Converter:
    """Return the converter from a parsed JSON value to a simple type."""
    if kind in ("float", "double"):
        return partial(_near_float, kind)
    if kind == "string":
        return _json_text
    if kind == "timestamp" and timestamps is not None:
        if timestamps == "millis":
            factor = 1000
            reason = ": expected a whole number of milliseconds"
        else:
            factor = 1
            reason = ": expected a whole number of microseconds"
        return _converter(
            _is_int, lambda value: _EPOCH + dt.timedelta(microseconds=value * factor), reason
        )
    if kind.startswith("decimal"):
        return _decimal
    if kind == "boolean":
        return _converter(lambda value: type(value) is bool)
    of_integers = _converter(_is_int)
    return _TEXT_FORMS.get(kind, of_integers)


def text_converter(kind: str) -> Converter:
    """Return the converter from texts, such as those in message keys, to a simple type. There is
    none to float or double (`KeyText`).
    """
    if kind in _INTEGERS:
        return _converter(_INTEGER.fullmatch, int)
    if kind.startswith("decimal"):
        return _decimal
    if kind == "boolean":
        return _converter(("true", "false").__contains__, lambda value: value == "true")
    return _TEXT_FORMS.get(kind) or _converter(_is_text)


def _is_int(value: object) -> bool:
    """Whether a value is an integer, and no boolean."""
    return type(value) is int


def _json_text(value: Any) -> str:
    """Return a text as it is, objects and lists as JSON text. Raises Unfit for other values, and
    UnicodeEncodeError for a lone surrogate.
    """
    if isinstance(value, str):
        value.encode()
        return value
    if isinstance(value, dict | list):
        # Fractions in it are Decimals if another column is a decimal: JSON has them as floats.
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=float)
    raise Unfit("")


def _near_float(kind: str, value: Any) -> float:
    """Return the number of this type that is nearest to a JSON number. Raises Unfit if it is too
    large.
    """
    if type(value) not in (int, float, Decimal):
        raise Unfit("")
    with np.errstate(over="ignore"):
        near = float(np.float32(value)) if kind == "float" else float(value)
    if math.isinf(near):  # JSON has no infinity: the number is too large
        raise Unfit(": too large")
    return near


def format_texts(column: pa.Array, kind: str) -> list[str | None]:
    """Return the values of a column as texts that `text_converter` reads as the same values."""
    if kind == "string":
        return list(column.to_pylist())
    if kind == "timestamp":
        naive = column.cast(pa.timestamp("us", tz="UTC")).cast(pa.timestamp("us"))
        return list(pc.strftime(naive, "%Y-%m-%dT%H:%M:%SZ").to_pylist())
    forms: dict[str, Callable[[Any], str]] = {
        "boolean": lambda value: str(value).lower(),
        "binary": lambda value: base64.b64encode(value).decode(),
        "decimal": lambda value: format(value, "f"),
    }
    form = forms.get(kind.partition("(")[0], str)
    return [None if value is None else form(value) for value in column.to_pylist()]


FAIL = "fail"


def missing_package_error(kind: str, package: str, error: ImportError) -> ConfigurationError:
    """Return the error for a format whose package is not installed."""
    problem = f"a Kafka stream is in {kind}, but {package} is not installed ({error})."
    step = 'Install it wherever tasks run: pip install "dagster-adjunct[kafka]".'
    return ConfigurationError(problem, step, package=package)


FormatReader = Callable[[Sequence[bytes | None], RowProblems], "list[pa.Array]"]
"""Reads the bytes of rows: returns one array for each column of the format's schema.

A row whose bytes are None is null in all columns. So is one whose bytes can't be read, and the
problems get the reason. Raises TransientError if a schema registry is not available.
"""
FormatWriter = Callable[["Sequence[pa.Array]"], list[bytes]]
"""Returns the bytes of each row. Raises SchemaMismatchError for a value that the format can't
hold.
"""


def row_reader(
    parse: Callable[[bytes], dict[str, Any]],
    schema: Schema,
    converters: Mapping[str, Converters] | None = None,
) -> FormatReader:
    """Return a reader that parses each message by `parse`, and converts its values to the columns,
    whose `converters` are by column.

    A message for which `parse` raises Unfit is null in every column, and `problems` gets the
    error's text.
    """
    converters_of = converters or {}

    def read(data: Sequence[bytes | None], problems: RowProblems) -> list[pa.Array]:
        rows: list[Mapping[str, Any]] = [{}] * len(data)
        for row, message in enumerate(data):
            if message is not None:
                try:
                    rows[row] = parse(message)
                except Unfit as error:
                    problems[row] = str(error)
        columns = []
        for each in schema.fields:
            values = [row.get(each.name) for row in rows]
            columns.append(build_column(values, each, converters_of.get(each.name, {}), problems))
        return columns

    return read


@runtime_checkable
class Format(Protocol):
    """An encoding of columns as bytes.

    `malformed` says what happens with bytes that can't be read: "fail", or the name of a BINARY
    column that gets them.
    """

    @property
    def malformed(self) -> str: ...

    def columns(self) -> Schema:
        """Return the columns that are read and written, without `malformed`."""

    def reader(self) -> FormatReader:
        """Return a reader. It may not be picklable: create one in each process."""

    def writer(self, what: str, subject: str) -> FormatWriter:
        """Return a writer; `what` names the stream in errors.

        `subject` is the schema's subject in the registry, unless the format has its own.
        """

    def describe(self) -> str:
        """Return the format in a few words, for errors."""


def check_malformed(declared: str, schema: Schema, what: str) -> None:
    """Raise ConfigurationError if the column for malformed bytes is empty or one of the format's
    own.
    """
    if not declared:
        step = f'Give the name of a column, or "{FAIL}", which is the default.'
        raise ConfigurationError(
            f"{what}: malformed='' is not a column name.", step, argument="malformed"
        )
    if declared != FAIL:
        Schema((*schema.fields, Field(declared, "binary")))


def schema_from_declaration(given: Schema | str) -> Schema:
    """Return the declared schema, which is a Schema or DDL. Raises SchemaMismatchError if it is
    invalid or empty.
    """
    schema = Schema.from_ddl(given, "a JSON format") if isinstance(given, str) else given
    if not schema.fields:
        problem = "a JSON format declares no columns."
        raise SchemaMismatchError(
            problem, 'Write them like "tailnum STRING, seats INT".', argument="schema"
        )
    return schema


# The column types for which Arrow's JSON parser accepts the same values as the exact reader.
_FAST_TYPES = frozenset({"string", "boolean", "tinyint", "smallint", "int", "bigint", "double"})
# Arrow accepts these as numbers, though they are not JSON. A match inside a string only costs time:
# then the exact reader reads the batch.
_INVALID_NUMBER = re.compile(rb"[:\[,]\s*-?(?:NaN|Inf(?:inity)?)\s*[,}\]]")
_MOST_BYTES = 1 << 30
_MAX_FAILURES = 3


def fast_json_reader(
    schema: Schema, names: Mapping[str, str]
) -> Callable[[Sequence[bytes | None]], list[pa.Array] | None]:
    """Return a function that reads a batch of messages by Arrow's JSON parser, three times as fast
    as `row_reader`.

    It returns None for a batch in which the exact reader, which also finds the reasons, may give
    another result; after three such batches in a row, for all. `names` are the field names of
    columns whose names differ.
    """
    if _FAST_TYPES.issuperset(field.type for field in schema.fields):
        return FastJsonReader(schema, names)
    return lambda data: None


@dataclass(slots=True)
class FastJsonReader:
    """Reads batches of messages by Arrow's JSON parser, until `failures` in a row reach a limit."""

    schema: Schema
    names: Mapping[str, str]
    failures: int = 0

    def __call__(self, data: Sequence[bytes | None]) -> list[pa.Array] | None:
        """Return the columns of a batch, None if the exact reader has to read it."""
        if not data or self.failures >= _MAX_FAILURES:  # it would probably fail again
            return None
        arrays = _read_fast(data, self.schema, self.names)
        if arrays is None:
            self.failures += 1
        else:
            self.failures = 0
        return arrays


def _read_fast(
    data: Sequence[bytes | None], schema: Schema, names: Mapping[str, str]
) -> list[pa.Array] | None:
    """Return the columns as Arrow's parser reads them, None if that is not certain to be right."""
    messages = [b"{}" if message is None else message for message in data]
    text = b"\n".join(messages)
    if not _is_one_object_a_line(text, messages):
        return None
    # A search for bytes is far faster than one for a pattern.
    if (b"NaN" in text or b"Inf" in text) and _INVALID_NUMBER.search(text):
        return None
    fields = [
        pa.field(names.get(field.name, field.name), arrow_type(field.type))
        for field in schema.fields
    ]
    try:
        text.decode()
        table = read_json_lines(text, pa.schema(fields), others="ignore")
    except (UnicodeDecodeError, pa.ArrowInvalid):
        return None
    if table.num_rows != len(messages):  # one of them has several objects
        return None
    columns = [column.combine_chunks() for column in table.columns]
    for name, column in zip(table.column_names, columns, strict=True):
        if _may_differ(messages, name, column):
            return None
    return columns


def _is_one_object_a_line(text: bytes, messages: Sequence[bytes]) -> bool:
    """Return whether each message begins and ends like an object, and there are as many lines as
    messages.

    Otherwise a message of two objects could make up for an empty one, and a message that is only
    `null` would crash Arrow.
    """
    if len(text) > _MOST_BYTES or text.count(b"\n") != len(messages) - 1:
        return False
    return all(message[:1] == b"{" and message[-1:] == b"}" for message in messages)


def _may_differ(messages: Sequence[bytes], name: str, column: pa.Array) -> bool:
    """Whether a value of this field is too large, or a message without one may have it under a name
    in another case.
    """
    # Arrow reads a number just above the greatest double as infinity; it rejects larger ones.
    if pa.types.is_floating(column.type) and pc.any(pc.is_inf(column)).as_py():
        return True
    quoted = f'"{name}"'.encode()
    lowered = quoted.lower()
    for row in pc.indices_nonzero(column.is_null()).to_pylist():
        if quoted not in messages[row] and lowered in messages[row].lower():
            return True
    return False


@validated
@dataclass(frozen=True, slots=True)
class Json:
    """One JSON object per message; `schema` declares its fields, as a Schema or as DDL.

    Missing fields are null, undeclared ones are ignored; a message that lacks a field and has one
    whose name differs by case only is malformed. A value that does not fit its column's type makes
    the message malformed: values are not cast, truncated or, except for FLOAT and DOUBLE, rounded.
    STRING columns accept texts, and objects and lists as JSON text. DECIMAL accepts numbers and
    texts, exactly. DATE and TIMESTAMP are ISO 8601 texts, timestamps with a zone, or integers in
    the unit of `timestamps`. BINARY is base64. `names` are the field names of columns whose names
    differ: {"deleted": "__deleted"}.
    """

    schema: Schema | str
    timestamps: Literal["millis", "micros"] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    malformed: str = FAIL

    def __post_init__(self) -> None:
        object.__setattr__(self, "schema", schema_from_declaration(self.schema))
        self.columns().select(self.names, "a JSON format")
        fields = [self.names.get(name, name) for name in self.columns().names]
        if twice := {name for name in fields if fields.count(name) > 1}:
            problem = f"a JSON format has two columns for the field {min(twice)!r}."
            raise ConfigurationError(problem, "Remove one.", argument="names")
        check_malformed(self.malformed, self.columns(), "a JSON format")

    def columns(self) -> Schema:
        assert isinstance(self.schema, Schema)
        return self.schema

    def reader(self) -> FormatReader:
        schema = self.columns()
        converters = {
            field.name: json_converters(field, self.timestamps) for field in schema.fields
        }
        is_exact = any(map(has_decimals, schema.fields))
        renamed = dict(self.names)
        decode = json.JSONDecoder(
            parse_constant=_reject_constant, parse_float=Decimal if is_exact else float
        ).decode

        read_fast = fast_json_reader(schema, renamed)
        fields = [renamed.get(name, name) for name in schema.names]

        def parse(message: bytes) -> dict[str, Any]:
            try:
                record = decode(message.decode())
            except UnicodeDecodeError as error:
                raise Unfit(f"not UTF-8 at byte {error.start}") from error
            except json.JSONDecodeError as error:
                raise Unfit(f"not JSON: {error.msg} at character {error.pos}") from error
            except (ValueError, RecursionError) as error:
                raise Unfit(f"not JSON: {str(error)[:60]}") from error
            if type(record) is not dict:
                raise Unfit(f"{describe_value(record)} where a JSON object belongs")
            check_cases(record, fields)
            if not renamed:
                return record
            return record | {column: record.get(name) for column, name in renamed.items()}

        read_exactly = row_reader(parse, schema, converters)

        def read(data: Sequence[bytes | None], problems: RowProblems) -> list[pa.Array]:
            columns = read_fast(data)
            if columns is None:
                return read_exactly(data, problems)
            return columns

        return read

    def writer(self, what: str, subject: str) -> FormatWriter:
        fields = self.columns().fields
        heads = [
            json.dumps(self.names.get(field.name, field.name), ensure_ascii=False) + ":"
            for field in fields
        ]

        def write(columns: Sequence[pa.Array]) -> list[bytes]:
            members = []  # by column, the text of its member in each row's object
            for column, each, head in zip(columns, fields, heads, strict=True):
                type_ = parse_type(each.type)
                texts = _json_texts(column, type_, what, each.name, self.timestamps)
                members.append([head + text for text in texts])
            return [("{" + ",".join(row) + "}").encode() for row in zip(*members, strict=True)]

        return write

    def describe(self) -> str:
        return "JSON"


def _reject_constant(text: str) -> Any:
    """Reject NaN and Infinity, which Python's JSON decoder would accept."""
    raise ValueError(f"{text} is not a JSON number")


_quote: Callable[[str], str] = json.JSONEncoder(ensure_ascii=False).encode


def _json_texts(
    column: pa.Array, type_: Type, what: str, path: str, timestamps: str | None
) -> list[str]:
    """Return values as JSON texts, of maps as objects; `path` names their place in errors."""
    if isinstance(type_, Simple):
        return _simple_json_texts(column, type_.name, what, path, timestamps)
    if isinstance(type_, Struct):
        texts = _struct_json_texts(column, type_, what, path, timestamps)
    elif isinstance(type_, Array):
        elements = pc.list_flatten(column)
        parts = _json_texts(elements, type_.element, what, f"{path}[]", timestamps)
        texts = [f"[{','.join(row)}]" for row in split_parts(column, parts)]
    else:
        keys, values = map_parts(column)
        parts = _json_texts(values, type_.value, what, f"{path}[*]", timestamps)
        entries = list(map("{}:{}".format, map(_quote, keys.to_pylist()), parts))
        texts = ["{" + ",".join(row) + "}" for row in split_parts(column, entries)]
    return with_nulls(texts, column, "null")


def _struct_json_texts(
    column: pa.Array, type_: Struct, what: str, path: str, timestamps: str | None
) -> list[str]:
    """Return structs as JSON objects."""
    members = []
    for member, values in zip(type_.members, column.flatten(), strict=True):
        head = _quote(member.name) + ":"
        inner = f"{path}.{write_name(member.name)}"
        texts = _json_texts(values, member.type, what, inner, timestamps)
        members.append([head + text for text in texts])
    return ["{" + ",".join(row) + "}" for row in zip(*members, strict=True)]


def _simple_json_texts(
    column: pa.Array, kind: str, what: str, path: str, timestamps: str | None
) -> list[str]:
    """Return simple values as JSON texts. Raises SchemaMismatchError for numbers that JSON has no
    form for.
    """
    form: Callable[[Any], str] = str
    if kind in ("float", "double"):
        if pc.any(pc.invert(pc.is_finite(column))).as_py():
            problem = f"{what}: column {path!r} has NaN or an infinity, which JSON can't represent."
            raise SchemaMismatchError(problem, "Replace it by null, or use Avro.", column=path)
        values = column.to_pylist()
        form = repr
    elif kind == "timestamp" and timestamps is not None:
        unit = "us"
        if timestamps == "millis":
            unit = "ms"
        values = column.cast(pa.timestamp(unit, tz="UTC"), safe=True).cast(pa.int64()).to_pylist()
    else:
        values = format_texts(column, kind)
        if kind in ("string", "date", "timestamp", "binary"):
            form = _quote
    return ["null" if value is None else form(value) for value in values]


@validated
@dataclass(frozen=True, slots=True)
class Raw:
    """The bytes as they are: `key BINARY, value BINARY`, or only `value` if the topic declares a
    key format.
    """

    malformed: str = FAIL

    def __post_init__(self) -> None:
        if self.malformed != FAIL:
            raise ConfigurationError(
                "raw bytes are never malformed.", "Leave malformed out.", argument="malformed"
            )

    def columns(self) -> Schema:
        return Schema.of(value="binary")

    def reader(self) -> FormatReader:
        return lambda data, problems: [pa.array(data, pa.binary())]

    def writer(self, what: str, subject: str) -> FormatWriter:
        return lambda columns: list(columns[0].to_pylist())

    def describe(self) -> str:
        return "raw"


@dataclass(frozen=True, slots=True)
class RawKey(Raw):
    """The bytes of a raw message's key, in the column `key`."""

    def columns(self) -> Schema:
        return Schema.of(key="binary")


@validated
@dataclass(frozen=True, slots=True)
class Text:
    """The whole message as text in one STRING column, to be parsed later, as a Debezium envelope
    for example.
    """

    column: str = "value"
    malformed: str = FAIL

    def __post_init__(self) -> None:
        check_malformed(self.malformed, self.columns(), "a text format")

    def columns(self) -> Schema:
        return Schema.of({self.column: "string"})

    def reader(self) -> FormatReader:
        def parse(datum: bytes) -> dict[str, Any]:
            try:
                return {self.column: datum.decode()}
            except UnicodeDecodeError as error:
                raise Unfit(f"not UTF-8 at byte {error.start}") from error

        return row_reader(parse, self.columns())

    def writer(self, what: str, subject: str) -> FormatWriter:
        def write(columns: Sequence[pa.Array]) -> list[bytes]:
            if columns[0].null_count:
                problem = (
                    f"{what}: column {self.column!r} is null in {columns[0].null_count} records,"
                    " but a message without a value is a tombstone."
                )
                raise SchemaMismatchError(
                    problem, "Set __tombstone for them, or leave them out.", column=self.column
                )
            return [text.encode() for text in columns[0].to_pylist()]

        return write

    def describe(self) -> str:
        return "text"


@validated
@dataclass(frozen=True, slots=True)
class KeyText:
    """A message key as text: that of one column, or a JSON array of the texts of several.

    `KeyText("tailnum")`, `KeyText("id BIGINT")`, `KeyText("origin STRING, time_hour TIMESTAMP")`.
    Dates and timestamps are ISO 8601 in UTC, binary values base64. One column that is null is a
    message without a key.
    """

    key: str
    malformed: str = FAIL

    def __post_init__(self) -> None:
        for column in self.columns().fields:
            if column.type in ("float", "double"):
                problem = (
                    f"key column {column.name!r} is {column.type}, whose values have several text"
                    " forms."
                )
                raise ConfigurationError(
                    problem, "Declare it as DECIMAL.", argument="key", column=column.name
                )

    def columns(self) -> Schema:
        text = self.key
        is_name = " " not in self.key.strip()
        if is_name:
            text = f"{self.key.strip()} STRING"
        return Schema.from_ddl(text, "a Kafka key")

    def reader(self) -> FormatReader:
        schema = self.columns()
        converters = {field.name: {"": text_converter(field.type)} for field in schema.fields}
        return row_reader(partial(_split_key, schema), schema, converters)

    def writer(self, what: str, subject: str) -> FormatWriter:
        kinds = [field.type for field in self.columns().fields]

        def write(columns: Sequence[pa.Array]) -> list[bytes]:
            texts = list(map(format_texts, columns, kinds))
            if len(texts) == 1:  # null: a message without a key
                only: list[Any] = [None if text is None else text.encode() for text in texts[0]]
                return only
            keys = []
            for parts in zip(*texts, strict=True):
                keys.append(json.dumps(parts, ensure_ascii=False, separators=(",", ":")).encode())
            return keys

        return write

    def describe(self) -> str:
        if len(self.columns().fields) == 1:
            return "a text"
        return "a JSON array of texts"


def _split_key(schema: Schema, data: bytes) -> dict[str, Any]:
    """Return the texts of the key's columns. Raises Unfit."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise Unfit("not UTF-8") from error
    if len(schema.fields) == 1:  # the whole key, and no JSON
        return {schema.fields[0].name: text}
    try:
        parts = json.loads(text)
    except (ValueError, RecursionError):
        parts = None
    if not isinstance(parts, list) or len(parts) != len(schema.fields):
        raise Unfit(f"not a JSON array of {len(schema.fields)} texts")
    return dict(zip(schema.names, parts, strict=True))
