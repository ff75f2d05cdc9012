"""Converts envelopes to changes of rows with Spark expressions.

    value -> JSON -> from_json -> op, before and after with their declared types -> none, one or two
    changes -> explode

Avro, MongoDB's documents and Maxwell's JSON are converted to Debezium's JSON first. Numbers are
parsed as such, so that strings in their place are found. Booleans, dates and timestamps are parsed
as variants, which tell numbers from strings. Decimals and binary values are parsed as strings,
whose encoding is declared. Of the row before, only the key and the columns of `order_by` are used,
because databases may leave out the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration import envelope_values
from dagster_adjunct.assets.declaration.change_formats import KEPT, PROBLEM, SNAPSHOT, path_column
from dagster_adjunct.assets.declaration.change_values import (
    NO_PATH,
    ORDERS,
    REPAIR,
    TRUNCATE,
    contains_unavailable,
    inserted_unavailable_reason,
    is_unavailable,
    mark_column,
    may_be_unavailable,
    nested_unavailable_reason,
    order_as_code,
    quote_column,
    unavailable_reason,
    unknown_operation_column,
)
from dagster_adjunct.assets.declaration.envelope_values import DATE_TYPES, Envelope
from dagster_adjunct.assets.declaration.extractors import metadata_columns
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.schemas.schema import Field, Schema, named_column, quote_name
from dagster_adjunct.resources.schemas.values import UTF8, YEARS
from dagster_adjunct.resources.streams.system import META, TOMBSTONE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


TEXT = "__text"
UNREAD = "__unread"
BAD = "__bad"


def with_envelope_json(declared: Envelope, records: DataFrame, what: str) -> DataFrame:
    """Return the records with the envelope as JSON in `__text`, and in `__unread` why its Avro
    can't be read.
    """
    if declared.format == "avro":
        records = envelope_values.with_avro_as_json(
            records, declared.value, declared.schemas, (TEXT, UNREAD), what
        )
    else:
        records = records.withColumn(TEXT, named_column(declared.value)).withColumn(
            UNREAD, F.lit(None).cast("string")
        )
    if declared.layout == "documents":
        return records.withColumn(TEXT, _document_envelope())
    if declared.layout == "maxwell":
        return records.withColumn(TEXT, _maxwell_envelope(declared.table))
    return records


# MongoDB: the row is a string with a document in extended JSON.

_DOCUMENTS = ("op", "source", "before", "after", "transaction", "ts_ms", "ts_us", "ts_ns")
# The order matters: `{"$date": {"$numberLong": "0"}}` is a number in a date. Within strings these
# quotes are escaped.
_EXTENDED = (
    (r'\{\s*"\$number(?:Long|Int|Double)"\s*:\s*"(-?\d[\d.eE+-]*)"\s*\}', "$1"),
    (r'\{\s*"\$(?:oid|numberDecimal|numberDouble|uuid|symbol)"\s*:\s*("[^"\\]*")\s*\}', "$1"),
    (r'\{\s*"\$date"\s*:\s*(-?\d+|"[^"\\]*")\s*\}', "$1"),
    (r'\{\s*"\$binary"\s*:\s*("[^"\\]*")\s*,\s*"\$type"\s*:\s*"[^"\\]*"\s*\}', "$1"),
    (
        r'\{\s*"\$binary"\s*:\s*\{\s*"base64"\s*:\s*("[^"\\]*")\s*,\s*"subType"\s*:\s*"[^"\\]*"\s*\}\s*\}',
        "$1",
    ),
)


def plain_extended_json(text: Column) -> Column:
    """Return a document of MongoDB's extended JSON as plain JSON: numbers, dates and ids as
    such, binary as base64.
    """
    for pattern, value in _EXTENDED:
        text = F.regexp_replace(text, pattern, value)
    return text


def plain_extended_key(text: Column) -> Column:
    """Return the value of a key in extended JSON as a string; text that is not JSON is returned
    unchanged.
    """
    return F.coalesce(
        F.get_json_object(F.concat(F.lit('{"k":'), plain_extended_json(text), F.lit("}")), "$.k"),
        text,
    )


def _document_envelope() -> Column:
    whole = _pieces(_DOCUMENTS)
    rows = {name: plain_extended_json(whole[name]) for name in ("before", "after")}
    nested = {name: whole[name] for name in ("source", "transaction")}
    return _envelope(
        whole, {name: whole[name] for name in ("op", "ts_ms", "ts_us", "ts_ns")}, nested | rows
    )


# Maxwell: {"type": "update", "data": the row, "old": the earlier values of changed columns}

_MAXWELL = ("database", "table", "type", "data", "old", "position", "gtid", "ts")
_OPERATIONS = {
    "insert": "c",
    "update": "u",
    "delete": "d",
    "bootstrap-insert": "r",
    "bootstrap-start": "m",
    "bootstrap-complete": "m",
    "table-create": "m",
    "table-alter": "m",
    "database-create": "m",
    "database-alter": "m",
}


def _maxwell_envelope(table: str | None) -> Column:
    whole = _pieces(_MAXWELL)
    operations = F.create_map(*[F.lit(part) for pair in _OPERATIONS.items() for part in pair])
    op = F.coalesce(operations[whole["type"]], whole["type"])
    if table is not None:  # a topic may have several tables
        other = F.coalesce(
            F.concat_ws(".", whole["database"], whole["table"]) != table, F.lit(False)
        )
        op = F.when(other, F.lit("m")).otherwise(op)
    deletes = whole["type"] == "delete"
    rows = {
        "after": F.when(~deletes, whole["data"]),
        "before": F.when(deletes, whole["data"]).otherwise(whole["old"]),
        "source": F.to_json(
            F.struct(*[whole[name].alias(name) for name in ("position", "gtid", "ts")]), _ALL
        ),
    }
    return _envelope(whole, {"op": op}, rows)


_ALL = {"ignoreNullFields": "false"}


def _pieces(names: tuple[str, ...]) -> Column:
    """Return a struct of these parts of the envelope as strings, nested ones as JSON.

    Its field BAD is not null if the text can't be parsed.
    """
    form = _bare_or_wrapped(",".join(f"{quote_name(name)}:string" for name in names))
    read = F.from_json(F.col(TEXT), form, {"columnNameOfCorruptRecord": BAD})
    inner = F.struct(*[read[name].alias(name) for name in names], read[BAD].alias(BAD))
    wrapped = F.struct(*[read["payload"][name].alias(name) for name in names], read[BAD].alias(BAD))
    return F.when(read["payload"].isNotNull(), wrapped).otherwise(inner)


def _envelope(whole: Column, plain: Mapping[str, Column], nested: Mapping[str, Column]) -> Column:
    """Return Debezium's JSON, made of `plain` parts, which are strings, and `nested` ones, which
    are JSON.

    Text that can't be read (see `_pieces`) is returned unchanged.
    """
    head = F.to_json(F.struct(*[value.alias(name) for name, value in plain.items()]), _ALL)
    text = F.substring(head, F.lit(1), F.length(head) - 1)
    for name, value in nested.items():
        text = F.concat(text, F.lit(f',"{name}":'), F.coalesce(value, F.lit("null")))
    return F.when(whole[BAD].isNull() & whole.isNotNull(), F.concat(text, F.lit("}"))).otherwise(
        F.col(TEXT)
    )


_PARSED = "__parsed"
_OP = "__op"
_RAW = "__raw_after"
_BEFORE = "__before"
_AFTER = "__after"
_RAW_BEFORE = "__raw_before"
_CHANGE = "__change"
_ROW = "__row"
_UNAVAILABLE = "__unavailable"
_INCREMENTAL = "__incremental"


def decode_envelopes(
    declared: Envelope,
    records: DataFrame,
    schema: Schema,
    what: str,
    *,
    key: tuple[str, ...],
    order_by: tuple[str, ...],
    comparable: bool,
) -> DataFrame:
    """Return the changes in these records, as `ChangeFormat.decode` describes them.

    They have the columns of `schema`, META, PROBLEM, SNAPSHOT, the paths in `order_by`, and KEPT if
    changes may leave out columns.
    """
    paths = [name for name in order_by if name not in schema.names]
    needed = tuple(field for field in schema.fields if field.name in key or field.name in order_by)
    old = Schema(needed or schema.fields)  # none is needed if an extractor computes the key
    own = [name for name in key if name in records.columns]
    records = with_envelope_json(declared, records, what)
    kept = metadata_columns(records.columns)
    carried = [F.col(name) for name in kept if name != TEXT]
    owned = [
        _own_key(declared, schema, name).alias(f"__own{index}") for index, name in enumerate(own)
    ]
    read = records.select(
        *carried, F.col(TEXT), *owned, _parse(declared, _fields_to_parse(schema, old, paths))
    )
    read = read.select(
        "*",
        _part("op").alias(_OP),
        _part("after").alias(_RAW),
        _before(declared, old).alias(_RAW_BEFORE),
        *[_part(*path.split(".")).alias(path_column(path)) for path in paths],
    )
    read = read.select(
        "*",
        _converted_row(declared, schema, _RAW).alias(_AFTER),
        _converted_row(declared, old, _RAW_BEFORE).alias(_BEFORE),
        _unavailable(declared, schema).alias(_UNAVAILABLE),
    )
    if declared.completes:
        read = read.withColumn(KEPT, _kept(declared, schema))
    read = read.withColumn(_INCREMENTAL, _is_incremental())
    absent = [_check_path(path, first=path == order_by[0]) for path in paths]
    unplaced = [_check_incremental(path) for path in paths if path in (order_by[0], "source.pos")]
    problem = F.coalesce(_problem(declared, schema, old, key, own, comparable), *unplaced, *absent)
    changes = _changes(schema, old, key, own).alias(_CHANGE)
    others = [F.col(name) for name in kept if name not in (TOMBSTONE, TEXT, UNREAD)]
    # By offset, a row of an incremental snapshot is in its place among the changes of its key:
    # Debezium leaves out rows that are changed while it reads them.
    below = (F.col(_OP) == "r") & ~F.col(_INCREMENTAL) if not order_by else F.col(_OP) == "r"
    read = read.select("*", problem.alias(PROBLEM)).withColumn(
        SNAPSHOT, F.coalesce(below, F.lit(False))
    )
    others += [F.col(name) for name in (SNAPSHOT, *map(path_column, paths))]
    others += [F.col(KEPT)] if declared.completes else []
    changed = read.select(*others, F.explode(changes).alias(_CHANGE))
    return changed.select(
        *[F.col(_CHANGE)[_ROW][name].alias(name) for name in schema.names],
        *others,
        F.col(_CHANGE)[TOMBSTONE].alias(TOMBSTONE),
        F.col(_CHANGE)[PROBLEM].alias(PROBLEM),
    )


def read_transactions(declared: Envelope, records: DataFrame, what: str) -> DataFrame:
    """Return the transaction of each record that is not a tombstone.

    The columns are META, `transaction` (its id, or null), `number` (the change's among those of its
    table in the transaction) and `readable` (whether the envelope could be parsed).
    """
    records = with_envelope_json(declared, records, what)
    parsed = _parse(declared, "transaction:struct<id:string,data_collection_order:string>")
    read = records.where(~F.col(TOMBSTONE)).select("*", parsed)
    readable = F.col(_PARSED).isNotNull() & F.col(_PARSED)[BAD].isNull()
    return read.select(
        *META,
        _part("transaction", "id").alias("transaction"),
        _part("transaction", "data_collection_order").alias("number"),
        readable.alias("readable"),
    )


def _fields_to_parse(schema: Schema, old: Schema, paths: Sequence[str]) -> str:
    """Return the fields of an envelope that are parsed, with their types, as the inside of a
    `struct<…>`.
    """
    texts = {path: f"{quote_name(path.removeprefix('source.'))}:string" for path in paths}
    source = [text for path, text in texts.items() if path.startswith("source.")]
    fields = [
        "op:string",
        f"after:{envelope_values.raw_row_type(schema)}",
        f"before:{envelope_values.raw_row_type(old)}",
    ]
    fields += [text for path, text in texts.items() if not path.startswith("source.")]
    return ",".join([*fields, *([f"source:struct<{','.join(source)}>"] if source else [])])


def _parse(declared: Envelope, fields: str) -> Column:
    """Return the value parsed as an envelope with these fields (see `_fields_to_parse`)."""
    # Only JSON that was converted from Avro may have NaN and infinity.
    options = {
        "columnNameOfCorruptRecord": BAD,
        "allowNonNumericNumbers": str(declared.format == "avro").lower(),
    }
    return F.from_json(F.col(TEXT), _bare_or_wrapped(fields), options).alias(_PARSED)


def _bare_or_wrapped(fields: str) -> str:
    """Return a type for values that are an envelope with these fields, or have it in `payload`,
    next to its schema.
    """
    return f"struct<{fields},payload:struct<{fields}>,{BAD}:string>"


def _part(*path: str) -> Column:
    """Return a part of the parsed envelope, or of its payload if it has one."""
    payload = F.col(_PARSED)["payload"]
    bare = F.col(_PARSED)
    for name in path:
        payload = payload[name]
        bare = bare[name]
    return F.when(F.col(_PARSED)["payload"].isNotNull(), payload).otherwise(bare)


def _before(declared: Envelope, old: Schema) -> Column:
    """Return the row before the change, completed for Maxwell, whose updates have only the
    changed columns of it.
    """
    before = _part("before")
    after = _part("after")
    if declared.layout != "maxwell":
        return before
    whole = F.struct(*[F.coalesce(before[name], after[name]).alias(name) for name in old.names])
    return F.when((_part("op") == "u") & after.isNotNull(), whole).otherwise(before)


def _own_key(declared: Envelope, schema: Schema, name: str) -> Column:
    """Return a column of the record's own key, which is extended JSON for MongoDB's connector."""
    documents = declared.layout == "documents" and schema.field(name).type == "string"
    return plain_extended_key(named_column(name)) if documents else named_column(name)


def _converted_row(declared: Envelope, schema: Schema, raw: str) -> Column:
    """Return the row in column `raw` with the types of `schema`; values that do not fit, or a
    missing row, are null.
    """
    values = [
        envelope_values.convert_value(declared, field, F.col(raw)[field.name], F.col(TEXT)).alias(
            field.name
        )
        for field in schema.fields
    ]
    return F.when(F.col(raw).isNotNull(), F.struct(*values))


def _problem(
    declared: Envelope,
    schema: Schema,
    old: Schema,
    key: tuple[str, ...],
    own: list[str],
    comparable: bool,
) -> Column:
    """Return the reason why a record's change can't be applied, null if it can."""
    op = F.col(_OP)
    writes = F.col(_OP).isin("c", "r", "u")
    unread = F.col(_PARSED).isNull() | F.col(_PARSED)[BAD].isNotNull()
    shape = F.lit(f"not {declared.name}: ")
    reasons = [
        F.col(UNREAD),
        F.when(F.col(TEXT).isNull(), F.lit(f"not {declared.name}: the value is null")),
        F.when(unread, _unreadable_reason(declared, schema, old)),
        F.when(op.isNull(), F.concat(shape, F.lit("it has no 'op': "), quote_column(F.col(TEXT)))),
        F.when(op == "t", F.lit(TRUNCATE)),
        F.when(~op.isin("c", "r", "u", "d", "m"), unknown_operation_column(op)),
        F.when(
            writes & F.col(_RAW).isNull(),
            F.concat(F.lit("operation "), quote_column(op), F.lit(" without the row after it")),
        ),
        F.when(
            (op == "d") & F.col(_RAW_BEFORE).isNull() & ~_has_own(key, own),
            F.lit(
                "a delete without the row before it, so its key is unknown (REPLICA IDENTITY is"
                " NOTHING?)"
            ),
        ),
        *_empty_reasons(declared, op),
        *_unknown_reasons(declared, schema, key),
        *[
            F.when(
                writes & ~F.array_contains(_UNAVAILABLE, field.name),
                _check_value(declared, field, _RAW, _AFTER),
            )
            for field in schema.fields
            if field.type not in _READ
        ],
        *[
            _check_value(declared, field, _RAW_BEFORE, _BEFORE)
            for field in old.fields
            if field.type not in _READ
        ],
        *[
            _check_surrogates(field, F.col(_RAW))
            for field in schema.fields
            if field.type == "string"
        ],
        *[
            _check_surrogates(field, F.col(_RAW_BEFORE))
            for field in old.fields
            if field.type == "string"
        ],
    ]
    reasons += _missing_reasons(declared, schema, key, writes)
    if own:
        reasons.append(_check_own_key(own))
    for name in key:
        unknown = (op == "u") & F.col(_BEFORE).isNotNull() & F.col(_BEFORE)[name].isNull()
        reasons.append(
            F.when(
                unknown & F.col(_AFTER)[name].isNotNull(),
                F.lit(f"null key column {name!r} before it"),
            )
        )
    if not comparable:
        reason = F.lit(
            "an update changes the key, and offsets of several partitions do not say which change"
            " of a key is newer: declare order_by (source.lsn, for example)"
        )
        reasons.append(F.when(_key_changes(key), reason))
    return F.coalesce(*reasons)


def _empty_reasons(declared: Envelope, op: Column) -> list[Column]:
    """Return the reasons for rows without any column, `{}`; what Maxwell sends as the row before
    may have none.
    """
    after = F.concat(
        F.lit("operation "), quote_column(op), F.lit(" with an empty row after it: 'after' is {}")
    )
    before = F.concat(
        F.lit("operation "), quote_column(op), F.lit(" with an empty row before it: 'before' is {}")
    )
    reasons = [F.when(op.isin("c", "r", "u") & (_row_text("after") == "{}"), after)]
    if declared.layout != "maxwell":
        reasons.append(F.when(op.isin("u", "d") & (_row_text("before") == "{}"), before))
    return reasons


def _row_text(side: str) -> Column:
    """Return the row on this side of the envelope as JSON."""
    bare = F.get_json_object(TEXT, f"$.{side}")
    wrapped = F.get_json_object(TEXT, f"$.payload.{side}")
    return F.when(F.col(_PARSED)["payload"].isNotNull(), wrapped).otherwise(bare)


def _missing_reasons(
    declared: Envelope, schema: Schema, key: tuple[str, ...], writes: Column
) -> list[Column]:
    """Return the reasons for rows after a change that lack a declared column.

    One under a name in another case is never taken for a missing one. A missing column of the key
    is null, which is found later.
    """
    names = F.coalesce(F.json_object_keys(_row_text("after")), _no_names())
    lowered = F.transform(names, F.lower)
    missing = F.array_except(F.array(*[F.lit(name) for name in schema.names]), names)
    alike = F.get(
        F.filter(missing, lambda name: F.array_contains(lowered, F.lower(name))), F.lit(0)
    )
    sent = F.get(F.filter(names, lambda name: F.lower(name) == F.lower(alike)), F.lit(0))
    reasons = [
        F.concat(
            F.lit("the row after it has no column '"),
            alike,
            F.lit("', but '"),
            sent,
            F.lit("' in another case"),
        )
    ]
    rules = envelope_values.missing_rules(declared)
    required = [name for name in schema.names if rules.get(name) == "refuse" and name not in key]
    if required:
        lacking = F.get(
            F.array_except(F.array(*[F.lit(name) for name in required]), names), F.lit(0)
        )
        advice = (
            "': send it, or declare on_missing='null' (it becomes null) or 'keep' (updates keep the"
            " stored value)"
        )
        reasons.append(F.concat(F.lit("the row after it has no column '"), lacking, F.lit(advice)))
    # The names are parsed only for rows in which a column is null.
    incomplete = F.lit(False)
    for name in schema.names:
        incomplete |= F.col(_RAW)[name].isNull()
    return [F.when(writes & F.col(_RAW).isNotNull() & incomplete, F.coalesce(*reasons))]


_FIELDS = "map<string,string>"


def _check_path(path: str, *, first: bool) -> Column:
    """Return the reason for a change whose envelope lacks a path of `order_by`; a null value is no
    problem.

    In a snapshot's row, all but the first path may be missing.
    """
    name = path.removeprefix("source.")
    whole = F.from_json(F.col(TEXT), _FIELDS)
    block = F.coalesce(F.from_json(whole["payload"], _FIELDS), whole)
    source = F.from_json(block["source"], _FIELDS)
    fields = block if name == path else source
    orders = F.create_map(
        *[F.lit(part) for pair in ORDERS.items() for part in (pair[0], order_as_code(pair[1]))]
    )
    names = F.nullif(F.array_join(F.array_sort(F.map_keys(fields)), ", "), F.lit(""))
    reason = F.concat(
        F.lit(f"{NO_PATH}no value to order by: it has no {path!r}, but "),
        mark_column(F.coalesce(names, F.lit("nothing"))),
    )
    advice = F.concat(F.lit("; changes of its connector take "), orders[source["connector"]])
    reason = F.concat(reason, F.coalesce(advice, F.lit("")))
    asked = F.col(path_column(path)).isNull() & F.col(_OP).isin("c", "r", "u", "d")
    asked = asked if first else asked & (F.col(_OP) != "r")
    return F.when(
        asked, F.when(~F.coalesce(F.map_contains_key(fields, name), F.lit(False)), reason)
    )


def _is_incremental() -> Column:
    """Return whether the change is a row of an incremental snapshot, which Debezium reads while
    it streams changes.
    """
    sent = F.coalesce(
        *[F.get_json_object(TEXT, f"$.{block}source.snapshot") for block in ("", "payload.")]
    )
    return F.coalesce((F.col(_OP) == "r") & (F.lower(sent) == "incremental"), F.lit(False))


_NOWHERE = "^[0:]*$"  # what connectors send in place of a position


def _check_incremental(path: str) -> Column:
    """Return the reason for a row of an incremental snapshot without a position in this path of
    `order_by`.
    """
    value = F.col(path_column(path))
    reason = (
        "no value to order by: it is a row of an incremental snapshot without a position in"
        f" {path!r}, so it may be older than a change of its key. {REPAIR}"
    )
    return F.when(
        F.col(_INCREMENTAL) & F.coalesce(value.rlike(_NOWHERE), F.lit(True)), F.lit(reason)
    )


_READ = ("string", "bigint")  # the types that from_json itself checks


def _unreadable_reason(declared: Envelope, schema: Schema, old: Schema) -> Column:
    """Return why Spark could not parse a value: it is not JSON, not an envelope, or a column has
    another type.

    The value is parsed again, with all columns as strings. One expression does this for all
    columns, and Spark only evaluates it for such values.
    """
    text = quote_column(F.col(TEXT))
    form = _bare_or_wrapped("after:map<string,string>,before:map<string,string>")
    again = F.from_json(F.col(TEXT), form, {"columnNameOfCorruptRecord": BAD})

    def reason_of(read: Column) -> Column:
        payload = F.coalesce(read["payload"], F.struct(read["after"], read["before"]))
        return F.coalesce(
            _unreadable_column_reason(payload["after"], _RAW, schema),
            _unreadable_column_reason(payload["before"], _RAW_BEFORE, old),
        )

    return F.coalesce(
        F.when(F.try_parse_json(F.col(TEXT)).isNull(), F.concat(F.lit("not JSON: "), text)),
        F.transform(F.array(again), reason_of)[0],
        F.concat(F.lit(f"not {declared.name}: "), text),
    )


def _unreadable_column_reason(sent: Column, raw: str, schema: Schema) -> Column:
    """Return the reason for the first column that could not be parsed with its declared type."""
    types = F.create_map(
        *[F.lit(part) for field in schema.fields for part in (field.name, field.type)]
    )
    read = F.coalesce(
        F.map_keys(F.from_json(F.to_json(F.col(raw)), "map<string,string>")), F.array()
    )
    lost = F.filter(
        F.map_entries(sent),
        lambda entry: (
            F.map_contains_key(types, entry["key"])
            & entry["value"].isNotNull()
            & ~F.array_contains(read, entry["key"])
        ),
    )
    first = F.get(lost, F.lit(0))
    kind = F.element_at(types, first["key"])
    reason = F.concat(
        F.lit("column '"),
        first["key"],
        F.lit("' is "),
        quote_column(first["value"]),
        F.lit(", declared "),
        kind,
    )
    return F.when(F.size(lost) > 0, reason)


def _misfit_reason(field: Field, sent: Column) -> Column:
    return F.concat(
        F.lit(f"column {field.name!r} is "), quote_column(sent), F.lit(f", declared {field.type}")
    )


def _check_value(declared: Envelope, field: Field, raw: str, converted: str) -> Column:
    value = F.col(raw)[field.name]
    sent = envelope_values.raw_value_text(field, value)
    reason = _misfit_reason(field, sent)
    if field.type in ("float", "double"):
        reason = F.lit(f"column {field.name!r} is a number too large for {field.type}")
    if field.type in DATE_TYPES:
        reason = F.concat(
            reason,
            F.when(
                envelope_values.convert_date(declared, field, value).isNotNull(),
                F.lit(f": {YEARS}"),
            ).otherwise(""),
        )
    if field.type == "timestamp" and declared.timestamps is None:
        reason = F.concat(
            reason,
            F.when(
                envelope_values.is_whole_number(value), F.lit("; timestamps= says what it counts")
            ).otherwise(""),
        )
    return F.when(sent.isNotNull() & F.col(converted)[field.name].isNull(), reason)


_HALF = (
    r"(?i)(?<!\\)(?:\\\\)*\\u"
    r"(?:d[89ab][0-9a-f]{2}(?!\\ud[c-f][0-9a-f]{2})|(?<!\\ud[89ab][0-9a-f]{2}\\u)d[c-f][0-9a-f]{2})"
)


def _check_surrogates(field: Field, row: Column) -> Column:
    """Return the reason for a string with a lone surrogate, which the JSON parser replaces by a
    question mark.
    """
    value = row[field.name]
    text = F.col(TEXT)
    reason = F.lit(f"column {field.name!r} has half of a character: {UTF8}")
    return F.when(value.contains("?") & text.contains("\\u") & text.rlike(_HALF), reason)


def _unavailable(declared: Envelope, schema: Schema) -> Column:
    """Return the names of the columns whose values are unavailable, as an array.

    In a snapshot's row, which is complete, the placeholder is an actual value. A created row can
    lack values, too, because Debezium sends an update of the key as a delete and a create.
    """
    placeholder = declared.unavailable
    if placeholder is None:
        fields = []
    else:
        fields = [field for field in schema.fields if may_be_unavailable(field.type)]
    # Raw binary values and decimals are strings.
    unknown = [
        F.when(is_unavailable(placeholder or "", F.col(_RAW)[field.name], "string"), field.name)
        for field in fields
    ]
    names = F.array_compact(F.array(*unknown)) if unknown else _no_names()
    return F.when(F.col(_OP).isin("c", "u"), names).otherwise(_no_names())


def _unknown_reasons(declared: Envelope, schema: Schema, key: tuple[str, ...]) -> list[Column]:
    """Return the reasons why a change with unavailable values can't be applied."""
    placeholder = declared.unavailable
    reasons = []
    for field in schema.fields:
        if placeholder is None:
            break
        unknown = F.array_contains(_UNAVAILABLE, field.name)
        raw = F.col(_RAW)[field.name]
        if may_be_unavailable(field.type) and declared.on_unavailable == "refuse":
            reasons.append(F.when(unknown, F.lit(unavailable_reason(placeholder, field.name))))
        elif may_be_unavailable(field.type):
            reasons.append(
                F.when(
                    unknown & (F.col(_OP) == "c"), F.lit(inserted_unavailable_reason(field.name))
                )
            )
        if field.type == "string":
            within = F.col(_OP).isin("c", "u") & ~unknown & contains_unavailable(placeholder, raw)
            reasons.append(
                F.when(within, F.lit(nested_unavailable_reason(placeholder, field.name)))
            )
    if declared.completes:
        reason = "the change gives the row another key and does not tell all of its columns: "
        names = F.concat(F.lit(reason), F.array_join(KEPT, ", "))
        reasons.append(F.when(_key_changes(key) & (F.size(KEPT) > 0), names))
    return reasons


