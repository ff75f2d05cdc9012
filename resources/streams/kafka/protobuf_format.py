"""Protobuf values: dynamic messages of a descriptor set, as `protoc --descriptor_set_out` makes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.streams.kafka.codec import FAIL, Reader, Writer, check_malformed
from dagster_adjunct.resources.streams.kafka.framing import (
    HEADER_BYTES,
    header,
    indexes_at,
    indexes_bytes,
    number_of,
)
from dagster_adjunct.resources.streams.kafka.protobuf_types import (
    column_type,
    getter,
    indexes_of,
    is_nested,
    message_class,
    nested_json,
    put,
)
from dagster_adjunct.resources.streams.kafka.record_values import Problems, Unfit, columns_of, rows_of
from dagster_adjunct.resources.streams.kafka.schema_registry import SchemaRegistry

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Protobuf:
    """A Protobuf message of the type `message` (its full name) a Kafka message.

    `descriptor_set` is a FileDescriptorSet with all imports, its bytes or the path of its file, which is read now.
    Columns are the message's fields. Unsigned 64-bit numbers are DECIMAL(20,0), enums their names, Timestamps TIMESTAMP
    (cut to microseconds), wrappers their values; other messages, lists and maps are JSON text in a STRING. A field that
    tells whether it is set is null where it is not. With a registry messages begin with Confluent's bytes; writing
    needs the schema there, under `subject` (topic + "-value" or "-key" unless given).
    """

    descriptor_set: bytes | str | Path
    message: str
    registry: SchemaRegistry | None = None
    subject: str | None = None
    malformed: str = FAIL

    def __post_init__(self) -> None:
        if not isinstance(self.descriptor_set, bytes):
            path = Path(self.descriptor_set)
            try:
                object.__setattr__(self, "descriptor_set", path.read_bytes())
            except OSError as error:
                raise ConfigurationError(
                    f"the Protobuf descriptor set {path} can't be read ({type(error).__name__}).",
                    "Make it: protoc --include_imports --descriptor_set_out=FILE.",
                    argument="descriptor_set",
                ) from error
        check_malformed(self.malformed, self.columns(), "a Protobuf format")

    def __repr__(self) -> str:
        size = len(self.descriptor_set) if isinstance(self.descriptor_set, bytes) else 0
        return f"Protobuf({self.message!r}, {size} bytes of descriptors, registry={self.registry!r})"

    def columns(self) -> Schema:
        return Schema(tuple(Field(field.name, column_type(field)) for field in self._descriptor().fields))

    def _descriptor(self) -> Any:
        assert isinstance(self.descriptor_set, bytes)
        return message_class(self.descriptor_set, self.message).DESCRIPTOR

    def reader(self) -> Reader:
        assert isinstance(self.descriptor_set, bytes)
        message, schema = message_class(self.descriptor_set, self.message), self.columns()
        get = {field.name: getter(field) for field in message.DESCRIPTOR.fields if not is_nested(field)}
        nested = [field for field in message.DESCRIPTOR.fields if is_nested(field)]
        numbers = {field.number: field.name for field in message.DESCRIPTOR.fields}
        bare = _unframed(self.registry, indexes_of(message.DESCRIPTOR)) if self.registry else None

        def parse(datum: bytes) -> dict[str, Any]:
            from google.protobuf.message import DecodeError
            from google.protobuf.unknown_fields import UnknownFieldSet

            try:
                made = message.FromString(datum if bare is None else bare(datum))
                for unknown in UnknownFieldSet(made):
                    if unknown.field_number in numbers:
                        raise Unfit(
                            f"not {self.message}: field {numbers[unknown.field_number]!r} came as another type "
                            f"(wire type {unknown.wire_type})"
                        )
                record = {name: value(made) for name, value in get.items()}
                return record | nested_json(made, nested, get) if nested else record
            except Unfit:
                raise
            except (DecodeError, ValueError, OverflowError) as error:
                raise Unfit(f"not {self.message}: {type(error).__name__}") from error

        def read(data: Sequence[bytes | None], problems: Problems) -> list[pa.Array]:
            return columns_of(rows_of(data, problems, parse), schema, {}, problems)

        return read

    def writer(self, what: str, subject: str) -> Writer:
        assert isinstance(self.descriptor_set, bytes)
        message = message_class(self.descriptor_set, self.message)
        fields, head = list(message.DESCRIPTOR.fields), b""
        if self.registry is not None:
            head = self._head(self.registry, self.subject or subject, message.DESCRIPTOR, what)

        def write(columns: Sequence[pa.Array]) -> list[bytes]:
            given = [column.to_pylist() for column in columns]
            made: list[bytes] = []
            for values in zip(*given, strict=True):
                one = message()
                for field, value in zip(fields, values, strict=True):
                    if value is not None:
                        put(one, field, value, what)
                made.append(head + one.SerializeToString(deterministic=True))
            return made

        return write

    def _head(self, registry: SchemaRegistry, subject: str, descriptor: Any, what: str) -> bytes:
        if not subject:
            raise ConfigurationError(
                f"{what}: no subject is known for its Protobuf schema.",
                "Give it: Protobuf(subject=…).",
                argument="subject",
            )
        registered = registry.latest(subject)
        if registered.kind != "PROTOBUF":
            raise SchemaMismatchError(
                f"{what}: the registry's subject {subject!r} is {registered.kind}, not Protobuf.",
                "Name the right subject.",
                url=registry.url,
            )
        return header(registered.id) + indexes_bytes(indexes_of(descriptor))

    def describe(self) -> str:
        return f"Protobuf ({self.message})"


def _unframed(registry: SchemaRegistry, declared: tuple[int, ...]) -> Callable[[bytes], bytes]:
    kinds: dict[int, str] = {}

    def bare(data: bytes) -> bytes:
        number = number_of(data)
        if number is None:
            raise Unfit(f"not Protobuf with a schema id: it begins with {data[:HEADER_BYTES].hex() or 'nothing'}")
        if number not in kinds:
            try:
                kinds[number] = registry.schema(number).kind
            except SchemaMismatchError as error:
                raise Unfit(error.problem.rstrip(".")) from error
        if kinds[number] != "PROTOBUF":
            raise Unfit(f"schema {number} of the registry is {kinds[number]}, not Protobuf")
        indexes, at = indexes_at(data, HEADER_BYTES)
        if indexes != declared:
            raise Unfit(f"another message of its file: indexes {list(indexes)[:10]}, declared {list(declared)}")
        return data[at:]

    return bare
