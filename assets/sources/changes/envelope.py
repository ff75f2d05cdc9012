"""From Debezium's envelopes to changes of rows, as Spark expressions.

    value -> from_json -> op, before and after with their declared types -> none, one or two changes -> explode

Numbers and booleans are read as such, so that a text where a number belongs is found; dates, timestamps, decimals and
binary values are read as texts, since what they mean is for the declaration to say. Of the row before only the key is
used: databases fill the rest of it, or not, as they are configured.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from assets.sources.changes.formats import ORDER, PROBLEM, TRUNCATE, named, shown, unknown_operation
from assets.sources.extractor import companions
from resources.schema import Field, Schema
from resources.streams.system import META, TOMBSTONE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

    from assets.sources.changes.debezium import DebeziumEnvelope

_TEXT, _UNREAD, _PARSED, _BAD = "__text", "__unread", "__parsed", "__bad"
_OP, _RAW, _BEFORE, _AFTER = "__op", "__raw_after", "__before", "__after"
_RAW_BEFORE, _WHERE, _CHANGE, _ROW = "__raw_before", "__where", "__change", "__row"
_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_NUMBER, _DATE = r"^-?\d{1,18}$", r"^\d{4}-\d\d-\d\d$"
_ISO = r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,6}0*)?)?(Z|[+-]\d\d(:?\d\d)?)$"
_LAST_MILLI = 253_402_300_799_999  # the end of the year 9999
_EXACT_DIGITS = 15


def changes_of(
    declared: DebeziumEnvelope,
    records: DataFrame,
    schema: Schema,
    what: str,
    *,
    key: tuple[str, ...],
    order_by: str | None,
    comparable: bool,
) -> DataFrame:
    """Return the changes in these records: `schema`, META, PROBLEM, and ORDER where `order_by` is no column."""
    from pyspark.sql import functions as F

    path = order_by if order_by is not None and order_by not in schema.names else None
    old = Schema(tuple(field for field in schema.fields if field.name in key or field.name == order_by))
    own = [name for name in key if name in records.columns]
    records = texts_of(declared, records, what)
    kept = companions(records)
    carried = [F.col(name) for name in kept if name != _TEXT]
    owned = [named(name).alias(f"__own{index}") for index, name in enumerate(own)]
    top = _top(_block(schema, old, path))
    parsed = F.from_json(F.col(_TEXT), top, {"columnNameOfCorruptRecord": _BAD})
    read = records.select(*carried, F.col(_TEXT), *owned, parsed.alias(_PARSED))
    read = read.select(
        "*",
        _part("op").alias(_OP),
        _part("after").alias(_RAW),
        _part("before").alias(_RAW_BEFORE),
        *([_part(*path.split(".")).alias(_WHERE)] if path else []),
    )
    read = read.select(
        "*",
        _converted(declared, schema, _RAW).alias(_AFTER),
        _converted(declared, old, _RAW_BEFORE).alias(_BEFORE),
    )
    problem = _problem(declared, schema, old, key, own, comparable)
    changes = _changes(schema, old, key).alias(_CHANGE)
    others = [F.col(name) for name in kept if name not in (TOMBSTONE, _TEXT, _UNREAD)]
    order = F.when(F.col(_WHERE).rlike(_NUMBER), F.col(_WHERE).try_cast("bigint")) if path else None
    told = read.select("*", problem.alias(PROBLEM))
    made = told.select(*others, *([order.alias(ORDER)] if order is not None else []), F.explode(changes).alias(_CHANGE))
    return made.select(
        *[F.col(_CHANGE)[_ROW][name].alias(name) for name in schema.names],
        *others,
        F.col(_CHANGE)[TOMBSTONE].alias(TOMBSTONE),
        F.col(_CHANGE)[PROBLEM].alias(PROBLEM),
        *([F.col(ORDER)] if order is not None else []),
    )


def texts_of(declared: DebeziumEnvelope, records: DataFrame, what: str) -> DataFrame:
    """Return the records with the envelope as JSON in `__text`, and in `__unread` why it can't be had."""
    from pyspark.sql import functions as F

    if declared.format == "avro":
        from assets.sources.changes.avro_values import with_json

        return with_json(records, declared.value, declared.schemas, (_TEXT, _UNREAD), what)
    nothing = F.lit(None).cast("string")
    return records.withColumn(_TEXT, named(declared.value)).withColumn(_UNREAD, nothing)


