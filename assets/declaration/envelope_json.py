"""Converts envelopes to Debezium's JSON: from Avro, MongoDB's documents, and Maxwell's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from dagster_adjunct.resources.schemas.column_sql import F, named_column

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.assets.declaration.debezium import DebeziumEnvelope
    from dagster_adjunct.assets.declaration.maxwell import MaxwellEnvelope

if TYPE_CHECKING:
    Envelope: TypeAlias = DebeziumEnvelope | MaxwellEnvelope

TEXT, UNREAD, BAD = "__text", "__unread", "__bad"


def with_envelope_json(declared: Envelope, records: DataFrame, what: str) -> DataFrame:
    """Return the records with the envelope as JSON in `__text`, and in `__unread` why it can't be read."""
    if declared.format == "avro":
        from dagster_adjunct.assets.declaration.debezium import with_avro_as_json

        records = with_avro_as_json(records, declared.value, declared.schemas, (TEXT, UNREAD), what)
    else:
        records = records.withColumn(TEXT, named_column(declared.value)).withColumn(UNREAD, F.lit(None).cast("string"))
    if declared.layout == "documents":
        return records.withColumn(TEXT, _document_envelope())
    return records.withColumn(TEXT, _maxwell_envelope(declared.table)) if declared.layout == "maxwell" else records


# MongoDB: the row is a string with a document in extended JSON.

_DOCUMENTS = ("op", "source", "before", "after", "transaction", "ts_ms", "ts_us", "ts_ns")
# The order matters: `{"$date": {"$numberLong": "0"}}` is a number in a date. Within strings these quotes are escaped.
_EXTENDED = (
    (r'\{\s*"\$number(?:Long|Int|Double)"\s*:\s*"(-?\d[\d.eE+-]*)"\s*\}', "$1"),
    (r'\{\s*"\$(?:oid|numberDecimal|numberDouble|uuid|symbol)"\s*:\s*("[^"\\]*")\s*\}', "$1"),
    (r'\{\s*"\$date"\s*:\s*(-?\d+|"[^"\\]*")\s*\}', "$1"),
    (r'\{\s*"\$binary"\s*:\s*("[^"\\]*")\s*,\s*"\$type"\s*:\s*"[^"\\]*"\s*\}', "$1"),
    (r'\{\s*"\$binary"\s*:\s*\{\s*"base64"\s*:\s*("[^"\\]*")\s*,\s*"subType"\s*:\s*"[^"\\]*"\s*\}\s*\}', "$1"),
)


def plain_extended_json(text: Column) -> Column:
    """Return a document in MongoDB's extended JSON with plain values: numbers, dates, ids, and binary as base64."""
    for pattern, value in _EXTENDED:
        text = F.regexp_replace(text, pattern, value)
    return text


def plain_extended_key(text: Column) -> Column:
    """Return the value of a key in extended JSON as a string; text that is not JSON is returned unchanged."""
    return F.coalesce(F.get_json_object(F.concat(F.lit('{"k":'), plain_extended_json(text), F.lit("}")), "$.k"), text)


def _document_envelope() -> Column:
    whole = _pieces(_DOCUMENTS)
    rows = {name: plain_extended_json(whole[name]) for name in ("before", "after")}
    nested = {name: whole[name] for name in ("source", "transaction")}
    return _envelope(whole, {name: whole[name] for name in ("op", "ts_ms", "ts_us", "ts_ns")}, nested | rows)


# Maxwell: {"type": "update", "data": the row, "old": the earlier values of changed columns}

_MAXWELL = ("database", "table", "type", "data", "old", "position", "gtid", "ts")
_OPERATIONS = {
    "insert": "c", "update": "u", "delete": "d", "bootstrap-insert": "r", "bootstrap-start": "m",
    "bootstrap-complete": "m", "table-create": "m", "table-alter": "m", "database-create": "m", "database-alter": "m",
}  # fmt: skip


def _maxwell_envelope(table: str | None) -> Column:
    whole = _pieces(_MAXWELL)
    operations = F.create_map(*[F.lit(part) for pair in _OPERATIONS.items() for part in pair])
    op = F.coalesce(operations[whole["type"]], whole["type"])
    if table is not None:  # a topic may have several tables
        other = F.coalesce(F.concat_ws(".", whole["database"], whole["table"]) != table, F.lit(False))
        op = F.when(other, F.lit("m")).otherwise(op)
    deletes = whole["type"] == "delete"
    rows = {
        "after": F.when(~deletes, whole["data"]),
        "before": F.when(deletes, whole["data"]).otherwise(whole["old"]),
        "source": F.to_json(F.struct(*[whole[name].alias(name) for name in ("position", "gtid", "ts")]), _ALL),
    }
    return _envelope(whole, {"op": op}, rows)


_ALL = {"ignoreNullFields": "false"}


def _pieces(names: tuple[str, ...]) -> Column:
    """Return the parts of an envelope as strings, nested ones as JSON."""
    strings = ", ".join(f"`{name}` string" for name in names)
    form = f"{strings}, payload struct<{strings.replace('` ', '`:')}>, {BAD} string"
    read = F.from_json(F.col(TEXT), form, {"columnNameOfCorruptRecord": BAD})
    inner = F.struct(*[read[name].alias(name) for name in names], read[BAD].alias(BAD))
    wrapped = F.struct(*[read["payload"][name].alias(name) for name in names], read[BAD].alias(BAD))
    return F.when(read["payload"].isNotNull(), wrapped).otherwise(inner)


def _envelope(whole: Column, plain: Mapping[str, Column], nested: Mapping[str, Column]) -> Column:
    """Return an envelope with these parts as strings and these as JSON; unreadable text is returned unchanged."""
    head = F.to_json(F.struct(*[value.alias(name) for name, value in plain.items()]), _ALL)
    text = F.substring(head, F.lit(1), F.length(head) - 1)
    for name, value in nested.items():
        text = F.concat(text, F.lit(f',"{name}":'), F.coalesce(value, F.lit("null")))
    return F.when(whole[BAD].isNull() & whole.isNotNull(), F.concat(text, F.lit("}"))).otherwise(F.col(TEXT))
