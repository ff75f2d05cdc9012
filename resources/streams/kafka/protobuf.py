"""The Protobuf format: which columns its types become, and reading and writing of messages."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.streams.kafka import formats, schema_registry
from dagster_adjunct.resources.streams.kafka.formats import FAIL, FormatReader, FormatWriter, Unfit
from dagster_adjunct.resources.streams.kafka.schema_registry import HEADER_BYTES, SchemaRegistry
from dagster_adjunct.resources.validation import validated

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_TIMESTAMP = "google.protobuf.Timestamp"
_WRAPPERS = {
    f"google.protobuf.{name}Value": kind
    for name, kind in (
        ("Double", "double"),
        ("Float", "float"),
        ("Int64", "bigint"),
        ("UInt64", "decimal(20,0)"),
        ("Int32", "int"),
        ("UInt32", "bigint"),
        ("Bool", "boolean"),
        ("String", "string"),
        ("Bytes", "binary"),
    )
}


@lru_cache(maxsize=64)
def message_class(descriptor_set: bytes, name: str) -> Any:
    """Return the Python class of the message type `name`. Raises ConfigurationError if it can't
    be built.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise formats.missing_package_error("Protobuf", "protobuf", error) from error
    pool = descriptor_pool.DescriptorPool()
    try:
        files = {
            file.name: file
            for file in descriptor_pb2.FileDescriptorSet.FromString(descriptor_set).file
        }
        _add_files(pool, files.values(), files, set())
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
    except (DecodeError, TypeError, KeyError) as error:
        problem = f"the Protobuf descriptor set has no usable message {name!r}: {str(error)[:200]}."
        step = (
            "Create it with protoc --include_imports --descriptor_set_out=FILE, and give the"
            " message's full name."
        )
        raise ConfigurationError(problem, step, argument="message") from error


def _add_files(pool: Any, files: Iterable[Any], by_name: dict[str, Any], added: set[str]) -> None:
    """Add files to the pool, each after those that it imports."""
    for file in files:
        if file.name not in added:
            added.add(file.name)
            _add_files(
                pool, [by_name[name] for name in file.dependency if name in by_name], by_name, added
            )
            pool.AddSerializedFile(file.SerializeToString())


def message_indexes(descriptor: Any) -> tuple[int, ...]:
    """Return the message indexes of a type: its index in its file, after those of the types that
    contain it.
    """
    outer = descriptor.containing_type
    if outer is None:
        return (list(descriptor.file.message_types_by_name).index(descriptor.name),)
    return (*message_indexes(outer), list(outer.nested_types_by_name).index(descriptor.name))


def protobuf_column_type(field: Any) -> str:
    """Return the type of the column that a field of a message type becomes."""
    if is_nested(field):
        return "string"
    if field.message_type is not None:
        return _WRAPPERS.get(field.message_type.full_name, "timestamp")
    kinds = {
        field.CPPTYPE_INT32: "int",
        field.CPPTYPE_INT64: "bigint",
        field.CPPTYPE_UINT32: "bigint",
        field.CPPTYPE_UINT64: "decimal(20,0)",
        field.CPPTYPE_DOUBLE: "double",
        field.CPPTYPE_FLOAT: "float",
        field.CPPTYPE_BOOL: "boolean",
        field.CPPTYPE_ENUM: "string",
    }
    return kinds.get(field.cpp_type, "binary" if field.type == field.TYPE_BYTES else "string")


def is_nested(field: Any) -> bool:
    """Return whether a field's column contains JSON text, as for lists, maps, and most messages.

    Messages that are a Timestamp or a wrapper have columns of their own types.
    """
    if _is_repeated(field):
        return True
    full = _TIMESTAMP
    if field.message_type is not None:
        full = field.message_type.full_name
    return full != _TIMESTAMP and full not in _WRAPPERS


def _is_repeated(field: Any) -> bool:
    # `is_repeated` exists since Protobuf 6.31; later releases will drop `label`.
    return bool(
        field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED
    )


