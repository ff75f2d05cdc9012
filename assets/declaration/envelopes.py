"""The declarations of Debezium's and Maxwell's envelopes (the row before and after a change, the
operation, and its position in the source), and the conversion of their values.

`envelope_parser.py` parses records by this declaration.
"""

from __future__ import annotations

import base64
import datetime as dt
import io
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack, cast
from uuid import UUID

from dagster_adjunct.assets.declaration.change_formats import DecodeOptions
from dagster_adjunct.assets.declaration.change_values import PATH, PLACEHOLDER, check_placeholder
from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import F, pa
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.optional_packages import import_package
from dagster_adjunct.resources.schemas.schema import Field, Schema, quote_name
from dagster_adjunct.resources.schemas.values import DAYS, MICROS
from dagster_adjunct.resources.spark.tasks import convert_in_tasks
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


Schemas = Mapping[int | None, str]
_ANY_SCALE = (  # Debezium's Avro record for decimals, each with a scale of its own
    "VariableScaleDecimal"
)
_HEADER = struct.Struct(">bI")  # Confluent's: a zero, then the schema's id
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
    read = partial(_read, index=given.index(value), schemas=schemas, what=what)
    columns = [(field.name, field.dataType.simpleString()) for field in records.schema.fields]
    return convert_in_tasks(records, read, [*columns, *((name, "string") for name in names)])


def _read(
    batches: Iterator[pa.RecordBatch], index: int, schemas: Schemas, what: str
) -> Iterator[pa.RecordBatch]:
    by_id = avro_readers(schemas, what)
    for batch in batches:
        converted = [json_from_avro(data, by_id) for data in batch.column(index).to_pylist()]
        columns = [
            *batch.columns,
            *(pa.array([pair[side] for pair in converted], pa.string()) for side in (0, 1)),
        ]
        yield pa.RecordBatch.from_arrays(columns, [f"c{place}" for place in range(len(columns))])


def avro_readers(schemas: Schemas, what: str) -> dict[int | None, Callable[[bytes], Any]]:
    """Return, by schema id, the function that decodes a value; by None if values have no id.

    Raises ConfigurationError without fastavro, or for an invalid schema.
    """
    fastavro = import_package(f"{what}: the Avro of its changes", "fastavro", "avro")
    invalid = (fastavro.schema.SchemaParseException, fastavro.schema.UnknownType)

    def reader(text: str, which: int | None) -> Callable[[bytes], Any]:
        try:
            parsed = fastavro.parse_schema(json.loads(text))
        except (*invalid, LookupError, TypeError, ValueError) as error:
            name = "avro_schema" if which is None else f"avro_schema {which}"
            problem = f"{what}: {name} is not an Avro schema: {type(error).__name__}: {error}."
            step = "Copy it from the schema registry or the .avsc file."
            raise ConfigurationError(problem, step, argument="avro_schema") from error

        any_scale = _ANY_SCALE in text

        def read(data: bytes) -> Any:
            source = io.BytesIO(data)
            value = fastavro.schemaless_reader(source, parsed, None)
            if rest := len(data) - source.tell():
                raise ValueError(f"{rest} bytes are left over")
            return _with_variable_decimals(value) if any_scale else value

        return read

    return {which: reader(text, which) for which, text in schemas.items()}


def json_from_avro(
    data: bytes | None, by_id: Mapping[int | None, Callable[[bytes], Any]]
) -> tuple[str | None, str | None]:
    """Return (the Avro value as JSON, None), or (None, why it can't be read); two Nones for a
    null value.
    """
    if data is None:
        return None, None
    read = by_id.get(None)
    if read is None:
        if len(data) < _HEADER.size or data[0] != 0:
            return None, f"not Avro with a schema id: it begins with {data[:5].hex() or 'nothing'}"
        number = _HEADER.unpack_from(data)[1]
        read = by_id.get(number)
        data = data[_HEADER.size :]
        if read is None:
            known = ", ".join(map(str, sorted(filter(None, by_id)))) or "none"
            return None, f"the Avro schema {number} is not declared: avro_schema has {known}"
    try:
        return json.dumps(read(data), default=_json_default, ensure_ascii=False), None
    except _UNREADABLE as error:
        return None, f"not Avro of the declared schema: {type(error).__name__}: {error}"[:200]


