"""Debezium's envelope, declared: the row before and after a change, the operation, and where it stood in the source."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, cast

from dagster_adjunct.assets.declaration.changes.change_order import PATH
from dagster_adjunct.assets.declaration.changes.unavailable import PLACEHOLDER, check_placeholder
from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.schema import Schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.assets.declaration.changes.envelope_texts import Envelope

_ENVELOPE = "a Debezium envelope"
AvroSchemas = str | Mapping[int, str] | tuple[tuple[int, str], ...]


class EnvelopeFormat:
    """What the formats of envelopes have in common: `columns` of rows in a column `value`, read by envelope.py."""

    __slots__ = ()

    tells_snapshots: ClassVar[bool] = True

    def schema(self, records: Schema, what: str) -> Schema:
        envelope = cast("Envelope", self)
        value, kind = envelope.value, "string" if envelope.format == "json" else "binary"
        field = records.field(value, f"{what}: the record")
        if field.type != kind:
            raise SchemaMismatchError(
                f"{what}: the record has column {value!r} as {field.type}, and envelopes in {envelope.format} are "
                f"{kind}.",
                "Name the column with the envelope in value=, or declare the right format=.",
                column=value,
            )
        declared = Schema.from_ddl(envelope.columns, what)
        for field in declared.fields:
            if field.name in records.names and records.field(field.name).type != field.type:
                raise SchemaMismatchError(
                    f"{what}: the rows in {value!r} have column {field.name!r} declared as {field.type}, and the "
                    f"record's own column of this name is {records.field(field.name).type}.",
                    "Declare both alike: rows are checked to have the key of their record.",
                    column=field.name,
                )
        return declared

    def keeps(self, columns: Sequence[str]) -> bool:
        """Never: an update that changes the key deletes a row of another partition."""
        return False

    def decode(
        self,
        records: DataFrame,
        schema: Schema,
        what: str,
        *,
        key: tuple[str, ...],
        order_by: tuple[str, ...],
        comparable: bool,
    ) -> DataFrame:
        from dagster_adjunct.assets.declaration.changes.envelope import changes_of

        return changes_of(
            cast("Envelope", self), records, schema, what, key=key, order_by=order_by, comparable=comparable
        )


@dataclass(frozen=True, slots=True)
class DebeziumEnvelope(EnvelopeFormat):
    """Envelopes in the column `value`: the row before a change and after it, the operation, the source's position.

    `columns` are those of the rows ("id BIGINT, name STRING"); what else a row has is left out. `format` is "json" (a
    STRING column; bare, or with the schema that JsonConverter puts beside the payload) or "avro" (a BINARY column).
    `avro_schema` is the schema of all values, or schemas by id where values begin with Confluent's five bytes.
    `timestamps` says what numbers in TIMESTAMP columns count ("millis", "micros"), None where they are ISO texts with
    a zone. `decimals` says how DECIMAL columns come in JSON: "precise" (base64 of the unscaled number, Debezium's
    default) or "string".

    `unavailable` is what Debezium sends for a large value that it does not know (its `unavailable.value.placeholder`),
    None where the source always knows (REPLICA IDENTITY FULL). With `on_unavailable="keep"` the dataset keeps the value
    that it has; "refuse" makes such a change a bad one. With `on_missing="keep"` an update changes only the columns
    that its row names, with "null" the others become null.

    `documents` says that the rows are documents, as MongoDB's connector sends them: texts of extended JSON,
    whose dates count milliseconds, and whose decimals are texts.

    `transactions` is the stream of Debezium's transaction metadata ("lake.tx") and `collection` the table's name in it
    ("public.accounts"): changes of one transaction then become visible together.
    """

    columns: str
    value: str = "value"
    format: Literal["json", "avro"] = "json"
    avro_schema: AvroSchemas | None = None
    timestamps: Literal["millis", "micros"] | None = None
    decimals: Literal["precise", "string"] | None = None
    unavailable: str | None = PLACEHOLDER
    on_unavailable: Literal["refuse", "keep"] = "refuse"
    on_missing: Literal["null", "keep"] = "null"
    transactions: str | None = None
    collection: str | None = None
    documents: bool = False

    def __post_init__(self) -> None:
        declared = Schema.from_ddl(self.columns, _ENVELOPE)
        for name, choices in (
            ("format", ("json", "avro")),
            ("timestamps", (None, "millis", "micros")),
            ("decimals", (None, "precise", "string")),
            ("on_missing", ("null", "keep")),
        ):
            check_choice(_ENVELOPE, name, getattr(self, name), choices)
        check_choice(_ENVELOPE, "documents", self.documents, (True, False))
        check_placeholder(self.unavailable, self.on_unavailable, _ENVELOPE)
        if isinstance(self.avro_schema, Mapping):
            # As pairs, so that formats can be compared, hashed and pickled.
            object.__setattr__(self, "avro_schema", tuple(sorted(self.avro_schema.items())))
        if (self.format == "avro") != (self.avro_schema is not None):
            raise ConfigurationError(
                f"{_ENVELOPE} has format={self.format!r} and {'an' if self.avro_schema else 'no'} avro_schema.",
                "Give avro_schema with format='avro', and only with it.",
                argument="format",
            )
        for number, text in self.schemas.items():
            _check_avro(text, "" if number is None else f" {number}")
        if self.on_missing == "keep" and (self.documents or self.format == "avro"):
            what = "documents=True" if self.documents else "format='avro'"
            raise ConfigurationError(
                f"{_ENVELOPE} has {what} and on_missing='keep': such rows come as a whole, so a column that a row does "
                "not have is not one that was left out.",
                "Leave on_missing out: then a column that is not there is null.",
                argument="on_missing",
            )
        if self.documents and self.timestamps is None:
            object.__setattr__(self, "timestamps", "millis")
        decimal = next((field.name for field in declared.fields if field.type.startswith("decimal")), None)
        if decimal is not None and not self.documents and self.format == "json" and self.decimals is None:
            raise ConfigurationError(
                f"{_ENVELOPE} declares {decimal!r} as a DECIMAL and not how decimals come in JSON: '1234' may be a "
                "number, or base64 of one.",
                "Say decimals='precise' (Debezium's default) or decimals='string', as decimal.handling.mode is set.",
                argument="decimals",
            )
        if (self.transactions is None) != (self.collection is None):
            raise ConfigurationError(
                f"{_ENVELOPE} has transactions={self.transactions!r} and collection={self.collection!r}.",
                'Give both (transactions="lake.tx", collection="public.accounts"), or neither.',
                argument="transactions",
            )
        if self.transactions is not None:
            split_stream_name(self.transactions)

    name: ClassVar[str] = _ENVELOPE
    table: ClassVar[None] = None

    @property
    def layout(self) -> Literal["rows", "documents"]:
        """How an envelope holds its rows."""
        return "documents" if self.documents else "rows"

    @property
    def completes(self) -> bool:
        """Whether changes may leave out columns, which keep what the dataset has."""
        return "keep" in (self.on_unavailable, self.on_missing)

    @property
    def schemas(self) -> dict[int | None, str]:
        """Return the Avro schemas by id; by None where values have no id."""
        if isinstance(self.avro_schema, str):
            return {None: self.avro_schema}
        assert not isinstance(self.avro_schema, Mapping)
        return dict(self.avro_schema or ())

    def orders(self, path: str) -> bool:
        return PATH.fullmatch(path) is not None

    def describe(self) -> str:
        keeps = [name for name in ("on_unavailable", "on_missing") if getattr(self, name) == "keep"]
        kept = "".join(f", {name}='keep'" for name in keeps)
        return f"Debezium envelopes in {self.format} ({self.columns}){kept}"


def check_choice(whose: str, argument: str, given: object, choices: Sequence[object]) -> None:
    """Refuse an argument that is none of these."""
    if given not in choices:
        raise ConfigurationError(
            f"{whose} has {argument}={given!r}: expected one of {', '.join(map(repr, choices))}.",
            "Choose one.",
            argument=argument,
        )


def _check_avro(text: str, which: str) -> None:
    try:
        json.loads(text)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{_ENVELOPE}: the Avro schema{which} is no JSON ({error}): {str(text)[:60]!r}.",
            "Give the schema's text, as the registry or the .avsc file has it.",
            argument="avro_schema",
        ) from error