def field_getter(field: Any) -> Callable[[Any], Any]:
    """Return a function from a message to the field's value for its column, which is not nested."""
    name = field.name
    convert: Callable[[Any], Any] = lambda value: value  # noqa: E731
    if field.message_type is not None:
        is_time = field.message_type.full_name == _TIMESTAMP
        convert = _to_datetime if is_time else attrgetter("value")
    elif field.enum_type is not None:
        names = field.enum_type.values_by_number

        def convert(number: int) -> str:
            return names[number].name if number in names else str(number)

    if not field.has_presence or field.has_default_value:
        return lambda message: convert(getattr(message, name))
    return lambda message: convert(getattr(message, name)) if message.HasField(name) else None


def _to_datetime(value: Any) -> dt.datetime:
    return _EPOCH + dt.timedelta(seconds=value.seconds, microseconds=value.nanos // 1000)


def nested_json(
    message: Any, nested: Sequence[Any], others: Iterable[str]
) -> dict[str, str | None]:
    """Return the JSON text of each of the `nested` fields, by name; None for a message that is not
    set.

    Field names in the JSON are those of the .proto file. `others` are the message's other fields.
    """
    from google.protobuf import json_format

    only = type(message)()
    only.CopyFrom(message)
    for name in others:
        only.ClearField(name)
    try:
        values = json_format.MessageToDict(only, preserving_proto_field_name=True)
    except (json_format.Error, TypeError) as error:
        # An Any whose type is not in the descriptor set.
        raise Unfit(f"nested fields can't be converted to JSON ({type(error).__name__})") from error
    texts: dict[str, str | None] = {}
    for field in nested:
        if field.name in values:
            texts[field.name] = json.dumps(
                values[field.name], ensure_ascii=False, separators=(",", ":")
            )
        elif not _is_repeated(field):
            texts[field.name] = None
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            texts[field.name] = "{}"
        else:
            texts[field.name] = "[]"
    return texts


def set_field(message: Any, field: Any, value: Any, what: str) -> None:
    """Set a message's field to a value of its column. Raises SchemaMismatchError for a value
    that does not fit.
    """
    from google.protobuf import json_format

    try:
        if is_nested(field):
            json_format.ParseDict({field.name: json.loads(value)}, message)
        elif field.message_type is not None and field.message_type.full_name == _TIMESTAMP:
            getattr(message, field.name).FromDatetime(value)
        elif field.message_type is not None:
            if field.message_type.full_name == "google.protobuf.UInt64Value":
                value = int(value)
            getattr(message, field.name).value = value
        elif field.enum_type is not None:
            known = field.enum_type.values_by_name
            setattr(message, field.name, known[value].number if value in known else int(value))
        else:
            setattr(
                message, field.name, int(value) if field.cpp_type == field.CPPTYPE_UINT64 else value
            )
    except (json_format.ParseError, ValueError, TypeError, LookupError) as error:
        raise SchemaMismatchError(
            f"{what}: column {field.name!r} has a value that does not fit its Protobuf field"
            f" ({type(error).__name__}).",
            "Nested columns need JSON of the declared form, enums the names of their values.",
            column=field.name,
        ) from error


@validated
@dataclass(frozen=True, slots=True)
class Protobuf:
    """A Protobuf message of the type `message` (its full name) in each Kafka message.

    `descriptor_set` is a FileDescriptorSet with all imports: its bytes, or the path of its file,
    which is read at once. Columns are the message's fields. Unsigned 64-bit numbers are
    DECIMAL(20,0), enums their names, Timestamps TIMESTAMP (truncated to microseconds), wrappers
    their values; other messages, lists and maps are JSON text in a STRING. A field with presence is
    null if it is not set. With a registry messages begin with Confluent's bytes; writing needs the
    schema in the registry, under `subject` (default: topic + "-value" or "-key").
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
                problem = (
                    f"the Protobuf descriptor set {path} can't be read ({type(error).__name__})."
                )
                step = "Create it: protoc --include_imports --descriptor_set_out=FILE."
                raise ConfigurationError(problem, step, argument="descriptor_set") from error
        formats.check_malformed(self.malformed, self.columns(), "a Protobuf format")

    def __repr__(self) -> str:
        size = 0
        if isinstance(self.descriptor_set, bytes):
            size = len(self.descriptor_set)
        return (
            f"Protobuf({self.message!r}, {size} bytes of descriptors, registry={self.registry!r})"
        )

    def columns(self) -> Schema:
        return Schema(
            tuple(
                Field(field.name, protobuf_column_type(field))
                for field in self._message_class().DESCRIPTOR.fields
            )
        )

    def _message_class(self) -> Any:
        assert isinstance(self.descriptor_set, bytes)
        return message_class(self.descriptor_set, self.message)

    def reader(self) -> FormatReader:
        message = self._message_class()
        fields = message.DESCRIPTOR.fields
        get = {field.name: field_getter(field) for field in fields if not is_nested(field)}
        nested = [field for field in fields if is_nested(field)]
        indexes = message_indexes(message.DESCRIPTOR)

        def parse(datum: bytes) -> dict[str, Any]:
            from google.protobuf.message import DecodeError

            try:
                bare = datum
                if self.registry is not None:
                    bare = _without_head(datum, self.registry, indexes)
                made = message.FromString(bare)
                _check_wire_types(made)
                record = {name: value(made) for name, value in get.items()}
                if nested:
                    return record | nested_json(made, nested, get)
                return record
            except Unfit:
                raise
            except (DecodeError, ValueError, OverflowError) as error:
                raise Unfit(f"not {self.message}: {type(error).__name__}") from error

        return formats.row_reader(parse, self.columns())

    def writer(self, what: str, subject: str) -> FormatWriter:
        message = self._message_class()
        fields = list(message.DESCRIPTOR.fields)
        head = b""
        if self.registry is not None:
            subject = self.subject or subject
            registered = self.registry.latest(subject)
            if registered.kind != "PROTOBUF":
                problem = (
                    f"{what}: the registry's subject {subject!r} is {registered.kind}, not"
                    " Protobuf."
                )
                raise SchemaMismatchError(problem, "Correct the subject.", url=self.registry.url)
            head = schema_registry.encode_schema_id(registered.id)
            head += schema_registry.encode_message_indexes(message_indexes(message.DESCRIPTOR))

        def write(columns: Sequence[pa.Array]) -> list[bytes]:
            given = [column.to_pylist() for column in columns]
            made: list[bytes] = []
            for values in zip(*given, strict=True):
                one = message()
                for field, value in zip(fields, values, strict=True):
                    if value is not None:
                        set_field(one, field, value, what)
                made.append(head + one.SerializeToString(deterministic=True))
            return made

        return write

    def describe(self) -> str:
        return f"Protobuf ({self.message})"


def _check_wire_types(message: Any) -> None:
    """Raise Unfit for a field that has another wire type than its declared one."""
    from google.protobuf.unknown_fields import UnknownFieldSet

    declared = message.DESCRIPTOR
    for unknown in UnknownFieldSet(message):
        field = declared.fields_by_number.get(unknown.field_number)
        if field is not None:
            raise Unfit(
                f"not {declared.full_name}: field {field.name!r} has another type (wire type"
                f" {unknown.wire_type})"
            )


def _without_head(data: bytes, registry: SchemaRegistry, declared: tuple[int, ...]) -> bytes:
    """Return a message without its schema id and message indexes, which must be the declared
    ones.
    """
    schema_registry.read_schema_id(data, registry, "PROTOBUF", "Protobuf")
    indexes, at = schema_registry.parse_message_indexes(data, HEADER_BYTES)
    if indexes != declared:
        raise Unfit(
            f"another message type of its file: indexes {list(indexes)[:10]}, declared"
            f" {list(declared)}"
        )
    return data[at:]
