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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration import envelope_values
from dagster_adjunct.assets.declaration.change_formats import KEPT, PROBLEM, SNAPSHOT, path_column
from dagster_adjunct.assets.declaration.change_values import (
    NO_PATH,
    ORDERS,
    REPAIR,
    TRUNCATE,
    concat_reason,
    contains_unavailable,
    is_true,
    is_unavailable,
    mark_column,
    may_be_unavailable,
    order_as_code,
    quote_column,
    unavailable_reasons,
    unknown_operation_column,
)
from dagster_adjunct.assets.declaration.envelope_values import DATE_TYPES, Envelope, MissingRule
from dagster_adjunct.assets.declaration.extractors import metadata_columns
from dagster_adjunct.assets.declaration.nested_envelope_values import (
    NESTED,
    NESTED_BEFORE,
    NESTED_BEFORE_PROBLEMS,
    NESTED_COLUMNS,
    NESTED_PROBLEMS,
    with_nested_values,
)
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.schemas.paths import column_of, split_path
from dagster_adjunct.resources.schemas.schema import Field, Schema, named_column, quote_name
from dagster_adjunct.resources.schemas.types import is_nested
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
        r'\{\s*"\$binary"\s*:\s*\{\s*"base64"\s*:\s*("[^"\\]*")\s*,\s*'
        r'"subType"\s*:\s*"[^"\\]*"\s*\}\s*\}',
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
    """Return the envelope of a change of a document, with the rows as JSON objects instead of
    texts.
    """
    pieces = _pieces(_DOCUMENTS)
    texts = {name: pieces[name] for name in ("op", "ts_ms", "ts_us", "ts_ns")}
    objects = {name: pieces[name] for name in ("source", "transaction")}
    for name in ("before", "after"):
        objects[name] = plain_extended_json(pieces[name])
    return _envelope(pieces, texts, objects)


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
    """Return an envelope of Maxwell's in the form of Debezium's; changes of other tables than
    `table` get the operation "m". A type that is not known stays as the operation, and is refused
    later.
    """
    pieces = _pieces(_MAXWELL)
    op = F.coalesce(_literals(_OPERATIONS)[pieces["type"]], pieces["type"])
    if table is not None:  # a topic may have several tables
        is_other = F.concat_ws(".", pieces["database"], pieces["table"]) != table
        op = F.when(is_true(is_other), "m").otherwise(op)
    deletes = pieces["type"] == "delete"
    rows = {
        "after": F.when(~deletes, pieces["data"]),
        "before": F.when(deletes, pieces["data"]).otherwise(pieces["old"]),
        "source": F.to_json(
            _struct({name: pieces[name] for name in ("position", "gtid", "ts")}), _ALL
        ),
    }
    return _envelope(pieces, {"op": op}, rows)


_ALL = {"ignoreNullFields": "false"}


def _pieces(names: tuple[str, ...]) -> Column:
    """Return a struct of these parts of the envelope, or of its payload, as strings: nested ones
    as JSON.

    Its field BAD is not null if the text can't be parsed.
    """
    form = _bare_or_wrapped(",".join(f"{quote_name(name)}:string" for name in names))
    read = F.from_json(F.col(TEXT), form, {"columnNameOfCorruptRecord": BAD})
    bare = {name: read[name] for name in names}
    wrapped = {name: read["payload"][name] for name in names}
    bad = {BAD: read[BAD]}
    return F.when(read["payload"].isNotNull(), _struct(wrapped | bad)).otherwise(
        _struct(bare | bad)
    )


def _struct(columns: Mapping[str, Column]) -> Column:
    """Return a struct of these columns under these names."""
    return F.struct(*[value.alias(name) for name, value in columns.items()])


