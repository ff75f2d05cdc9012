"""The values in envelopes of Debezium and Maxwell: Avro as JSON, and conversions to the types of
columns.
"""

from __future__ import annotations

import base64
import datetime as dt
import io
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol
from uuid import UUID

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.lazy_modules import F, pa
from dagster_adjunct.resources.optional_packages import import_package
from dagster_adjunct.resources.schemas.schema import Field, Schema, quote_name
from dagster_adjunct.resources.schemas.types import types_from_spark
from dagster_adjunct.resources.schemas.values import DAYS, MICROS
from dagster_adjunct.resources.spark.tasks import convert_in_tasks, names_by_position

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


Schemas = Mapping[int | None, str]


_ANY_SCALE = (  # Debezium's Avro record for decimals, each with a scale of its own
    "VariableScaleDecimal"
)


_HEADER = struct.Struct(">bI")  # Confluent's: a zero, then the schema's id


# That of PostgreSQL's numeric. A number is written with all its zeros, and a foreign scale could
# ask for thousands of millions of them.
_MOST_SCALE = 16_383

# What fastavro raises for bytes that do not match the schema.
_UNREADABLE = (
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    ArithmeticError,
    MemoryError,
    AttributeError,
    OSError,
)


def with_avro_as_json(
    records: DataFrame, value: str, schemas: Schemas, names: tuple[str, str], what: str
) -> DataFrame:
    """Return the records with the columns `names` added: the Avro value as JSON, and why it can't
    be read, or null.

    Both are null for a null value. Raises ConfigurationError without fastavro, or for an invalid
    schema.
    """
    avro_readers(schemas, what)  # fail here instead of in every task
    given = records.columns
    read = partial(_add_json, index=given.index(value), schemas=schemas, what=what)
    columns = list(types_from_spark(records.schema).items())
    return convert_in_tasks(records, read, [*columns, *((name, "string") for name in names)])


def _add_json(
    batches: Iterator[pa.RecordBatch], index: int, schemas: Schemas, what: str
) -> Iterator[pa.RecordBatch]:
    """Yield the batches with two more columns: the Avro values at `index` as JSON, and why they
    can't be read.
    """
    by_id = avro_readers(schemas, what)
    for batch in batches:
        texts: list[str | None] = []
        problems: list[str | None] = []
        for data in batch.column(index).to_pylist():
            read = json_from_avro(data, by_id)
            texts.append(read.text)
            problems.append(read.problem)
        columns = [*batch.columns, pa.array(texts, pa.string()), pa.array(problems, pa.string())]
        yield pa.RecordBatch.from_arrays(columns, names_by_position(columns))


def avro_readers(schemas: Schemas, what: str) -> dict[int | None, Callable[[bytes], Any]]:
    """Return, by schema id, the function that decodes a value; by None if values have no id.

    Raises ConfigurationError without fastavro, or for an invalid schema.
    """
    fastavro = import_package(f"{what}: the Avro of its changes", "fastavro", "avro")
    invalid = (fastavro.schema.SchemaParseException, fastavro.schema.UnknownType)

    def reader(text: str, which: int | None) -> Callable[[bytes], Any]:
        """Return the function that reads values of one schema; `which` is its id."""
        try:
            parsed = fastavro.parse_schema(json.loads(text))
        except (*invalid, LookupError, TypeError, ValueError) as error:
            name = "avro_schema" if which is None else f"avro_schema {which}"
            raise ConfigurationError(
                f"{what}: {name} is not an Avro schema: {type(error).__name__}: {error}.",
                "Copy it from the schema registry or the .avsc file.",
                argument="avro_schema",
            ) from error

        any_scale = _ANY_SCALE in text

        def read(data: bytes) -> Any:
            """Return the value that all of these bytes are. Raises one of _UNREADABLE."""
            source = io.BytesIO(data)
            value = fastavro.schemaless_reader(source, parsed, None)
            rest = len(data) - source.tell()
            if rest:
                raise ValueError(f"{rest} bytes are left over")
            if any_scale:
                value = _with_variable_decimals(value)
            return value

        return read

    return {which: reader(text, which) for which, text in schemas.items()}


