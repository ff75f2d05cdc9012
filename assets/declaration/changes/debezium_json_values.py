"""Values as Debezium has them in JSON, with the types that are declared: exactly, or not at all."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING

from dagster_adjunct.resources.schemas.readable_values import DAYS, MICROS
from dagster_adjunct.resources.schemas.schema import Field, Schema

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType, StructType

    from dagster_adjunct.assets.declaration.changes.envelope_texts import Envelope

_DATE = r"^\d{4}-\d\d-\d\d$"
_ISO = r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,6}0*)?)?(Z|[+-]\d\d(:?\d\d)?)$"
_LAST_DAY = 9_999_999  # far beyond the year 9999, and no more than a date can hold
_EXACT_DIGITS = 15
_SCALES = 16_383  # PostgreSQL's
DATED = ("date", "timestamp")
_VARIANTS = (*DATED, "boolean")
_FLOATS = ("float", "double")
_INTEGERS = ("tinyint", "smallint", "int", "bigint")


def raw_form(schema: Schema) -> StructType:
    """Return how a row is read: numbers as such, what may come in several forms as either, all else as a text."""
    from pyspark.sql.types import DoubleType, LongType, StringType, StructType, VariantType

    native: dict[str, DataType] = dict.fromkeys(_INTEGERS, LongType())
    native |= dict.fromkeys(_FLOATS, DoubleType())
    native |= dict.fromkeys(_VARIANTS, VariantType())
    block = StructType()
    for field in schema.fields:
        block = block.add(field.name, native.get(field.type, StringType()))
    return block


def value_of(declared: Envelope, field: Field, raw: Column, text: Column) -> Column:
    """Return the value with its declared type, null where it does not fit; `text` is the whole JSON."""
    from pyspark.sql import functions as F

    if field.type in _INTEGERS:
        return raw.try_cast(field.type)
    if field.type in _FLOATS:
        value, infinity = raw.cast(field.type), F.lit(float("inf"))
        # JSON has no infinity: one that was read is a number that is too large. Avro has.
        sent = F.lit(False) if declared.format == "json" else F.abs(raw) == infinity
        return F.when((F.abs(value) != infinity) | sent, value)
    if field.type in DATED:
        value = dated(declared, field, raw)
        count, ends = (F.unix_date(value), DAYS) if field.type == "date" else (F.unix_micros(value), MICROS)
        return F.when(count.between(*ends), value)
    if field.type == "boolean":
        # MySQL has no booleans: TINYINT(1) is 0 or 1.
        number = F.when(is_number(raw), text_of(field, raw))
        sent = F.when(F.schema_of_variant(raw) == "BOOLEAN", F.try_variant_get(raw, "$", "boolean"))
        return F.coalesce(sent, F.when(number.isin("0", "1"), number == "1"))
    if field.type == "binary":
        return F.try_to_binary(raw, F.lit("base64"))
    if field.type.startswith("decimal"):
        return _decimal(declared, field, raw, text)
    return raw


def text_of(field: Field, raw: Column) -> Column:
    """Return a value as errors show it, null where there is none."""
    from pyspark.sql import functions as F

    return F.try_variant_get(raw, "$", "string") if field.type in _VARIANTS else raw.cast("string")


def is_number(raw: Column) -> Column:
    """Whether a value came as a whole number, without quotes."""
    from pyspark.sql import functions as F

    return F.schema_of_variant(raw) == "BIGINT"


def dated(declared: Envelope, field: Field, raw: Column) -> Column:
    """Return a date or timestamp of any year, null where it is none."""
    from pyspark.sql import functions as F

    text, number = text_of(field, raw), F.when(is_number(raw), F.try_variant_get(raw, "$", "bigint"))
    if field.type == "date":
        days = F.when(F.abs(number) <= _LAST_DAY, F.date_from_unix_date(number.try_cast("int")))
        return F.coalesce(days, F.when(text.rlike(_DATE), text.try_cast("date")))
    written = F.when(text.rlike(_ISO), text.try_cast("timestamp"))
    if declared.timestamps is None:
        return written
    factor = F.lit(1000 if declared.timestamps == "millis" else 1)
    return F.coalesce(F.timestamp_micros(F.try_multiply(number, factor)), written)


def _decimal(declared: Envelope, field: Field, raw: Column, text: Column) -> Column:
    """Return a decimal as it was sent, never rounded: JSON numbers of many digits are not exact any more here."""
    from pyspark.sql import functions as F

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
        return any_scale_text(text) if text.startswith("{") else unscaled_text(text, scale)

    return plain


def any_scale_text(text: str) -> str | None:
    """Return the decimal that `{"scale": 2, "value": base64}` stands for, None for what is none.

    Debezium sends it for a `numeric` without digits, whose values each have a scale of their own.
    """
    try:
        told = json.loads(text)
        scale, value = told["scale"], told["value"]
    except (ValueError, LookupError, TypeError):
        return None
    if len(told) != 2 or type(scale) is not int or not isinstance(value, str) or not -_SCALES <= scale <= _SCALES:
        return None
    plain = unscaled_text(value, max(scale, 0))
    return plain if plain is None or scale >= 0 or plain.strip("-") == "0" else plain + "0" * -scale


def unscaled_text(text: str, scale: int) -> str | None:
    """Return the decimal that base64 of a big-endian, unscaled number stands for; None for what is none."""
    try:
        number = int.from_bytes(base64.b64decode(text, validate=True), "big", signed=True)
    except ValueError:
        return None
    if not text:
        return None
    digits = str(abs(number)).zfill(scale + 1)
    sign = "-" if number < 0 else ""
    return f"{sign}{digits[:-scale]}.{digits[-scale:]}" if scale else f"{sign}{digits}"
