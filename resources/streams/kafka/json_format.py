"""JSON values: one object a message, read strictly."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.streams.kafka.codec import FAIL, Reader, Writer, as_schema, check_malformed
from dagster_adjunct.resources.streams.kafka.json_at_once import at_once
from dagster_adjunct.resources.streams.kafka.record_values import (
    Problems,
    Unfit,
    brief,
    columns_of,
    from_json,
    rows_of,
    to_texts,
)

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Json:
    """A JSON object a message; `schema` declares the fields that are read, as a Schema or as DDL.

    A field that is missing or null is null, one that is not declared is left out. A value that is not of its column's
    type makes the message malformed: nothing is taken for another type, rounded (but into FLOAT and DOUBLE) or cut.
    STRING columns take texts, and objects and lists as JSON text. DECIMAL takes numbers and texts, exactly. DATE and
    TIMESTAMP are ISO 8601 texts, timestamps with a zone; or whole numbers where `timestamps` says what they count.
    BINARY is base64. `names` has the field's name for columns that are called otherwise: {"deleted": "__deleted"}.
    """

    schema: Schema | str
    timestamps: Literal["millis", "micros"] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    malformed: str = FAIL

    def __post_init__(self) -> None:
        object.__setattr__(self, "schema", as_schema(self.schema, "a JSON format"))
        if self.timestamps not in (None, "millis", "micros"):
            raise ConfigurationError(
                f"a JSON format has timestamps={self.timestamps!r}: expected 'millis', 'micros' or None.",
                "Choose one.",
                argument="timestamps",
            )
        self.columns().select(self.names, "a JSON format")
        fields = [self.names.get(name, name) for name in self.columns().names]
        if twice := {name for name in fields if fields.count(name) > 1}:
            raise ConfigurationError(
                f"a JSON format has two columns of the field {min(twice)!r}.", "Leave one out.", argument="names"
            )
        check_malformed(self.malformed, self.columns(), "a JSON format")

    def columns(self) -> Schema:
        assert isinstance(self.schema, Schema)
        return self.schema

    def reader(self) -> Reader:
        schema = self.columns()
        converts = {field.name: from_json(field, self.timestamps) for field in schema.fields}
        exact = any(field.type.startswith("decimal") for field in schema.fields)
        named = dict(self.names)
        decode = json.JSONDecoder(parse_constant=_no_number, parse_float=Decimal if exact else float).decode

        quick = at_once(schema, named)

        def parse(message: bytes) -> dict[str, Any]:
            try:
                record = decode(message.decode())
            except UnicodeDecodeError as error:
                raise Unfit(f"not UTF-8 at byte {error.start}") from error
            except json.JSONDecodeError as error:
                raise Unfit(f"not JSON: {error.msg} at character {error.pos}") from error
            except (ValueError, RecursionError) as error:
                raise Unfit(f"not JSON: {str(error)[:60]}") from error
            if type(record) is not dict:
                raise Unfit(f"{brief(record)} where a JSON object belongs")
            return record | {column: record.get(name) for column, name in named.items()} if named else record

        def read(data: Sequence[bytes | None], problems: Problems) -> list[pa.Array]:
            if (whole := quick(data)) is not None:
                return whole
            return columns_of(rows_of(data, problems, parse), schema, converts, problems)

        return read

    def writer(self, what: str, subject: str) -> Writer:
        fields = self.columns().fields
        heads = [json.dumps(self.names.get(field.name, field.name), ensure_ascii=False) + ":" for field in fields]

        def write(columns: Sequence[pa.Array]) -> list[bytes]:
            texts = [
                _texts(column, field, f"{what}: column {field.name!r}", self.timestamps)
                for column, field in zip(columns, fields, strict=True)
            ]
            named = [[head + text for text in column] for head, column in zip(heads, texts, strict=True)]
            return [("{" + ",".join(row) + "}").encode() for row in zip(*named, strict=True)]

        return write

    def describe(self) -> str:
        return "JSON"


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number in JSON")


_quote: Callable[[str], str] = json.JSONEncoder(ensure_ascii=False).encode


def _texts(column: pa.Array, field: Field, what: str, timestamps: str | None) -> list[str]:
    """Return the values of a column as JSON."""
    import pyarrow as pa

    kind = field.type
    if kind in ("float", "double"):
        values = column.to_pylist()
        if any(value is not None and not math.isfinite(value) for value in values):
            raise SchemaMismatchError(
                f"{what} holds NaN or an infinity, which JSON has no form for.",
                "Write null there, or declare Avro.",
                column=field.name,
            )
        return ["null" if value is None else repr(value) for value in values]
    if kind == "timestamp" and timestamps is not None:
        unit = "ms" if timestamps == "millis" else "us"
        counted = column.cast(pa.timestamp(unit, tz="UTC"), safe=True).cast(pa.int64()).to_pylist()
        return ["null" if value is None else str(value) for value in counted]
    if kind == "binary":
        values = column.to_pylist()
        return ["null" if value is None else f'"{base64.b64encode(value).decode()}"' for value in values]
    texts = to_texts(column, kind)
    if kind in ("string", "date", "timestamp"):
        return ["null" if text is None else _quote(text) for text in texts]
    return ["null" if text is None else text for text in texts]