def _envelope(pieces: Column, texts: Mapping[str, Column], objects: Mapping[str, Column]) -> Column:
    """Return Debezium's JSON, made of `texts` and of `objects`, which are JSON already.

    Text that can't be read into `pieces` (see `_pieces`) is returned unchanged.
    """
    head = F.to_json(_struct(texts), _ALL)
    text = F.substring(head, F.lit(1), F.length(head) - 1)  # without the closing brace
    for name, value in objects.items():
        text = F.concat(text, F.lit(f',"{name}":'), F.coalesce(value, F.lit("null")))
    return F.when(pieces[BAD].isNull() & pieces.isNotNull(), F.concat(text, F.lit("}"))).otherwise(
        F.col(TEXT)
    )


_PARSED = "__parsed"
_OP = "__op"
_RAW_AFTER = "__raw_after"
_BEFORE = "__before"
_AFTER = "__after"
_RAW_BEFORE = "__raw_before"
_CHANGE = "__change"
_ROW = "__row"
_UNAVAILABLE = "__unavailable"
_INCREMENTAL = "__incremental"


def _columns_of_deleted_rows(schema: Schema, paths: Sequence[str]) -> Schema:
    """Return the columns to read of rows before changes: those that these paths need.

    None is needed if an extractor computes the key. Then they are those that are not nested, or
    all.
    """
    needed = {column_of(path, schema.names) for path in paths}
    fields = [field for field in schema.fields if field.name in needed]
    if not fields:
        fields = [field for field in schema.fields if not is_nested(field.type)]
    if not fields:
        return schema
    return Schema(tuple(fields))


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
    old = _columns_of_deleted_rows(schema, (*key, *order_by))
    own = tuple(name for name in key if name in records.columns)
    decoding = _Decoding(declared, schema, old, key, own, order_by)
    records = with_envelope_json(declared, records, what)
    records = with_nested_values(records, declared, schema, TEXT)
    records = with_nested_values(records, declared, old, TEXT, "before")
    metadata = metadata_columns(records.columns)
    read = decoding.read(records).withColumn(PROBLEM, decoding.problem(comparable))
    read = read.withColumn(SNAPSHOT, decoding.is_below_changes())
    used_up = (TOMBSTONE, TEXT, UNREAD, *NESTED_COLUMNS)
    others = [name for name in metadata if name not in used_up]
    others += [SNAPSHOT, *map(path_column, decoding.paths)]
    if declared.completes:
        others.append(KEPT)
    changed = read.select(*others, F.explode(decoding.changes()).alias(_CHANGE))
    change = F.col(_CHANGE)
    return changed.select(
        *[change[_ROW][name].alias(name) for name in schema.names],
        *others,
        change[TOMBSTONE].alias(TOMBSTONE),
        change[PROBLEM].alias(PROBLEM),
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


def _parse(declared: Envelope, fields: str) -> Column:
    """Return the value parsed as an envelope with these fields (see `_Decoding.read`)."""
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


def _unwrapped(wrapped: Column, bare: Column) -> Column:
    """Return what the payload of the envelope has, if there is one, or else the envelope itself."""
    return F.when(F.col(_PARSED)["payload"].isNotNull(), wrapped).otherwise(bare)


def _part(*path: str) -> Column:
    """Return a part of the parsed envelope, or of its payload if it has one."""
    payload = F.col(_PARSED)["payload"]
    bare = F.col(_PARSED)
    for name in path:
        payload = payload[name]
        bare = bare[name]
    return _unwrapped(payload, bare)


def _row_text(side: str) -> Column:
    """Return the row on this side of the envelope as JSON."""
    wrapped = F.get_json_object(TEXT, f"$.payload.{side}")
    return _unwrapped(wrapped, F.get_json_object(TEXT, f"$.{side}"))


def _sent_names() -> Column:
    """Return the names of the columns in the row after the change."""
    return F.coalesce(F.json_object_keys(_row_text("after")), _no_names())


def _no_names() -> Column:
    """Return an empty array of texts."""
    return F.array().cast("array<string>")


def _array_of(names: Sequence[str]) -> Column:
    """Return an array of these texts."""
    return F.array(*map(F.lit, names))


def _first_of(names: Column) -> Column:
    """Return the first element of an array, null if it is empty."""
    return F.get(names, F.lit(0))


def _literals(values: Mapping[str, str]) -> Column:
    """Return a map of these texts."""
    return F.create_map(*map(F.lit, chain.from_iterable(values.items())))


def _is_op(*operations: str) -> Column:
    """Return whether the change has one of these operations: "c" creates a row, "r" is a row of a
    snapshot, "u" updates and "d" deletes one, "t" truncates the table, and "m" is a message, which
    changes no row.
    """
    return F.col(_OP).isin(*operations)


_READ = ("string", "bigint")  # the types that from_json itself checks


@dataclass(frozen=True, slots=True)
class _Decoding:
    """How the envelopes of a stream become changes of rows.

    `schema` are the columns of the rows, and `old` those of them that are used of the row before a
    change: those of the `key`, which has names and paths, and of `order_by`. `own` are the columns
    of the key that a record also has itself, next to its envelope; `read` puts the one at index N
    of `own` into the column `__ownN`.
    """

    declared: Envelope
    schema: Schema
    old: Schema
    key: tuple[str, ...]
    own: tuple[str, ...]
    order_by: tuple[str, ...]

    @property
    def paths(self) -> list[str]:
        """The names in `order_by` that are no columns of the rows."""
        return [name for name in self.order_by if name not in self.schema.names]

    def read(self, records: DataFrame) -> DataFrame:
        """Return the records with the parts of their envelopes in columns."""
        metadata = [name for name in metadata_columns(records.columns) if name != TEXT]
        own_key = [self._own_key(name).alias(f"__own{at}") for at, name in enumerate(self.own)]
        parsed = _parse(self.declared, self._fields_to_parse())
        read = records.select(*metadata, TEXT, *own_key, parsed)
        read = read.select(
            "*",
            _part("op").alias(_OP),
            _part("after").alias(_RAW_AFTER),
            self._row_before().alias(_RAW_BEFORE),
            *[_part(*path.split(".")).alias(path_column(path)) for path in self.paths],
        )
        read = read.select(
            "*",
            self._converted_row(self.schema, _RAW_AFTER).alias(_AFTER),
            self._converted_row(self.old, _RAW_BEFORE).alias(_BEFORE),
            self._unavailable_names().alias(_UNAVAILABLE),
        )
        if self.declared.completes:
            read = read.withColumn(KEPT, self._kept_names())
        return read.withColumn(_INCREMENTAL, _is_incremental())

    def is_below_changes(self) -> Column:
        """Return whether it is a row of a snapshot, which never replaces a streamed change."""
        # By offset, a row of an incremental snapshot is in its place among the changes of its key:
        # Debezium leaves out rows that are changed while it reads them.
        below = _is_op("r")
        if not self.order_by:
            below &= ~F.col(_INCREMENTAL)
        return is_true(below)

    def _fields_to_parse(self) -> str:
        """Return the fields of an envelope that are parsed, with their types, as the inside of a
        `struct<…>`.
        """
        fields = [
            "op:string",
            f"after:{envelope_values.raw_row_type(self.schema)}",
            f"before:{envelope_values.raw_row_type(self.old)}",
        ]
        source: list[str] = []
        for path in self.paths:
            name = path.removeprefix("source.")
            field = f"{quote_name(name)}:string"
            if name == path:
                fields.append(field)
            else:
                source.append(field)
        if source:
            fields.append(f"source:struct<{','.join(source)}>")
        return ",".join(fields)

    def _row_before(self) -> Column:
        """Return the row before the change, completed for Maxwell, whose updates have only the
        changed columns of it.
        """
        before = _part("before")
        after = _part("after")
        if self.declared.layout != "maxwell":
            return before
        completed = _struct(
            {name: F.coalesce(before[name], after[name]) for name in self.old.names}
        )
        return F.when((_part("op") == "u") & after.isNotNull(), completed).otherwise(before)

    def _own_key(self, name: str) -> Column:
        """Return a column of the record's own key, which is extended JSON for MongoDB's
        connector.
        """
        value = named_column(name)
        if self.declared.layout == "documents" and self.schema.field(name).type == "string":
            return plain_extended_key(value)
        return value

    def _converted_row(self, schema: Schema, raw: str) -> Column:
        """Return the row in column `raw` with the types of `schema`; values that do not fit, or a
        missing row, are null.
        """
        row = F.col(raw)
        values: dict[str, Column] = {}
        for field in schema.fields:
            if is_nested(field.type):
                values[field.name] = self._nested_value(field.name, raw)
                continue
            values[field.name] = envelope_values.convert_value(
                self.declared, field, row[field.name], F.col(TEXT)
            )
        return F.when(row.isNotNull(), _struct(values))

    def _nested_value(self, name: str, raw: str) -> Column:
        """Return a nested column of the row in column `raw`."""
        after = F.col(NESTED)[name]
        if raw == _RAW_AFTER:
            return after
        before = F.col(NESTED_BEFORE)[name]
        if self.declared.layout == "maxwell":
            return F.coalesce(before, after)
        return before

    def _key_value(self, side: str, name: str) -> Column:
        """Return a value of the key, by its name or path, in the row of this side."""
        value = F.col(side)
        if name in self.schema:
            return value[name]
        for step in split_path(name):
            value = value[step]
        return value

    def _unavailable_names(self) -> Column:
        """Return the names of the columns whose values are unavailable, as an array.

        In a snapshot's row, which is complete, the placeholder is an actual value. A created row
        can lack values, too, because Debezium sends an update of the key as a delete and a create.
        """
        placeholder = self.declared.unavailable
        unknown = []
        for field in self.schema.fields:
            if placeholder is not None and may_be_unavailable(field.type):
                # Raw binary values and decimals are strings.
                found = is_unavailable(placeholder, F.col(_RAW_AFTER)[field.name], "string")
                unknown.append(F.when(found, field.name))
        if not unknown:
            return _no_names()
        return F.when(_is_op("c", "u"), F.array_compact(F.array(*unknown))).otherwise(_no_names())

    def _kept_names(self) -> Column:
        """Return the names of the columns that keep their stored values, as an array: the
        unavailable ones, and in updates those that the row lacks and that are declared to be kept.
        """
        unavailable = F.col(_UNAVAILABLE)
        keeping = self._ruled("keep")
        if not keeping:
            return unavailable
        missing = F.array_except(_array_of(keeping), _sent_names())
        return F.when(_is_op("u"), F.array_union(unavailable, missing)).otherwise(unavailable)

    def _ruled(self, rule: MissingRule) -> list[str]:
        """Return the columns for which this rule says what it means if a change lacks them."""
        rules = envelope_values.missing_rules(self.declared)
        return [name for name in self.schema.names if rules.get(name) == rule]

    # -- why a change can't be applied

    def problem(self, comparable: bool) -> Column:
        """Return the reason why a record's change can't be applied, null if it can; of several
        reasons the first.

        `comparable` says whether positions order changes in different partitions.
        """
        reasons = [*self._shape_reasons(), *self._unknown_reasons(), *self._value_reasons()]
        reasons.append(self._missing_reason())
        if self.own:
            reasons.append(self._own_key_reason())
        for name in self.key:
            before = self._key_value(_BEFORE, name)
            after = self._key_value(_AFTER, name)
            unknown = _is_op("u") & F.col(_BEFORE).isNotNull() & before.isNull()
            reason = f"null key column {name!r} before it"
            reasons.append(F.when(unknown & after.isNotNull(), reason))
        if not comparable:
            reason = (
                "an update changes the key, and offsets of several partitions do not say which"
                " change of a key is newer: declare order_by (source.lsn, for example)"
            )
            reasons.append(F.when(self._key_changes(), reason))
        return F.coalesce(F.coalesce(*reasons), *self._order_reasons())

    def _order_reasons(self) -> Iterator[Column]:
        """Yield the reasons for changes that lack a path of `order_by`. A row of an incremental
        snapshot only needs positions in the first path, and in "source.pos".
        """
        for path in self.paths:
            if path in (self.order_by[0], "source.pos"):
                yield _incremental_reason(path)
        for path in self.paths:
            yield _absent_path_reason(path, first=path == self.order_by[0])

    def _shape_reasons(self) -> list[Column]:
        """Return the reasons for records that are no envelope, or lack a part of it.

        What Maxwell sends as the row before may have no column.
        """
        name = self.declared.name
        op = F.col(_OP)
        text = F.col(TEXT)
        operation = concat_reason("operation ", quote_column(op))
        parsed = F.col(_PARSED)
        is_keyless = _is_op("d") & F.col(_RAW_BEFORE).isNull() & ~self._has_own_key()
        no_row = concat_reason(operation, " without the row after it")
        no_column = concat_reason(operation, " with an empty row after it: 'after' is {}")
        reasons = [
            F.col(UNREAD),
            F.when(text.isNull(), f"not {name}: the value is null"),
            F.when(parsed.isNull() | parsed[BAD].isNotNull(), self._unreadable_reason()),
            F.when(op.isNull(), concat_reason(f"not {name}: it has no 'op': ", quote_column(text))),
            F.when(_is_op("t"), TRUNCATE),
            F.when(~_is_op("c", "r", "u", "d", "m"), unknown_operation_column(op)),
            F.when(_is_op("c", "r", "u") & F.col(_RAW_AFTER).isNull(), no_row),
            F.when(
                is_keyless,
                "a delete without the row before it, so its key is unknown (REPLICA IDENTITY is"
                " NOTHING?)",
            ),
            F.when(_is_op("c", "r", "u") & (_row_text("after") == "{}"), no_column),
        ]
        if self.declared.layout != "maxwell":
            no_column = concat_reason(operation, " with an empty row before it: 'before' is {}")
            reasons.append(F.when(_is_op("u", "d") & (_row_text("before") == "{}"), no_column))
        return reasons

    def _unreadable_reason(self) -> Column:
        """Return why Spark could not parse a value: it is not JSON, not an envelope, or a column
        has another type.

        The value is parsed again, with all columns as strings. One expression does this for all
        columns, and Spark only evaluates it for such values.
        """
        text = quote_column(F.col(TEXT))
        form = _bare_or_wrapped("after:map<string,string>,before:map<string,string>")
        again = F.from_json(F.col(TEXT), form, {"columnNameOfCorruptRecord": BAD})

        def reason_of(read: Column) -> Column:
            """Return the reason for a column of the value as it was parsed again."""
            payload = F.coalesce(read["payload"], F.struct(read["after"], read["before"]))
            return F.coalesce(
                _unreadable_column_reason(payload["after"], _RAW_AFTER, self.schema),
                _unreadable_column_reason(payload["before"], _RAW_BEFORE, self.old),
            )

        no_json = F.try_parse_json(F.col(TEXT)).isNull()
        return F.coalesce(
            F.when(no_json, concat_reason("not JSON: ", text)),
            F.transform(F.array(again), reason_of)[0],
            concat_reason(f"not {self.declared.name}: ", text),
        )

    def _unknown_reasons(self) -> list[Column]:
        """Return the reasons why a change with unavailable values can't be applied."""
        reasons: list[Column] = []
        placeholder = self.declared.unavailable
        if placeholder is not None:
            for field in self.schema.fields:
                is_unknown = F.array_contains(_UNAVAILABLE, field.name)
                within = contains_unavailable(placeholder, F.col(_RAW_AFTER)[field.name])
                found = {
                    "value": is_unknown,
                    "insert": is_unknown & _is_op("c"),
                    "part": _is_op("c", "u") & ~is_unknown & within,
                }
                keeps = self.declared.on_unavailable == "keep"
                whys = unavailable_reasons(placeholder, field.name, field.type, keeps=keeps)
                reasons += [F.when(found[what], why) for what, why in whys.items()]
        if self.declared.completes:
            names = concat_reason(
                "the change gives the row another key and does not tell all of its columns: ",
                F.array_join(KEPT, ", "),
            )
            reasons.append(F.when(self._key_changes() & (F.size(KEPT) > 0), names))
        return reasons

    def _value_reasons(self) -> Iterator[Column]:
        """Yield the reasons for values that do not fit their columns, or are texts with half of a
        character.
        """
        for field in self.schema.fields:
            if field.type not in _READ:
                is_known = _is_op("c", "r", "u") & ~F.array_contains(_UNAVAILABLE, field.name)
                yield F.when(is_known, self._misfit_reason(field, _RAW_AFTER, _AFTER))
        for field in self.old.fields:
            if field.type not in _READ:
                yield self._misfit_reason(field, _RAW_BEFORE, _BEFORE)
        for raw, schema in ((_RAW_AFTER, self.schema), (_RAW_BEFORE, self.old)):
            for field in schema.fields:
                if field.type == "string":
                    yield _surrogate_reason(field, raw)

    def _misfit_reason(self, field: Field, raw: str, converted: str) -> Column:
        """Return the reason for a value in the column `raw` that is null in the column `converted`,
        because it could not be converted to its declared type.
        """
        if is_nested(field.type):
            if raw == _RAW_AFTER:
                return F.col(NESTED_PROBLEMS)[field.name]
            return F.col(NESTED_BEFORE_PROBLEMS)[field.name]
        value = F.col(raw)[field.name]
        sent = envelope_values.raw_value_text(field, value)
        parts: list[str | Column]
        if field.type in ("float", "double"):
            parts = [f"column {field.name!r} is a number too large for {field.type}"]
        else:
            parts = [f"column {field.name!r} is ", quote_column(sent), f", declared {field.type}"]
        if field.type in DATE_TYPES:
            is_date = envelope_values.convert_date(self.declared, field, value).isNotNull()
            parts.append(F.when(is_date, f": {YEARS}").otherwise(""))
        if field.type == "timestamp" and self.declared.timestamps is None:
            is_number = envelope_values.is_whole_number(value)
            parts.append(F.when(is_number, "; timestamps= says what it counts").otherwise(""))
        is_lost = sent.isNotNull() & F.col(converted)[field.name].isNull()
        return F.when(is_lost, concat_reason(*parts))

    def _missing_reason(self) -> Column:
        """Return the reason for a row after a change that lacks a declared column.

        One under a name in another case is never taken for a missing one. A missing column of the
        key is null, which is found later.
        """
        sent = _sent_names()
        lowered = F.transform(sent, F.lower)
        missing = F.array_except(_array_of(self.schema.names), sent)
        # The first that is only missing under its own case, and the name that was sent for it.
        alike = _first_of(F.filter(missing, lambda name: F.array_contains(lowered, F.lower(name))))
        sent_alike = _first_of(F.filter(sent, lambda name: F.lower(name) == F.lower(alike)))
        lacks = "the row after it has no column '"
        reasons = [concat_reason(lacks, alike, "', but '", sent_alike, "' in another case")]
        in_key = [column_of(name, self.schema.names) for name in self.key]
        required = [name for name in self._ruled("refuse") if name not in in_key]
        if required:
            lacking = _first_of(F.array_except(_array_of(required), sent))
            advice = (
                "': send it, or declare on_missing='null' (it becomes null) or 'keep' (updates keep"
                " the stored value)"
            )
            reasons.append(concat_reason(lacks, lacking, advice))
        # The names are parsed only for rows in which a column is null.
        raw = F.col(_RAW_AFTER)
        has_null = F.lit(False)
        for name in self.schema.names:
            has_null |= raw[name].isNull()
        writes = _is_op("c", "r", "u") & raw.isNotNull()
        return F.when(writes & has_null, F.coalesce(*reasons))

    def _own_key_reason(self) -> Column:
        """Return the reason for a row whose key differs from that of its record, so that it is in
        the wrong partition.
        """
        own = {name: F.col(f"__own{at}") for at, name in enumerate(self.own)}

        def has_same_key(side: str) -> Column:
            """Return whether there is a row on this side, and it has the record's own key."""
            same = F.col(side).isNotNull()
            for name, value in own.items():
                same &= value.eqNullSafe(F.col(side)[name])
            return same

        has_row = F.col(_AFTER).isNotNull() | F.col(_BEFORE).isNotNull()
        differs = ~has_same_key(_AFTER) & ~has_same_key(_BEFORE)
        return F.when(
            has_row & _is_op("c", "r", "u", "d") & differs,
            concat_reason(
                "the record's own key is ",
                mark_column(F.to_json(_struct(own))),
                ", and the row in it has another one",
            ),
        )

    def _has_own_key(self) -> Column:
        """Return whether the record has the whole key of the row in columns of its own, without
        nulls.
        """
        has_all = F.lit(bool(self.key) and self.own == self.key)
        for at in range(len(self.own)):
            has_all &= F.col(f"__own{at}").isNotNull()
        return has_all

    def _key_changes(self) -> Column:
        """Return whether an update changes the key."""
        differs = F.lit(False)
        for name in self.key:
            before = self._key_value(_BEFORE, name)
            differs |= ~before.eqNullSafe(self._key_value(_AFTER, name))
        return is_true(_is_op("u") & F.col(_BEFORE).isNotNull() & differs)

    # -- the changes

    def changes(self) -> Column:
        """Return the changes of a record as an array of structs (row, tombstone, problem), null if
        there are none.
        """

        def change(row: Column, tombstone: bool, problem: Column) -> Column:
            """Return one change as a struct."""
            return _struct({_ROW: row, TOMBSTONE: F.lit(tombstone), PROBLEM: problem})

        no_problem = F.lit(None).cast("string")
        fields = self.schema.fields
        nulls = {field.name: F.lit(None).cast(field.type) for field in fields}
        deleted = {name: self._deleted_value(name, null) for name, null in nulls.items()}
        write = change(F.col(_AFTER), False, no_problem)
        delete = change(_struct(deleted), True, no_problem)
        bad = change(_struct(nulls), True, F.col(PROBLEM))
        return (
            F.when(F.col(TOMBSTONE), None)  # the one after a delete; exploding null returns no row
            .when(F.col(PROBLEM).isNotNull(), F.array(bad))
            .when(_is_op("m"), None)
            .when(_is_op("d"), F.array(delete))
            .when(self._key_changes(), F.array(delete, write))
            .otherwise(F.array(write))
        )

    def _deleted_value(self, name: str, null: Column) -> Column:
        """Return a column of the deleted row: as it was before, or for a delete without that row as
        it is in the record's own key. `null`, of the column's type, stands for what is not known.
        """
        if name in self.old:
            value = F.col(_BEFORE)[name]
        else:
            value = null
        if name not in self.own:
            return value
        own = F.col(f"__own{self.own.index(name)}")
        return F.when(F.col(_BEFORE).isNull(), own).otherwise(value)


_FIELDS = "map<string,string>"


def _absent_path_reason(path: str, *, first: bool) -> Column:
    """Return the reason for a change whose envelope lacks a path of `order_by`, and what it has
    instead; a null value is no problem.

    In a snapshot's row, all but the first path may be missing.
    """
    name = path.removeprefix("source.")
    message = F.from_json(F.col(TEXT), _FIELDS)
    envelope = F.coalesce(F.from_json(message["payload"], _FIELDS), message)
    source = F.from_json(envelope["source"], _FIELDS)
    if name == path:  # a field of the envelope itself
        fields = envelope
    else:
        fields = source
    orders = _literals({connector: order_as_code(order) for connector, order in ORDERS.items()})
    names = F.nullif(F.array_join(F.array_sort(F.map_keys(fields)), ", "), F.lit(""))
    advice = concat_reason("; changes of its connector take ", orders[source["connector"]])
    reason = concat_reason(
        f"{NO_PATH}no value to order by: it has no {path!r}, but ",
        mark_column(F.coalesce(names, F.lit("nothing"))),
        F.coalesce(advice, F.lit("")),
    )
    needing = ["c", "u", "d"]
    if first:
        needing.append("r")
    is_needed = F.col(path_column(path)).isNull() & _is_op(*needing)
    return F.when(is_needed, F.when(~is_true(F.map_contains_key(fields, name)), reason))


def _is_incremental() -> Column:
    """Return whether the change is a row of an incremental snapshot, which Debezium reads while
    it streams changes.
    """
    sent = F.coalesce(
        F.get_json_object(TEXT, "$.source.snapshot"),
        F.get_json_object(TEXT, "$.payload.source.snapshot"),
    )
    return is_true(_is_op("r") & (F.lower(sent) == "incremental"))


_NOWHERE = "^[0:]*$"  # what connectors send in place of a position


def _incremental_reason(path: str) -> Column:
    """Return the reason for a row of an incremental snapshot without a position in this path of
    `order_by`: null, or what connectors send in place of one.
    """
    value = F.col(path_column(path))
    return F.when(
        F.col(_INCREMENTAL) & F.coalesce(value.rlike(_NOWHERE), F.lit(True)),
        "no value to order by: it is a row of an incremental snapshot without a position in"
        f" {path!r}, so it may be older than a change of its key. {REPAIR}",
    )


def _unreadable_column_reason(sent: Column, raw: str, schema: Schema) -> Column:
    """Return the reason for the first column that could not be parsed with its declared type.

    `sent` is the row as a map of texts. Such a column has a value there and none in `raw`, the
    column in which it was parsed by type.
    """
    types = _literals({field.name: field.type for field in schema.fields})
    read = F.coalesce(
        F.map_keys(F.from_json(F.to_json(F.col(raw)), "map<string,string>")), F.array()
    )

    def is_lost(entry: Column) -> Column:
        """Return whether a column that was sent is declared, and was not parsed."""
        is_declared = F.map_contains_key(types, entry["key"])
        is_read = F.array_contains(read, entry["key"])
        return is_declared & entry["value"].isNotNull() & ~is_read

    lost = F.filter(F.map_entries(sent), is_lost)
    first = _first_of(lost)
    name = first["key"]
    kind = F.element_at(types, name)
    value = quote_column(first["value"])
    reason = concat_reason("column '", name, "' is ", value, ", declared ", kind)
    return F.when(F.size(lost) > 0, reason)


_HALF = (
    r"(?i)(?<!\\)(?:\\\\)*\\u"
    r"(?:d[89ab][0-9a-f]{2}(?!\\ud[c-f][0-9a-f]{2})|(?<!\\ud[89ab][0-9a-f]{2}\\u)d[c-f][0-9a-f]{2})"
)


def _surrogate_reason(field: Field, raw: str) -> Column:
    """Return the reason for a string with a lone surrogate, which the JSON parser replaces by a
    question mark.
    """
    text = F.col(TEXT)
    is_half = text.contains("\\u") & text.rlike(_HALF)
    return F.when(
        F.col(raw)[field.name].contains("?") & is_half,
        f"column {field.name!r} has half of a character: {UTF8}",
    )