def transactions_of(declared: DebeziumEnvelope, records: DataFrame, what: str) -> DataFrame:
    """Return of each record META, `transaction` (its id, or null), `number` in it, and whether it is `readable`."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import StringType, StructType

    transaction = StructType().add("id", StringType()).add("data_collection_order", StringType())
    block = StructType().add("transaction", transaction)
    records = texts_of(declared, records, what)
    parsed = F.from_json(F.col(_TEXT), _top(block), {"columnNameOfCorruptRecord": _BAD}).alias(_PARSED)
    read = records.where(~F.col(TOMBSTONE)).select("*", parsed)
    readable = F.col(_PARSED).isNotNull() & F.col(_PARSED)[_BAD].isNull()
    return read.select(
        *META,
        _part("transaction", "id").alias("transaction"),
        _part("transaction", "data_collection_order").alias("number"),
        readable.alias("readable"),
    )


# -- the form of the JSON


def _block(schema: Schema, old: Schema, path: str | None) -> StructType:
    """Return what is read of an envelope."""
    from pyspark.sql.types import StringType, StructType

    block = StructType().add("op", StringType()).add("after", _raw(schema)).add("before", _raw(old))
    if path:
        first, *rest = path.split(".")
        leaf: DataType = StringType()
        for name in reversed(rest):
            leaf = StructType().add(name, leaf)
        block = block.add(first, leaf)
    return block


def _top(block: StructType) -> StructType:
    """Return the envelope's form: bare, or as the payload beside a schema."""
    from pyspark.sql.types import StringType, StructType

    return StructType([*block.fields]).add("payload", block).add(_BAD, StringType())


def _raw(schema: Schema) -> StructType:
    from pyspark.sql.types import BooleanType, DoubleType, FloatType, LongType, StringType, StructType

    native: dict[str, DataType] = {"boolean": BooleanType(), "float": FloatType(), "double": DoubleType()}
    native |= dict.fromkeys(_INTEGERS, LongType())
    block = StructType()
    for field in schema.fields:
        block = block.add(field.name, native.get(field.type, StringType()))
    return block


def _part(*path: str) -> Column:
    """Return a part of the parsed envelope, of its payload where it has one."""
    from pyspark.sql import functions as F

    payload, bare = F.col(_PARSED)["payload"], F.col(_PARSED)
    for name in path:
        payload, bare = payload[name], bare[name]
    return F.when(F.col(_PARSED)["payload"].isNotNull(), payload).otherwise(bare)


# -- values


def _converted(declared: DebeziumEnvelope, schema: Schema, raw: str) -> Column:
    """Return the row with the types of `schema`; null where there is no row, and each value that does not fit."""
    from pyspark.sql import functions as F

    values = [_value(declared, field, F.col(raw)[field.name]).alias(field.name) for field in schema.fields]
    return F.when(F.col(raw).isNotNull(), F.struct(*values))


def _value(declared: DebeziumEnvelope, field: Field, raw: Column) -> Column:
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
        number = F.when(raw.rlike(_NUMBER), raw.try_cast("bigint"))
        last = _LAST_MILLI * 1000 // factor
        return F.coalesce(F.when(F.abs(number) <= last, F.timestamp_micros(number * factor)), written)
    if field.type == "binary":
        return F.try_to_binary(raw, F.lit("base64"))
    if field.type.startswith("decimal"):
        return _decimal(declared, field, raw)
    return raw


