"""Messages as they are: bytes, or text; and keys that are texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.kafka.codec import FAIL, Reader, Writer, check_malformed
from dagster_adjunct.resources.streams.kafka.record_values import (
    Problems,
    Unfit,
    columns_of,
    from_text,
    rows_of,
    to_texts,
)

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Raw:
    """The bytes as they are: `key BINARY, value BINARY`, or `value` alone where the topic declares a key format."""

    malformed: str = FAIL

    def __post_init__(self) -> None:
        if self.malformed != FAIL:
            raise ConfigurationError("raw bytes are never malformed.", "Leave malformed out.", argument="malformed")

    def columns(self) -> Schema:
        return Schema.of(value="binary")

    def reader(self) -> Reader:
        return _raw_read

    def writer(self, what: str, subject: str) -> Writer:
        return _raw_write

    def describe(self) -> str:
        return "raw"


@dataclass(frozen=True, slots=True)
class RawKey(Raw):
    """The key of a raw message as it is, in the column `key`."""

    def columns(self) -> Schema:
        return Schema.of(key="binary")


def _raw_read(data: Sequence[bytes | None], problems: Problems) -> list[pa.Array]:
    import pyarrow as pa

    return [pa.array(data, pa.binary())]


def _raw_write(columns: Sequence[pa.Array]) -> list[bytes]:
    return list(columns[0].to_pylist())


@dataclass(frozen=True, slots=True)
class Text:
    """The whole message as text, in one STRING column: what is in it, a Debezium envelope for example, is for later."""

    column: str = "value"
    malformed: str = FAIL

    def __post_init__(self) -> None:
        check_malformed(self.malformed, self.columns(), "a text format")

    def columns(self) -> Schema:
        return Schema.of({self.column: "string"})

    def reader(self) -> Reader:
        schema = self.columns()

        def parse(datum: bytes) -> dict[str, Any]:
            try:
                return {self.column: datum.decode()}
            except UnicodeDecodeError as error:
                raise Unfit(f"not UTF-8 at byte {error.start}") from error

        def read(data: Sequence[bytes | None], problems: Problems) -> list[pa.Array]:
            return columns_of(rows_of(data, problems, parse), schema, {}, problems)

        return read

    def writer(self, what: str, subject: str) -> Writer:
        def write(columns: Sequence[pa.Array]) -> list[bytes]:
            if columns[0].null_count:
                raise SchemaMismatchError(
                    f"{what}: column {self.column!r} is null in {columns[0].null_count} records, and a message without "
                    "a value is a tombstone.",
                    "Mark them by __tombstone, or leave them out.",
                    column=self.column,
                )
            return [text.encode() for text in columns[0].to_pylist()]

        return write

    def describe(self) -> str:
        return "text"


@dataclass(frozen=True, slots=True)
class KeyText:
    """A message key that is text: that of one column, or a JSON array of the texts of several.

    `KeyText("tailnum")`, `KeyText("id BIGINT")`, `KeyText("origin STRING, time_hour TIMESTAMP")`. Dates and timestamps
    are ISO 8601 in UTC, binary values base64. One column that is null is a message without a key.
    """

    key: str
    malformed: str = FAIL

    def __post_init__(self) -> None:
        for field in self.columns().fields:
            if field.type in ("float", "double"):
                raise ConfigurationError(
                    f"key column {field.name!r} is {field.type}, which has no single text.",
                    "Declare it DECIMAL.",
                    argument="key",
                    column=field.name,
                )

    def columns(self) -> Schema:
        text = self.key if " " in self.key.strip() else f"{self.key.strip()} STRING"
        return Schema.from_ddl(text, "a Kafka key")

    def reader(self) -> Reader:
        schema = self.columns()
        converts = {field.name: from_text(field) for field in schema.fields}

        def read(data: Sequence[bytes | None], problems: Problems) -> list[pa.Array]:
            return columns_of(rows_of(data, problems, partial(_parts, schema)), schema, converts, problems)

        return read

    def writer(self, what: str, subject: str) -> Writer:
        kinds = [field.type for field in self.columns().fields]

        def write(columns: Sequence[pa.Array]) -> list[bytes]:
            texts = [to_texts(column, kind) for column, kind in zip(columns, kinds, strict=True)]
            if len(texts) == 1:
                return [None if text is None else text.encode() for text in texts[0]]  # type: ignore[misc]
            made = zip(*texts, strict=True)
            return [json.dumps(parts, ensure_ascii=False, separators=(",", ":")).encode() for parts in made]

        return write

    def describe(self) -> str:
        return "a text" if len(self.columns().fields) == 1 else "a JSON array of texts"


def _parts(schema: Schema, data: bytes) -> dict[str, Any]:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise Unfit("not UTF-8") from error
    if len(schema.fields) == 1:
        return {schema.fields[0].name: text}
    try:
        parts = json.loads(text)
    except (ValueError, RecursionError):
        parts = None
    if not isinstance(parts, list) or len(parts) != len(schema.fields):
        raise Unfit(f"not a JSON array of {len(schema.fields)} texts")
    return dict(zip(schema.names, parts, strict=True))
