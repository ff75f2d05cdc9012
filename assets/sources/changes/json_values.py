"""Values as Debezium has them in JSON, with the types that are declared: exactly, or not at all."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from resources.schema import Field, Schema

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType, StructType

    from assets.sources.changes.debezium import DebeziumEnvelope

NUMBER = r"^-?\d{1,18}$"
_DATE = r"^\d{4}-\d\d-\d\d$"
_ISO = r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,6}0*)?)?(Z|[+-]\d\d(:?\d\d)?)$"
_LAST_MILLI = 253_402_300_799_999  # the end of the year 9999
_EXACT_DIGITS = 15
_INTEGERS = ("tinyint", "smallint", "int", "bigint")


def raw_form(schema: Schema) -> StructType:
    """Return how a row is read: numbers and booleans as such, anything else as a text."""
    from pyspark.sql.types import BooleanType, DoubleType, FloatType, LongType, StringType, StructType

    native: dict[str, DataType] = {"boolean": BooleanType(), "float": FloatType(), "double": DoubleType()}
    native |= dict.fromkeys(_INTEGERS, LongType())
    block = StructType()
    for field in schema.fields:
        block = block.add(field.name, native.get(field.type, StringType()))
    return block


def value_of(declared: DebeziumEnvelope, field: Field, raw: Column, text: Column) -> Column:
    """Return the value with its declared type, null where it does not fit; `text` is the whole JSON."""
    from pyspark.sql import functions as F

    if field.type in _INTEGERS:
        return raw.try_cast(field.type)
    if field.type == "date":
        days = F.when(raw.rlike(r"^-?\d{1,7}$"), F.date_from_unix_date(raw.try_cast("int")))
        return F.coalesce(days, F.when(raw.rlike(_DATE), raw.try_cast("date")))
    if field.type == "timestamp":
        written = F.when(raw.rlike(_ISO), raw.try_cast("timestamp"))
        if declared.timestamps is None:
            return written
        factor = 1000 if declared.timestamps == "millis" else 1
        number = F.when(raw.rlike(NUMBER), raw.try_cast("bigint"))
        last = _LAST_MILLI * 1000 // factor
        return F.coalesce(F.when(F.abs(number) <= last, F.timestamp_micros(number * factor)), written)
    if field.type == "binary":
        return F.try_to_binary(raw, F.lit("base64"))
    if field.type.startswith("decimal"):
        return _decimal(declared, field, raw, text)
    return raw


def _decimal(declared: DebeziumEnvelope, field: Field, raw: Column, text: Column) -> Column:
    """Return a decimal as it was sent, never rounded: JSON numbers of many digits are not exact any more here."""
    from pyspark.sql import functions as F

    scale = int(field.type.rstrip(")").split(",")[1])
    if declared.format == "json" and declared.decimals == "precise":
        raw = F.udf(_plain_decimals(scale), "string", useArrow=True)(raw)
        return raw.try_cast(field.type)
    fraction = rf"(\.\d{{0,{scale}}}0*)?" if scale else r"(\.0*)?"
    plain = raw.rlike(rf"^[+-]?\d+{fraction}$")
    digits = F.length(F.regexp_replace(raw, r"[^\d]", ""))
    quoted = F.instr(text, F.concat(F.lit('"'), raw, F.lit('"'))) > 0
    exact = (digits <= _EXACT_DIGITS) | ~raw.contains(".") | quoted
    return F.when(plain & exact, raw.try_cast(field.type))


def _plain_decimals(scale: int):  # type: ignore[no-untyped-def]  # Spark's own decorator has no types either
    def plain(text: str | None) -> str | None:
        return None if text is None else unscaled_text(text, scale)

    return plain


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