class JsonValue(NamedTuple):
    """A value as JSON, or why it can't be read; neither for a null value."""

    text: str | None = None
    problem: str | None = None


def json_from_avro(
    data: bytes | None, by_id: Mapping[int | None, Callable[[bytes], Any]]
) -> JsonValue:
    """Return an Avro value as JSON. `by_id` are the functions of `avro_readers`: values begin with
    the id of their schema, unless there is a function for None.
    """
    if data is None:
        return JsonValue()
    reader = by_id.get(None)
    if reader is None:
        if len(data) < _HEADER.size or data[0] != 0:
            begins = data[:5].hex() or "nothing"
            return JsonValue(problem=f"not Avro with a schema id: it begins with {begins}")
        _, number = _HEADER.unpack_from(data)
        reader = by_id.get(number)
        data = data[_HEADER.size :]
        if reader is None:
            known = ", ".join(map(str, sorted(filter(None, by_id)))) or "none"
            problem = f"the Avro schema {number} is not declared: avro_schema has {known}"
            return JsonValue(problem=problem)
    try:
        return JsonValue(json.dumps(reader(data), default=_json_default, ensure_ascii=False))
    except _UNREADABLE as error:
        problem = f"not Avro of the declared schema: {type(error).__name__}: {error}"
        return JsonValue(problem=problem[:200])


def _with_variable_decimals(value: Any) -> Any:
    """Return a value with Debezium's VariableScaleDecimal (a `numeric` without precision)
    converted to decimals. Raises ValueError for a scale that no database has.
    """
    if isinstance(value, list):
        return [_with_variable_decimals(item) for item in value]
    if not isinstance(value, dict):
        return value
    has_members = value.keys() == {"scale", "value"}
    if has_members and isinstance(value["value"], bytes):
        scale = value["scale"]
        if abs(scale) > _MOST_SCALE:
            raise ValueError(f"a decimal has the scale {scale}")
        unscaled = int.from_bytes(value["value"], "big", signed=True)
        sign = 1 if unscaled < 0 else 0
        digits = tuple(int(digit) for digit in str(abs(unscaled)))
        # Exact, because it is made of its parts. Arithmetic would round to the context's 28 digits.
        return Decimal((sign, digits, -scale))
    return {name: _with_variable_decimals(item) for name, item in value.items()}


def _json_default(value: Any) -> str:
    """Return the string that Debezium writes for a value that JSON can't represent."""
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    if isinstance(value, dt.datetime | dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"a {type(value).__name__} has no form in JSON")


AvroSchemas = str | Mapping[int, str] | tuple[tuple[int, str], ...]


MissingRule = Literal["refuse", "null", "keep"]


MissingRules = MissingRule | Mapping[str, MissingRule] | tuple[tuple[str, MissingRule], ...]
"""What a missing column means: for all columns, or by column, the others being refused."""


class Envelope(Protocol):
    """The declaration of an envelope, as its records are parsed: `DebeziumEnvelope` or
    `MaxwellEnvelope`, which describe the members.
    """

    @property
    def name(self) -> str: ...
    @property
    def columns(self) -> str: ...
    @property
    def value(self) -> str: ...
    @property
    def table(self) -> str | None: ...
    @property
    def layout(self) -> Literal["rows", "documents", "maxwell"]: ...
    @property
    def format(self) -> Literal["json", "avro"]: ...
    @property
    def schemas(self) -> Schemas: ...
    @property
    def timestamps(self) -> Literal["millis", "micros"] | None: ...
    @property
    def decimals(self) -> Literal["precise", "string"] | None: ...
    @property
    def unavailable(self) -> str | None: ...
    @property
    def on_unavailable(self) -> Literal["refuse", "keep"]: ...
    @property
    def on_missing(self) -> MissingRules | Literal["default"]: ...
    @property
    def completes(self) -> bool: ...


