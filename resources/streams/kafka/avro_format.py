"""Avro values: with a schema that is declared, and the writer's from a schema registry where there is one."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.streams.kafka.avro_types import (
    as_json,
    column_type,
    fields_of,
    from_avro,
    is_mixed,
    parsed,
    to_avro,
)
from dagster_adjunct.resources.streams.kafka.codec import FAIL, Reader, Writer, check_malformed
from dagster_adjunct.resources.streams.kafka.framing import HEADER_BYTES, header, number_of
from dagster_adjunct.resources.streams.kafka.record_values import Problems, Unfit, columns_of, rows_of
from dagster_adjunct.resources.streams.kafka.schema_registry import SchemaRegistry

if TYPE_CHECKING:
    import pyarrow as pa

# What bytes that are not of the schema raise in fastavro, whichever part of it stumbles over them.
_UNREADABLE = (
    ValueError, EOFError, LookupError, TypeError, ArithmeticError, MemoryError, AttributeError, OSError, RecursionError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Avro:
    """An Avro record a message; `schema` is the reader's schema, as JSON text.

    Without a registry messages are bare Avro of exactly this schema. With one they begin with Confluent's five bytes,
    and each is read as its writer's schema says, then resolved to this one: fields that it adds have their default.
    Columns are the record's fields: nested ones and unions of several types are JSON text in a STRING. Writing looks
    the schema up under `subject` (topic + "-value" or "-key" unless given), and registers it where it is not there.
    """

    schema: str
    registry: SchemaRegistry | None = None
    subject: str | None = None
    malformed: str = FAIL

    def __post_init__(self) -> None:
        check_malformed(self.malformed, self.columns(), "an Avro format")

    def columns(self) -> Schema:
        return Schema(tuple(Field(name, column_type(declared)) for name, declared in fields_of(self.schema)))

    def reader(self) -> Reader:
        schema = self.columns()
        declared = dict(fields_of(self.schema))
        converts = {name: convert for name, kind in declared.items() if (convert := from_avro(kind)) is not None}
        mixed = [name for name, kind in declared.items() if is_mixed(kind)]
        read_one = _by_id(self.schema, self.registry) if self.registry else _whole(parsed(self.schema), None)

        def parse(datum: bytes) -> dict[str, Any]:
            try:
                record = read_one(datum)
                for name in mixed:
                    record[name] = as_json(record[name])
            except Unfit:
                raise
            except _UNREADABLE as error:
                problem = "it ends too early" if isinstance(error, EOFError | IndexError) else type(error).__name__
                raise Unfit(f"not Avro of its schema: {problem}") from error
            return record

        def read(data: Sequence[bytes | None], problems: Problems) -> list[pa.Array]:
            return columns_of(rows_of(data, problems, parse), schema, converts, problems)

        return read

    def writer(self, what: str, subject: str) -> Writer:
        from fastavro import schemaless_writer

        schema, head = parsed(self.schema), b""
        if self.registry is not None:
            head = header(self.registry.register(self.subject or _needed(subject, what), self.schema))
        declared = fields_of(self.schema)

        def write(columns: Sequence[pa.Array]) -> list[bytes]:
            given = [to_avro(column, kind, name, f"{what}: column {name!r}")
                     for column, (name, kind) in zip(columns, declared, strict=True)]  # fmt: skip
            names = [name for name, _ in declared]
            made: list[bytes] = []
            for values in zip(*given, strict=True):
                out = io.BytesIO()
                out.write(head)
                try:
                    schemaless_writer(out, schema, dict(zip(names, values, strict=True)), strict=True)
                except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
                    raise SchemaMismatchError(
                        f"{what}: a record does not fit its Avro schema ({type(error).__name__}).",
                        "Look at nested columns, which must hold JSON of the declared form, and at enums.",
                        stream=what,
                    ) from error
                made.append(out.getvalue())
            return made

        return write

    def describe(self) -> str:
        return "Avro" if self.registry is None else "Avro of a schema registry"


def _needed(subject: str, what: str) -> str:
    if not subject:
        raise ConfigurationError(
            f"{what}: no subject is known for its Avro schema.", "Give it: Avro(subject=…).", argument="subject"
        )
    return subject


def _whole(writer: Any, reader: Any) -> Callable[[bytes], dict[str, Any]]:
    from fastavro import schemaless_reader
    from fastavro.read import SchemaResolutionError

    def read(data: bytes) -> dict[str, Any]:
        source = io.BytesIO(data)
        try:
            record: Any = schemaless_reader(source, writer, reader)
        except SchemaResolutionError as error:
            raise Unfit(f"its writer's schema does not go with the declared one: {str(error)[:100]}") from error
        if rest := len(data) - source.tell():
            raise Unfit(f"not Avro of its schema: {rest} bytes are left over")
        return dict(record)

    return read


def _by_id(declared: str, registry: SchemaRegistry) -> Callable[[bytes], dict[str, Any]]:
    known: dict[int, Callable[[bytes], dict[str, Any]]] = {}
    reader = parsed(declared)

    def made(number: int) -> Callable[[bytes], dict[str, Any]]:
        try:
            registered = registry.schema(number)
        except SchemaMismatchError as error:
            raise Unfit(error.problem.rstrip(".")) from error
        if registered.kind != "AVRO":
            raise Unfit(f"schema {number} of the registry is {registered.kind}, not Avro")
        try:
            writer = parsed(registered.text, registered.references)
        except ConfigurationError as error:
            raise Unfit(f"schema {number} of the registry is no Avro schema") from error
        same = json.loads(registered.text) == json.loads(declared)
        return _whole(writer, None if same else reader)

    def read(data: bytes) -> dict[str, Any]:
        number = number_of(data)
        if number is None:
            raise Unfit(f"not Avro with a schema id: it begins with {data[:HEADER_BYTES].hex() or 'nothing'}")
        if number not in known:
            known[number] = made(number)
        return known[number](data[HEADER_BYTES:])

    return read