def _with_variable_decimals(value: Any) -> Any:
    """Return a value with Debezium's VariableScaleDecimal (a `numeric` without precision)
    converted to decimals.
    """
    if isinstance(value, list):
        return [_with_variable_decimals(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"scale", "value"} and isinstance(value["value"], bytes):
        number = int.from_bytes(value["value"], "big", signed=True)
        return Decimal((int(number < 0), tuple(map(int, str(abs(number)))), -value["scale"]))
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


_ENVELOPE = "a Debezium envelope"
AvroSchemas = str | Mapping[int, str] | tuple[tuple[int, str], ...]
MissingRule = Literal["refuse", "null", "keep"]
MissingRules = MissingRule | Mapping[str, MissingRule] | tuple[tuple[str, MissingRule], ...]
"""What a missing column means: for all columns, or by column, the others being refused."""


class EnvelopeFormat:
    """The common part of the envelope formats: a record has an envelope in column `value`, its
    rows have `columns`.
    """

    __slots__ = ()

    marks_snapshots: ClassVar[bool] = True

    def schema(self, records: Schema, what: str) -> Schema:
        envelope = cast(Envelope, self)
        value = envelope.value
        kind = "string" if envelope.format == "json" else "binary"
        field = records.field(value, f"{what}: the record")
        if field.type != kind:
            raise SchemaMismatchError(
                f"{what}: the record's column {value!r} is {field.type}: expected {kind} for"
                f" envelopes in {envelope.format}.",
                "Name the column with the envelope in value=, or change format=.",
                column=value,
            )
        declared = Schema.from_ddl(envelope.columns, what)
        for field in declared.fields:
            if field.name in records.names and records.field(field.name).type != field.type:
                raise SchemaMismatchError(
                    f"{what}: column {field.name!r} of the rows in {value!r} is declared as"
                    f" {field.type}, but the record's own column of this name is"
                    f" {records.field(field.name).type}.",
                    "Declare both with one type: the key of a row is compared with that of its"
                    " record.",
                    column=field.name,
                )
        return declared

    def keeps(self, columns: Sequence[str]) -> bool:
        """Return False: an update of the key also deletes the row of the old key, which may be
        of another partition.
        """
        return False

    def decode(
        self, records: DataFrame, schema: Schema, what: str, **asked: Unpack[DecodeOptions]
    ) -> DataFrame:
        from dagster_adjunct.assets.declaration.envelope_parser import decode_envelopes

        return decode_envelopes(cast(Envelope, self), records, schema, what, **asked)


@validated
@dataclass(frozen=True, slots=True)
class DebeziumEnvelope(EnvelopeFormat):
    """Envelopes in the column `value`: the row before and after a change, the operation, the
    source's position.

    `columns` are those of the rows ("id BIGINT, name STRING"); others are ignored. `format` is
    "json" (a STRING column; with or without the schema that JsonConverter adds to the payload) or
    "avro" (a BINARY column). `avro_schema` is the schema of all values, or schemas by id if values
    begin with Confluent's five bytes. `timestamps` is the unit of numbers in TIMESTAMP columns
    ("millis", "micros"), None for ISO strings with a zone. `decimals` is the encoding of DECIMAL
    columns in JSON: "precise" (base64 of the unscaled number, Debezium's default) or "string".

    `unavailable` is what Debezium sends for a large value that it does not know (its
    `unavailable.value.placeholder`), None if the source always knows (REPLICA IDENTITY FULL). With
    `on_unavailable="keep"` the dataset keeps its stored value; with "refuse" such a change is a bad
    change.

    A row in JSON without one of the columns is a bad change, unless `on_missing` says that these
    become null ("null"), or that an update changes only the columns in its row ("keep"); {"note":
    "null"} says it of one column. In Avro, a column that a row's own schema lacks is null, and one
    that all schemas lack is refused when declared.

    `documents` is for rows of MongoDB's connector: documents in extended JSON, with dates in
    milliseconds and decimals as strings. A field that a document lacks is null, unless
    `on_missing="refuse"`.

    `transactions` is the stream of Debezium's transaction metadata ("lake.tx") and `collection` the
    table's name in it ("public.accounts"): changes of one transaction then become visible together.
    """

    columns: str
    value: str = "value"
    format: Literal["json", "avro"] = "json"
    avro_schema: AvroSchemas | None = None
    timestamps: Literal["millis", "micros"] | None = None
    decimals: Literal["precise", "string"] | None = None
    unavailable: str | None = PLACEHOLDER
    on_unavailable: Literal["refuse", "keep"] = "refuse"
    on_missing: MissingRules | Literal["default"] = "default"
    transactions: str | None = None
    collection: str | None = None
    documents: bool = False

    def __post_init__(self) -> None:
        declared = Schema.from_ddl(self.columns, _ENVELOPE)
        check_placeholder(self.unavailable, self.on_unavailable, _ENVELOPE)
        if isinstance(self.avro_schema, Mapping):
            # As pairs, so that formats are comparable, hashable and picklable.
            object.__setattr__(self, "avro_schema", tuple(sorted(self.avro_schema.items())))
        if (self.format == "avro") != (self.avro_schema is not None):
            problem = (
                f"{_ENVELOPE} has format={self.format!r} and"
                f" {'an' if self.avro_schema else 'no'} avro_schema."
            )
            step = "Give avro_schema with format='avro', and only with it."
            raise ConfigurationError(problem, step, argument="format")
        for number, text in self.schemas.items():
            _check_avro(text, "" if number is None else f" {number}")
        _freeze_missing(self, declared)
        if "keep" in missing_rules(self).values() and (self.documents or self.format == "avro"):
            what = "documents=True" if self.documents else "format='avro'"
            problem = (
                f"{_ENVELOPE} has {what} and on_missing='keep': such rows are complete, so a column"
                " that is missing in one keeps no stored value."
            )
            step = "Leave on_missing out, or declare on_missing='null'."
            raise ConfigurationError(problem, step, argument="on_missing")
        if self.on_missing == "default":
            # A document lacks a field that it has no value for; an Avro schema says which columns
            # there are.
            object.__setattr__(
                self,
                "on_missing",
                "refuse" if self.layout == "rows" and not self.schemas else "null",
            )
        _check_avro_columns(declared.names, tuple(self.schemas.values()))
        if self.documents and self.timestamps is None:
            object.__setattr__(self, "timestamps", "millis")
        decimal = next(
            (field.name for field in declared.fields if field.type.startswith("decimal")), None
        )
        if (
            decimal is not None
            and not self.documents
            and self.format == "json"
            and self.decimals is None
        ):
            raise ConfigurationError(
                f"{_ENVELOPE} declares {decimal!r} as a DECIMAL, but not how decimals are encoded"
                " in JSON: '1234' may be a number, or base64 of one.",
                "Add decimals='precise' (Debezium's default) or decimals='string', as in"
                " decimal.handling.mode.",
                argument="decimals",
            )
        if (self.transactions is None) != (self.collection is None):
            problem = (
                f"{_ENVELOPE} has transactions={self.transactions!r} and"
                f" collection={self.collection!r}."
            )
            step = 'Give both (transactions="lake.tx", collection="public.accounts"), or neither.'
            raise ConfigurationError(problem, step, argument="transactions")
        if self.transactions is not None:
            split_stream_name(self.transactions)

    name: ClassVar[str] = _ENVELOPE
    table: ClassVar[None] = None

    @property
    def layout(self) -> Literal["rows", "documents"]:
        """The form of the rows in an envelope."""
        return "documents" if self.documents else "rows"

    @property
    def completes(self) -> bool:
        """Whether changes may leave out columns, which keep their stored values."""
        return self.on_unavailable == "keep" or "keep" in missing_rules(self).values()

    @property
    def schemas(self) -> dict[int | None, str]:
        """The Avro schemas by id, or by None where values have no id."""
        if isinstance(self.avro_schema, str):
            return {None: self.avro_schema}
        assert not isinstance(self.avro_schema, Mapping)
        return dict(self.avro_schema or ())

    def orders(self, path: str) -> bool:
        return PATH.fullmatch(path) is not None

    def describe(self) -> str:
        rules = {name: getattr(self, name) for name in ("on_unavailable", "on_missing")}
        usual = ("refuse", "null") if self.documents or self.schemas else ("refuse",)
        kept = "".join(f", {name}={rule!r}" for name, rule in rules.items() if rule not in usual)
        return f"Debezium envelopes in {self.format} ({self.columns}){kept}"


def _freeze_missing(form: EnvelopeFormat, declared: Schema) -> None:
    """Store rules by column as pairs, so that formats are comparable and hashable.

    Raises ConfigurationError for a column that is not declared.
    """
    given = getattr(form, "on_missing", None)
    if given is None or isinstance(given, str):
        return
    rules = dict(given)
    unknown = next((name for name in rules if name not in declared), None)
    if unknown is not None:
        problem = (
            f"on_missing names the column {unknown!r}; declared are {', '.join(declared.names)}."
        )
        raise ConfigurationError(
            problem, "Correct the name.", argument="on_missing", column=unknown
        )
    object.__setattr__(form, "on_missing", tuple(sorted(rules.items())))


def missing_rules(form: DebeziumEnvelope | MaxwellEnvelope) -> dict[str, MissingRule]:
    """Return, by column of the rows, what it means if a change lacks it."""
    names = Schema.from_ddl(form.columns, form.name).names
    given = form.on_missing
    rules: dict[str, MissingRule] = dict.fromkeys(names, "refuse")
    if given == "default":  # of an envelope that is being made
        return rules
    return dict.fromkeys(names, given) if isinstance(given, str) else rules | dict(given)


def _check_avro(text: str, which: str) -> None:
    try:
        json.loads(text)
    except (TypeError, ValueError) as error:
        problem = f"{_ENVELOPE}: the Avro schema{which} is not JSON ({error}): {str(text)[:60]!r}."
        step = "Give the text of the schema from the registry or the .avsc file."
        raise ConfigurationError(problem, step, argument="avro_schema") from error


def _check_avro_columns(columns: Sequence[str], schemas: Sequence[str]) -> None:
    """Raise ConfigurationError for a column that no row of the Avro schemas has, so that it would
    always be null.

    A schema without a record in `before` or `after` is not checked.
    """
    known = [_avro_row_columns(json.loads(text)) for text in schemas]
    if not known or None in known:
        return
    sent = {name for names in known for name in names or ()}
    lacking = next((name for name in columns if name not in sent), None)
    if lacking is None:
        return
    alike = next((name for name in sorted(sent) if name.lower() == lacking.lower()), None)
    found = f"but {alike!r} in another case" if alike else f"which have {', '.join(sorted(sent))}"
    problem = (
        f"{_ENVELOPE} declares column {lacking!r}, which is in no row of its Avro schemas, {found}."
    )
    step = "Correct the name, leave the column out, or let the connector send it."
    raise ConfigurationError(problem, step, argument="columns", column=lacking)


def _avro_row_columns(schema: Any) -> set[str] | None:
    """Return the columns of the rows in an envelope's Avro schema, None if it has no rows."""
    fields = schema.get("fields", ()) if isinstance(schema, Mapping) else ()
    sides = [
        field
        for field in fields
        if isinstance(field, Mapping) and field.get("name") in ("before", "after")
    ]
    for side in sides:  # the first has the record itself, the second may only name it
        kinds = side.get("type")
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            if isinstance(kind, Mapping) and isinstance(kind.get("fields"), list):
                return {
                    field["name"]
                    for field in kind["fields"]
                    if isinstance(field, Mapping) and "name" in field
                }
    return None


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
    """Return a value with its declared type, null where it does not fit; `text` is the whole
    JSON.
    """
    if field.type in _INTEGERS:
        return raw.try_cast(field.type)
    if field.type in _FLOATS:
        value = raw.cast(field.type)
        infinity = F.lit(float("inf"))
        # An infinite value of JSON, which has no infinity, is a number that is too large. Avro has
        # infinity.
        sent = F.lit(False) if declared.format == "json" else F.abs(raw) == infinity
        return F.when((F.abs(value) != infinity) | sent, value)
    if field.type in DATE_TYPES:
        value = convert_date(declared, field, raw)
        count, ends = (
            (F.unix_date(value), DAYS) if field.type == "date" else (F.unix_micros(value), MICROS)
        )
        return F.when(count.between(*ends), value)
    if field.type == "boolean":
        # MySQL stores booleans as TINYINT(1), 0 or 1.
        number = F.when(is_whole_number(raw), raw_value_text(field, raw))
        sent = F.when(F.schema_of_variant(raw) == "BOOLEAN", F.try_variant_get(raw, "$", "boolean"))
        return F.coalesce(sent, F.when(number.isin("0", "1"), number == "1"))
    if field.type == "binary":
        return F.try_to_binary(raw, F.lit("base64"))
    if field.type.startswith("decimal"):
        return _decimal(declared, field, raw, text)
    return raw


def raw_value_text(field: Field, raw: Column) -> Column:
    """Return a value as errors show it."""
    return F.try_variant_get(raw, "$", "string") if field.type in _VARIANTS else raw.cast("string")


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
    factor = F.lit(1000 if declared.timestamps == "millis" else 1)
    return F.coalesce(F.timestamp_micros(F.try_multiply(number, factor)), written)


def _decimal(declared: Envelope, field: Field, raw: Column, text: Column) -> Column:
    """Return a decimal exactly as it was sent, else null: JSON numbers with many digits have
    been rounded by now.
    """
    scale = int(field.type.rstrip(")").split(",")[1])
    fraction = rf"(\.\d{{0,{scale}}}0*)?" if scale else r"(\.0*)?"
    if declared.format == "json" and declared.decimals == "precise":
        raw = F.udf(_plain_decimals(scale), "string", useArrow=True)(raw)
        return F.when(raw.rlike(rf"^-?\d+{fraction}$"), raw.try_cast(field.type))
    plain = raw.rlike(rf"^[+-]?\d+{fraction}$")
    digits = F.length(F.regexp_replace(raw, r"[^\d]", ""))
    quoted = F.instr(text, F.concat(F.lit('"'), raw, F.lit('"'))) > 0
    exact = (digits <= _EXACT_DIGITS) | ~raw.contains(".") | quoted
    return F.when(plain & exact, raw.try_cast(field.type))


def _plain_decimals(scale: int):  # type: ignore[no-untyped-def]  # Spark's own decorator has no types either
    def plain(text: str | None) -> str | None:
        if text is None:
            return None
        return (
            decimal_from_variable_scale(text)
            if text.startswith("{")
            else decimal_from_unscaled(text, scale)
        )

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
    if (
        len(parts) != 2
        or type(scale) is not int
        or not isinstance(value, str)
        or not -_SCALES <= scale <= _SCALES
    ):
        return None
    plain = decimal_from_unscaled(value, max(scale, 0))
    return plain if plain is None or scale >= 0 or plain.strip("-") == "0" else plain + "0" * -scale


def decimal_from_unscaled(text: str, scale: int) -> str | None:
    """Return the decimal for base64 of a big-endian, unscaled number, None for any other text."""
    try:
        number = int.from_bytes(base64.b64decode(text, validate=True), "big", signed=True)
    except ValueError:
        return None
    if not text:
        return None
    digits = str(abs(number)).zfill(scale + 1)
    sign = "-" if number < 0 else ""
    return f"{sign}{digits[:-scale]}.{digits[-scale:]}" if scale else f"{sign}{digits}"


_MAXWELL = "a Maxwell envelope"
_MAXWELL_PATHS = ("source.position", "source.gtid", "source.ts")


@validated
@dataclass(frozen=True, slots=True)
class MaxwellEnvelope(EnvelopeFormat):
    """Maxwell's JSON in the STRING column `value`: the row in `data`, and earlier values of changed
    columns in `old`.

    `columns` are those of the rows ("id BIGINT, name STRING"); others are ignored. `table` selects
    one ("shop.items") if the stream has several. `timestamps` is the unit of numbers in TIMESTAMP
    columns, None for ISO strings with a zone. A row without one of the columns is a bad change,
    unless `on_missing` says that these become null ("null"), or that an update changes only the
    columns in `data` ("keep"); {"note": "null"} says it of one column. Rows of a bootstrap never
    replace streamed changes, unless `order_by` is declared: `source.position` (Maxwell's
    output_binlog_position), `source.gtid` or `source.ts`.
    """

    columns: str
    value: str = "value"
    table: str | None = None
    timestamps: Literal["millis", "micros"] | None = None
    on_missing: MissingRules = "refuse"

    layout: ClassVar[Literal["maxwell"]] = "maxwell"
    format: ClassVar[Literal["json"]] = "json"
    decimals: ClassVar[Literal["string"]] = "string"
    unavailable: ClassVar[None] = None
    on_unavailable: ClassVar[Literal["refuse"]] = "refuse"
    schemas: ClassVar[Mapping[int | None, str]] = {}
    name: ClassVar[str] = _MAXWELL

    def __post_init__(self) -> None:
        _freeze_missing(self, Schema.from_ddl(self.columns, _MAXWELL))
        if self.table is not None and "." not in self.table:
            problem = f"{_MAXWELL} has table={self.table!r}: expected DATABASE.TABLE."
            step = (
                'Write, for example, table="shop.items", or leave it out if the stream has one'
                " table."
            )
            raise ConfigurationError(problem, step, argument="table")

    @property
    def completes(self) -> bool:
        """Whether changes may leave out columns, which keep their stored values."""
        return "keep" in missing_rules(self).values()

    def orders(self, path: str) -> bool:
        return path in _MAXWELL_PATHS

    def describe(self) -> str:
        table = "" if self.table is None else f" of {self.table}"
        missing = "" if self.on_missing == "refuse" else f", on_missing={self.on_missing!r}"
        return f"Maxwell envelopes{table} ({self.columns}){missing}"


Envelope = DebeziumEnvelope | MaxwellEnvelope