def missing_rules(form: Envelope) -> dict[str, MissingRule]:
    """Return, by column of the rows, what it means if a change lacks it."""
    names = Schema.from_ddl(form.columns, form.name).names
    given = form.on_missing
    rules: dict[str, MissingRule] = dict.fromkeys(names, "refuse")
    if given == "default":  # of an envelope that is being made
        return rules
    if isinstance(given, str):
        return dict.fromkeys(names, given)
    return rules | dict(given)


_DATE = r"^\d{4}-\d\d-\d\d$"


_ISO = r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,6}0*)?)?(Z|[+-]\d\d(:?\d\d)?)$"


_LAST_DAY = 9_999_999  # far beyond the year 9999, but within the range of a date


_EXACT_DIGITS = 15


_SCALES = 16_383  # PostgreSQL's


DATE_TYPES = ("date", "timestamp")


_VARIANTS = (*DATE_TYPES, "boolean")


_FLOATS = ("float", "double")


_INTEGERS = ("tinyint", "smallint", "int", "bigint")


def raw_row_type(schema: Schema) -> str:
    """Return the type to parse a row with: numbers as such, types with several encodings as
    variant, else strings.
    """
    types = (
        dict.fromkeys(_INTEGERS, "bigint")
        | dict.fromkeys(_FLOATS, "double")
        | dict.fromkeys(_VARIANTS, "variant")
    )
    columns = [
        f"{quote_name(field.name)}:{types.get(field.type, 'string')}" for field in schema.fields
    ]
    return f"struct<{','.join(columns)}>"


def convert_value(declared: Envelope, field: Field, raw: Column, text: Column) -> Column:
    """Return a value, parsed as `raw_row_type` says, with its declared type, null where it does not
    fit; `text` is the whole JSON.
    """
    if field.type in _INTEGERS:
        return raw.try_cast(field.type)
    if field.type in _FLOATS:
        value = raw.cast(field.type)
        infinity = F.lit(float("inf"))
        # An infinite value of JSON, which has no infinity, is a number that is too large. Avro has
        # infinity.
        fits = F.abs(value) != infinity
        if declared.format == "avro":
            fits |= F.abs(raw) == infinity
        return F.when(fits, value)
    if field.type in DATE_TYPES:
        value = convert_date(declared, field, raw)
        if field.type == "date":
            return F.when(F.unix_date(value).between(*DAYS), value)
        return F.when(F.unix_micros(value).between(*MICROS), value)
    if field.type == "boolean":
        # MySQL stores booleans as TINYINT(1), 0 or 1.
        number = F.when(is_whole_number(raw), raw_value_text(field, raw))
        sent = F.when(F.schema_of_variant(raw) == "BOOLEAN", F.try_variant_get(raw, "$", "boolean"))
        return F.coalesce(sent, F.when(number.isin("0", "1"), number == "1"))
    if field.type == "binary":
        value = F.try_to_binary(raw, F.lit("base64"))
        if declared.format == "json" and declared.layout != "documents":
            return F.when(~_is_number(field.name, raw, text), value)
        return value
    if field.type.startswith("decimal"):
        return _decimal(declared, field, raw, text)
    return raw


def raw_value_text(field: Field, raw: Column) -> Column:
    """Return a value as errors show it."""
    if field.type in _VARIANTS:
        return F.try_variant_get(raw, "$", "string")
    return raw.cast("string")


def is_whole_number(raw: Column) -> Column:
    """Return whether a JSON value is a whole number, and not a string."""
    return F.schema_of_variant(raw) == "BIGINT"


def convert_date(declared: Envelope, field: Field, raw: Column) -> Column:
    """Return the date or timestamp that the field declares, null if the value is none; its year
    may be out of range.
    """
    text = raw_value_text(field, raw)
    number = F.when(is_whole_number(raw), F.try_variant_get(raw, "$", "bigint"))
    if field.type == "date":
        days = F.when(F.abs(number) <= _LAST_DAY, F.date_from_unix_date(number.try_cast("int")))
        return F.coalesce(days, F.when(text.rlike(_DATE), text.try_cast("date")))
    written = F.when(text.rlike(_ISO), text.try_cast("timestamp"))
    if declared.timestamps is None:
        return written
    factor = F.lit({"millis": 1000, "micros": 1}[declared.timestamps])
    return F.coalesce(F.timestamp_micros(F.try_multiply(number, factor)), written)