def _decimal(declared: DebeziumEnvelope, field: Field, raw: Column) -> Column:
    """Return a decimal as it was sent, never rounded: JSON numbers of many digits are not exact any more here."""
    from pyspark.sql import functions as F

    scale = int(field.type.rstrip(")").split(",")[1])
    if declared.format == "json" and declared.decimals == "precise":
        raw = F.udf(_plain_decimals(scale), "string", useArrow=True)(raw)
        return raw.try_cast(field.type)
    fraction = rf"(\.\d{{0,{scale}}}0*)?" if scale else r"(\.0*)?"
    plain = raw.rlike(rf"^[+-]?\d+{fraction}$")
    digits = F.length(F.regexp_replace(raw, r"[^\d]", ""))
    quoted = F.instr(F.col(_TEXT), F.concat(F.lit('"'), raw, F.lit('"'))) > 0
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


# -- what a record says


def _problem(
    declared: DebeziumEnvelope, schema: Schema, old: Schema, key: tuple[str, ...], own: list[str], comparable: bool
) -> Column:
    """Return why a record's change can't be applied, null where it can."""
    from pyspark.sql import functions as F

    op, writes = F.col(_OP), F.col(_OP).isin("c", "r", "u")
    unread = F.col(_PARSED).isNull() | F.col(_PARSED)[_BAD].isNotNull()
    shape = F.lit("not a Debezium envelope: ")
    reasons = [
        F.col(_UNREAD),
        F.when(F.col(_TEXT).isNull(), F.lit("not a Debezium envelope: the value is null")),
        F.when(unread, _unread(schema, old)),
        F.when(op.isNull(), F.concat(shape, F.lit("it has no 'op': "), shown(F.col(_TEXT)))),
        F.when(op == "t", F.lit(TRUNCATE)),
        F.when(~op.isin("c", "r", "u", "d", "m"), unknown_operation(op)),
        F.when(
            writes & F.col(_RAW).isNull(), F.concat(F.lit("operation "), shown(op), F.lit(" without the row after it"))
        ),
        F.when(
            (op == "d") & F.col(_RAW_BEFORE).isNull(),
            F.lit("a delete without the row before it: nothing says which row (REPLICA IDENTITY is NOTHING?)"),
        ),
        *[F.when(writes, _misfit(declared, field, _RAW, _AFTER)) for field in schema.fields],
        *[_misfit(declared, field, _RAW_BEFORE, _BEFORE) for field in old.fields],
        *[F.when(writes, _unavailable(declared, field)) for field in schema.fields if field.type in _UNKNOWABLE],
    ]
    if own:
        reasons.append(_foreign(own))
    if not comparable:
        told = F.lit(
            "an update changes the key, and offsets of several partitions do not say which change of a key is newer: "
            "declare order_by (source.lsn, for example)"
        )
        reasons.append(F.when(_moved(key), told))
    return F.coalesce(*reasons)


_UNKNOWABLE = ("string", "binary")