def _kept(declared: Envelope, schema: Schema) -> Column:
    """Return the names of the columns that keep their stored values, as an array; in inserts,
    the unavailable ones.
    """
    kept = F.col(_UNAVAILABLE)
    rules = envelope_values.missing_rules(declared)
    keeping = [name for name in schema.names if rules.get(name) == "keep"]
    if keeping:
        row = F.when(
            F.col(_PARSED)["payload"].isNotNull(), F.get_json_object(TEXT, "$.payload.after")
        )
        given = F.json_object_keys(row.otherwise(F.get_json_object(TEXT, "$.after")))
        names = F.array(*[F.lit(name) for name in keeping])
        missing = F.array_except(names, F.coalesce(given, _no_names()))
        kept = F.when(F.col(_OP) == "u", F.array_union(kept, missing)).otherwise(kept)
    return kept


def _no_names() -> Column:
    return F.array().cast("array<string>")


def _check_own_key(own: list[str]) -> Column:
    """Return the reason for a row whose key differs from that of its record, so that it is in
    the wrong partition.
    """

    def equals(side: str) -> Column:
        equal = F.lit(True)
        for index, name in enumerate(own):
            equal &= F.col(f"__own{index}").eqNullSafe(F.col(side)[name])
        return F.col(side).isNotNull() & equal

    keys = F.to_json(
        F.struct(*[F.col(f"__own{index}").alias(name) for index, name in enumerate(own)])
    )
    rows = F.col(_AFTER).isNotNull() | F.col(_BEFORE).isNotNull()
    return F.when(
        rows & F.col(_OP).isin("c", "r", "u", "d") & ~equals(_AFTER) & ~equals(_BEFORE),
        F.concat(
            F.lit("the record's own key is "),
            mark_column(keys),
            F.lit(", and the row in it has another one"),
        ),
    )