def _decimal(declared: Envelope, field: Field, raw: Column, text: Column) -> Column:
    """Return a decimal exactly as it was sent, else null: JSON numbers with a fraction and many
    digits have been rounded by now, unlike quoted ones. A fraction longer than the type's scale
    must end in zeros.
    """
    _, _, scale_text = field.type.rstrip(")").partition(",")
    scale = int(scale_text)
    fraction = r"(\.0*)?"
    if scale:
        fraction = rf"(\.\d{{0,{scale}}}0*)?"
    if declared.format == "json" and declared.decimals == "precise":
        decoded = F.udf(_plain_decimals(scale), "string", useArrow=True)(raw)
        fits = decoded.rlike(rf"^-?\d+{fraction}$") & ~_is_number(field.name, raw, text)
        return F.when(fits, decoded.try_cast(field.type))
    plain = raw.rlike(rf"^[+-]?\d+{fraction}$")
    digits = F.length(F.regexp_replace(raw, r"[^\d]", ""))
    quoted = F.instr(text, F.concat(F.lit('"'), raw, F.lit('"'))) > 0
    is_exact = (digits <= _EXACT_DIGITS) | ~raw.contains(".") | quoted
    return F.when(plain & is_exact, raw.try_cast(field.type))


def _is_number(name: str, raw: Column, text: Column) -> Column:
    """Return whether a column's value is a number in the JSON `text`, where it is not quoted: some
    numbers look like base64.
    """
    as_text = F.concat(F.lit(rf'"\Q{name}\E"\s*:\s*"\Q'), raw, F.lit(r'\E"'))
    return raw.rlike(r"^-?\d+(\.\d+)?([eE][+-]?\d+)?$") & ~F.regexp_like(text, as_text)


# Spark's own decorator has no types either.
def _plain_decimals(scale: int):  # type: ignore[no-untyped-def]
    """Return a function that returns what Debezium's "precise" encoding of a decimal with this
    scale means, None for any other text.
    """

    def plain(text: str | None) -> str | None:
        """Return the decimal that a text encodes, or None."""
        if text is None:
            return None
        if text.startswith("{"):
            return decimal_from_variable_scale(text)
        return decimal_from_unscaled(text, scale)

    return plain


def decimal_from_variable_scale(text: str) -> str | None:
    """Return the decimal for `{"scale": 2, "value": base64}`, None for any other text.

    Debezium sends it for a `numeric` without precision, whose values each have their own scale.
    """
    try:
        parts = json.loads(text)
        scale = parts["scale"]
        value = parts["value"]
    except (ValueError, LookupError, TypeError):
        return None
    if type(scale) is not int or not isinstance(value, str):
        return None
    if len(parts) != 2 or abs(scale) > _SCALES:
        return None
    plain = decimal_from_unscaled(value, max(scale, 0))
    if plain is None or plain.strip("-") == "0":
        return plain
    return plain + "0" * -scale  # none, unless the scale is negative


def decimal_from_unscaled(text: str, scale: int) -> str | None:
    """Return the decimal for base64 of a big-endian, unscaled number, None for any other text, also
    for an empty one, and for a number of more digits than Python prints (4,300).
    """
    try:
        number = int.from_bytes(base64.b64decode(text, validate=True), "big", signed=True)
        digits = str(abs(number))  # raises ValueError for more digits, as printing them takes long
    except ValueError:
        return None
    if not text:
        return None
    digits = digits.zfill(scale + 1)
    if scale:
        digits = f"{digits[:-scale]}.{digits[-scale:]}"
    if number < 0:
        digits = f"-{digits}"
    return digits