def _unread(schema: Schema, old: Schema) -> Column:
    """Return why Spark could not read a text: no JSON, a value of another type, or something else than an envelope."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import StringType, StructField, StructType

    def texts(columns: Schema) -> StructType:
        return StructType([StructField(field.name, StringType()) for field in columns.fields])

    block = StructType().add("after", texts(schema)).add("before", texts(old))
    again = F.from_json(F.col(_TEXT), _top(block), {"columnNameOfCorruptRecord": _BAD})
    payload = again["payload"]
    reasons = [F.when(F.try_parse_json(F.col(_TEXT)).isNull(), F.concat(F.lit("not JSON: "), shown(F.col(_TEXT))))]
    for part, raw, columns in (("after", _RAW, schema), ("before", _RAW_BEFORE, old)):
        for field in columns.fields:
            said = F.when(payload.isNotNull(), payload[part][field.name]).otherwise(again[part][field.name])
            lost = said.isNotNull() & F.col(raw)[field.name].isNull()
            reasons.append(F.when(lost, _told(field, said)))
    return F.coalesce(*reasons, F.concat(F.lit("not a Debezium envelope: "), shown(F.col(_TEXT))))


def _told(field: Field, said: Column) -> Column:
    from pyspark.sql import functions as F

    return F.concat(F.lit(f"column {field.name!r} is "), shown(said), F.lit(f", declared {field.type}"))


def _misfit(declared: DebeziumEnvelope, field: Field, raw: str, converted: str) -> Column:
    from pyspark.sql import functions as F

    said = F.col(raw)[field.name].cast("string")
    told = _told(field, said)
    if field.type == "timestamp" and declared.timestamps is None:
        told = F.concat(told, F.when(said.rlike(_NUMBER), F.lit("; timestamps= says what it counts")).otherwise(""))
    return F.when(F.col(raw)[field.name].isNotNull() & F.col(converted)[field.name].isNull(), told)


def _unavailable(declared: DebeziumEnvelope, field: Field) -> Column:
    from pyspark.sql import functions as F

    placeholder = declared.unavailable.encode() if field.type == "binary" else declared.unavailable
    return F.when(
        F.col(_AFTER)[field.name] == F.lit(placeholder),
        F.lit(f"column {field.name!r} is too large to be logged and was not changed: nothing says what it holds. Set "
              "REPLICA IDENTITY FULL in the source, or leave it out of columns"),
    )  # fmt: skip


def _foreign(own: list[str]) -> Column:
    """Return the reason for a row whose key is not that of its record: then it lies in the wrong partition."""
    from pyspark.sql import functions as F

    def equals(side: str) -> Column:
        equal = F.lit(True)
        for index, name in enumerate(own):
            equal &= F.col(f"__own{index}").eqNullSafe(F.col(side)[name])
        return F.col(side).isNotNull() & equal

    keys = F.to_json(F.struct(*[F.col(f"__own{index}").alias(name) for index, name in enumerate(own)]))
    return F.when(
        F.col(_OP).isin("c", "r", "u", "d") & ~equals(_AFTER) & ~equals(_BEFORE),
        F.concat(F.lit("the record's own key is "), keys, F.lit(", and the row in it has another one")),
    )


def _moved(key: tuple[str, ...]) -> Column:
    """Return whether an update changes the key."""
    from pyspark.sql import functions as F

    differs = F.lit(False)
    for name in key:
        differs |= ~F.col(_BEFORE)[name].eqNullSafe(F.col(_AFTER)[name])
    return F.coalesce((F.col(_OP) == "u") & F.col(_BEFORE).isNotNull() & differs, F.lit(False))


def _changes(schema: Schema, old: Schema, key: tuple[str, ...]) -> Column:
    """Return the changes of a record, as an array."""
    from pyspark.sql import functions as F

    def change(row: Column, tombstone: bool, problem: Column) -> Column:
        return F.struct(row.alias(_ROW), F.lit(tombstone).alias(TOMBSTONE), problem.alias(PROBLEM))

    fine = F.lit(None).cast("string")
    known = {field.name for field in old.fields}
    nothing = [F.lit(None).cast(field.type).alias(field.name) for field in schema.fields]
    before = [
        (F.col(_BEFORE)[field.name] if field.name in known else F.lit(None).cast(field.type)).alias(field.name)
        for field in schema.fields
    ]
    write = change(F.col(_AFTER), False, fine)
    delete = change(F.struct(*before), True, fine)
    bad = change(F.struct(*nothing), True, F.col(PROBLEM))
    return (
        F.when(F.col(TOMBSTONE), F.lit(None))  # what follows a delete; exploding null gives no row
        .when(F.col(PROBLEM).isNotNull(), F.array(bad))
        .when(F.col(_OP) == "m", F.lit(None))
        .when(F.col(_OP) == "d", F.array(delete))
        .when(_moved(key), F.array(delete, write))
        .otherwise(F.array(write))
    )
