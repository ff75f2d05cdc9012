"""The declarations of Debezium's and Maxwell's envelopes (the row before and after a change, the
operation, and its position in the source).

`envelope_parser.py` parses records by this declaration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack, cast

from dagster_adjunct.assets.declaration.change_formats import DecodeOptions
from dagster_adjunct.assets.declaration.change_values import PATH, PLACEHOLDER, check_placeholder
from dagster_adjunct.assets.declaration.envelope_values import (
    AvroSchemas,
    Envelope,
    MissingRules,
    missing_rules,
)
from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.parsed_columns import has_decimals
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_ENVELOPE = "a Debezium envelope"


class EnvelopeFormat:
    """The common part of the envelope formats: a record has an envelope in column `value`, its
    rows have `columns`.
    """

    __slots__ = ()

    marks_snapshots: ClassVar[bool] = True

    def schema(self, records: Schema, what: str) -> Schema:
        envelope = cast(Envelope, self)
        value = envelope.value
        kind = {"json": "string", "avro": "binary"}[envelope.format]
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
            if field.name not in records:
                continue
            own = records.field(field.name)
            if own.type != field.type:
                raise SchemaMismatchError(
                    f"{what}: column {field.name!r} of the rows in {value!r} is declared as"
                    f" {field.type}, but the record's own column of this name is"
                    f" {own.type}.",
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
        from dagster_adjunct.assets.declaration.envelope_parser import (
            decode_envelopes,  # when needed
        )

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
        self._check_format()
        _freeze_missing(self, declared)
        self._resolve_missing()
        _check_avro_columns(declared.names, tuple(self.schemas.values()))
        if self.documents and self.timestamps is None:
            object.__setattr__(self, "timestamps", "millis")
        self._check_decimals(declared)
        self._check_transactions()

    def _check_format(self) -> None:
        """Raise ConfigurationError unless there is an Avro schema exactly for the format "avro",
        and each is JSON.
        """
        if (self.format == "avro") != (self.avro_schema is not None):
            article = "an" if self.avro_schema else "no"
            raise ConfigurationError(
                f"{_ENVELOPE} has format={self.format!r} and {article} avro_schema.",
                "Give avro_schema with format='avro', and only with it.",
                argument="format",
            )
        for number, text in self.schemas.items():
            which = ""
            if number is not None:
                which = f" {number}"
            _check_avro(text, which)

    def _resolve_missing(self) -> None:
        """Replace on_missing="default", and reject "keep" for rows that are always complete."""
        completing = ""  # the argument by which rows are always complete, if there is one
        if self.documents:
            completing = "documents=True"
        elif self.format == "avro":
            completing = "format='avro'"
        if completing and "keep" in missing_rules(self).values():
            raise ConfigurationError(
                f"{_ENVELOPE} has {completing} and on_missing='keep': such rows are complete, so a"
                " column that is missing in one keeps no stored value.",
                "Leave on_missing out, or declare on_missing='null'.",
                argument="on_missing",
            )
        if self.on_missing == "default":
            # A document lacks a field that it has no value for; an Avro schema says which columns
            # there are.
            default = "null" if completing else "refuse"
            object.__setattr__(self, "on_missing", default)

    def _check_decimals(self, declared: Schema) -> None:
        """Raise ConfigurationError for decimals in JSON without a declared encoding."""
        if self.decimals is not None:
            return
        if self.documents or self.format != "json":
            return  # documents have decimals as strings, and Avro schemas say how they are encoded
        for field in declared.fields:
            if has_decimals(field):
                raise ConfigurationError(
                    f"{_ENVELOPE} declares {field.name!r} as {field.type}, but not how decimals are"
                    " encoded in JSON: '1234' may be a number, or base64 of one.",
                    "Add decimals='precise' (Debezium's default) or decimals='string', as in"
                    " decimal.handling.mode.",
                    argument="decimals",
                )

    def _check_transactions(self) -> None:
        """Raise ConfigurationError if one of `transactions` and `collection` is given without the
        other.
        """
        if (self.transactions is None) != (self.collection is None):
            raise ConfigurationError(
                f"{_ENVELOPE} has transactions={self.transactions!r} and"
                f" collection={self.collection!r}.",
                'Give both (transactions="lake.tx", collection="public.accounts"), or neither.',
                argument="transactions",
            )
        if self.transactions is not None:
            split_stream_name(self.transactions)

    name: ClassVar[str] = _ENVELOPE
    table: ClassVar[None] = None

    @property
    def layout(self) -> Literal["rows", "documents"]:
        """The form of the rows in an envelope."""
        if self.documents:
            return "documents"
        return "rows"

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
        usual = ["refuse"]
        if self.documents or self.schemas:
            usual.append("null")
        described = f"Debezium envelopes in {self.format} ({self.columns})"
        for name in ("on_unavailable", "on_missing"):
            rule = getattr(self, name)
            if rule not in usual:
                described += f", {name}={rule!r}"
        return described


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
        raise ConfigurationError(
            f"on_missing names the column {unknown!r}; declared are {', '.join(declared.names)}.",
            "Correct the name.",
            argument="on_missing",
            column=unknown,
        )
    object.__setattr__(form, "on_missing", tuple(sorted(rules.items())))


def _check_avro(text: str, which: str) -> None:
    """Raise ConfigurationError for an Avro schema that is not JSON."""
    try:
        json.loads(text)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{_ENVELOPE}: the Avro schema{which} is not JSON ({error}): {str(text)[:60]!r}.",
            "Give the text of the schema from the registry or the .avsc file.",
            argument="avro_schema",
        ) from error


def _check_avro_columns(columns: Sequence[str], schemas: Sequence[str]) -> None:
    """Raise ConfigurationError for a column that no row of the Avro schemas has, so that it would
    always be null.

    Nothing is checked without schemas, or if one has no record in `before` or `after`.
    """
    sent: set[str] = set()
    for text in schemas:
        names = _avro_row_columns(json.loads(text))
        if names is None:
            return
        sent |= names
    lacking = next((name for name in columns if name not in sent), None)
    if lacking is None or not schemas:
        return
    found = f"which have {', '.join(sorted(sent))}"
    for name in sorted(sent, reverse=True):
        if name.lower() == lacking.lower():
            found = f"but {name!r} in another case"
    raise ConfigurationError(
        f"{_ENVELOPE} declares column {lacking!r}, which is in no row of its Avro schemas,"
        f" {found}.",
        "Correct the name, leave the column out, or let the connector send it.",
        argument="columns",
        column=lacking,
    )


def _avro_row_columns(schema: Any) -> set[str] | None:
    """Return the columns of the rows in an envelope's Avro schema, None if it has no rows."""
    for side in _avro_fields(schema):
        if side.get("name") not in ("before", "after"):
            continue
        # The first has the record itself, the second may only name it.
        for kind in _list_kinds(side):
            if isinstance(kind, Mapping) and isinstance(kind.get("fields"), list):
                return {field["name"] for field in _avro_fields(kind) if "name" in field}
    return None


def _list_kinds(field: Mapping[str, Any]) -> list[Any]:
    """Return the types of an Avro field: those of a union, or its only one."""
    kinds = field.get("type")
    if isinstance(kinds, list):
        return kinds
    return [kinds]


def _avro_fields(record: Any) -> list[Mapping[str, Any]]:
    """Return the fields of a record in an Avro schema; none of anything else."""
    if not isinstance(record, Mapping):
        return []
    return [field for field in record.get("fields", ()) if isinstance(field, Mapping)]


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
            raise ConfigurationError(
                f"{_MAXWELL} has table={self.table!r}: expected DATABASE.TABLE.",
                'Write, for example, table="shop.items", or leave it out if the stream has one'
                " table.",
                argument="table",
            )

    @property
    def completes(self) -> bool:
        """Whether changes may leave out columns, which keep their stored values."""
        return "keep" in missing_rules(self).values()

    def orders(self, path: str) -> bool:
        return path in _MAXWELL_PATHS

    def describe(self) -> str:
        described = "Maxwell envelopes"
        if self.table is not None:
            described += f" of {self.table}"
        described += f" ({self.columns})"
        if self.on_missing != "refuse":
            described += f", on_missing={self.on_missing!r}"
        return described