def _has_own(key: tuple[str, ...], own: list[str]) -> Column:
    """Return whether the record has the whole key of the row in columns of its own, without
    nulls.
    """
    whole = F.lit(bool(key) and set(own) == set(key))
    for index in range(len(own)):
        whole &= F.col(f"__own{index}").isNotNull()
    return whole


def _key_changes(key: tuple[str, ...]) -> Column:
    """Return whether an update changes the key."""
    differs = F.lit(False)
    for name in key:
        differs |= ~F.col(_BEFORE)[name].eqNullSafe(F.col(_AFTER)[name])
    return F.coalesce((F.col(_OP) == "u") & F.col(_BEFORE).isNotNull() & differs, F.lit(False))


def _changes(schema: Schema, old: Schema, key: tuple[str, ...], own: list[str]) -> Column:
    """Return the changes of a record as an array of structs (row, tombstone, problem), null if
    there are none.
    """

    def change(row: Column, tombstone: bool, problem: Column) -> Column:
        return F.struct(row.alias(_ROW), F.lit(tombstone).alias(TOMBSTONE), problem.alias(PROBLEM))

    fine = F.lit(None).cast("string")
    known = {field.name for field in old.fields}
    nothing = [F.lit(None).cast(field.type).alias(field.name) for field in schema.fields]

    def deleted_column(field: Field) -> Column:
        """Return a column of the deleted row, of which only the record's own key may be known."""
        before = F.col(_BEFORE)[field.name] if field.name in known else F.lit(None).cast(field.type)
        if field.name in own:
            before = F.when(
                F.col(_BEFORE).isNull(), F.col(f"__own{own.index(field.name)}")
            ).otherwise(before)
        return before.alias(field.name)

    before = [deleted_column(field) for field in schema.fields]
    write = change(F.col(_AFTER), False, fine)
    delete = change(F.struct(*before), True, fine)
    bad = change(F.struct(*nothing), True, F.col(PROBLEM))
    return (
        F.when(
            F.col(TOMBSTONE), F.lit(None)
        )  # the tombstone after a delete; exploding null returns no row
        .when(F.col(PROBLEM).isNotNull(), F.array(bad))
        .when(F.col(_OP) == "m", F.lit(None))
        .when(F.col(_OP) == "d", F.array(delete))
        .when(_key_changes(key), F.array(delete, write))
        .otherwise(F.array(write))
    )
