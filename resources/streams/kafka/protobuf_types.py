"""Protobuf's message types as columns, and values of both."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.streams.kafka.record_values import Unfit

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_TIMESTAMP = "google.protobuf.Timestamp"
_WRAPPERS = {
    f"google.protobuf.{name}Value": kind
    for name, kind in (
        ("Double", "double"), ("Float", "float"), ("Int64", "bigint"), ("UInt64", "decimal(20,0)"), ("Int32", "int"),
        ("UInt32", "bigint"), ("Bool", "boolean"), ("String", "string"), ("Bytes", "binary"),
    )
}  # fmt: skip


@lru_cache(maxsize=64)
def message_class(descriptor_set: bytes, name: str) -> Any:
    """Return the class of a message. Raises ConfigurationError where there is none."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise ConfigurationError(
            f"a Kafka stream is in Protobuf, and protobuf is not installed ({error}).",
            'Install it wherever tasks run: pip install "dagster-adjunct[kafka]".',
            package="protobuf",
        ) from error
    pool = descriptor_pool.DescriptorPool()
    try:
        files = {file.name: file for file in descriptor_pb2.FileDescriptorSet.FromString(descriptor_set).file}
        _add(pool, files.values(), files, set())
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
    except (DecodeError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"the Protobuf descriptor set has no message {name!r} that can be used: {str(error)[:200]}.",
            "Make it with protoc --include_imports --descriptor_set_out=FILE, and give the message's full name.",
            argument="message",
        ) from error


def _add(pool: Any, files: Iterable[Any], by_name: dict[str, Any], added: set[str]) -> None:
    """Add files to the pool, each behind those that it imports."""
    for file in files:
        if file.name not in added:
            added.add(file.name)
            _add(pool, [by_name[name] for name in file.dependency if name in by_name], by_name, added)
            pool.AddSerializedFile(file.SerializeToString())


def indexes_of(descriptor: Any) -> tuple[int, ...]:
    """Return where a message type stands in its file: its number there, or those of the types around it first."""
    outer = descriptor.containing_type
    siblings = list(outer.nested_types if outer is not None else descriptor.file.message_types_by_name.values())
    return (
        *(indexes_of(outer) if outer is not None else ()),
        [sibling.name for sibling in siblings].index(descriptor.name),
    )


def column_type(field: Any) -> str:
    """Return the type of the column that a field becomes."""
    if is_nested(field):
        return "string"
    if field.message_type is not None:
        return _WRAPPERS.get(field.message_type.full_name, "timestamp")
    kinds = {
        field.CPPTYPE_INT32: "int", field.CPPTYPE_INT64: "bigint", field.CPPTYPE_UINT32: "bigint",
        field.CPPTYPE_UINT64: "decimal(20,0)", field.CPPTYPE_DOUBLE: "double", field.CPPTYPE_FLOAT: "float",
        field.CPPTYPE_BOOL: "boolean", field.CPPTYPE_ENUM: "string",
    }  # fmt: skip
    return kinds.get(field.cpp_type, "binary" if field.type == field.TYPE_BYTES else "string")


def is_nested(field: Any) -> bool:
    """Whether a field is JSON text in its column: a list, a map, or a message without a column type of its own."""
    if _is_repeated(field):
        return True
    full = field.message_type.full_name if field.message_type is not None else _TIMESTAMP
    return full != _TIMESTAMP and full not in _WRAPPERS


def _is_repeated(field: Any) -> bool:
    # Protobuf 6.31 has the one, and a later one will not have the other any more.
    return bool(field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED)


def getter(field: Any) -> Callable[[Any], Any]:
    """Return what gets a field's value from a message, as the column has it."""
    name, value = field.name, _plain_getter(field)
    if not field.has_presence or field.has_default_value:
        return value
    return lambda message: value(message) if message.HasField(name) else None


def _plain_getter(field: Any) -> Callable[[Any], Any]:
    name = field.name
    if field.message_type is not None:
        if field.message_type.full_name == _TIMESTAMP:
            return lambda message: _moment(getattr(message, name))
        return lambda message: getattr(message, name).value
    if field.enum_type is not None:
        names = field.enum_type.values_by_number
        return lambda message: _enum(names, getattr(message, name))
    return lambda message: getattr(message, name)


def _enum(names: Any, number: int) -> str:
    return names[number].name if number in names else str(number)


def _moment(value: Any) -> dt.datetime:
    return _EPOCH + dt.timedelta(seconds=value.seconds, microseconds=value.nanos // 1000)


def nested_json(message: Any, nested: Sequence[Any], others: Iterable[str]) -> dict[str, str | None]:
    """Return fields as the JSON that Protobuf defines, with the names of the .proto file."""
    from google.protobuf import json_format

    only = type(message)()
    only.CopyFrom(message)
    for name in others:
        only.ClearField(name)
    try:
        values = json_format.MessageToDict(only, preserving_proto_field_name=True)
    except (json_format.Error, TypeError) as error:  # an Any whose type is not in the descriptor set
        raise Unfit(f"nested fields have no form in JSON ({type(error).__name__})") from error
    texts: dict[str, str | None] = {}
    for field in nested:
        if field.name in values:
            texts[field.name] = json.dumps(values[field.name], ensure_ascii=False, separators=(",", ":"))
        else:
            is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
            texts[field.name] = None if not _is_repeated(field) else "{}" if is_map else "[]"
    return texts


def put(message: Any, field: Any, value: Any, what: str) -> None:
    """Set a field from a column's value. Raises SchemaMismatchError for one that it can't hold."""
    from google.protobuf import json_format

    try:
        if is_nested(field):
            json_format.ParseDict({field.name: json.loads(value)}, message)
        elif field.message_type is not None and field.message_type.full_name == _TIMESTAMP:
            getattr(message, field.name).FromDatetime(value)
        elif field.message_type is not None:
            number = field.message_type.full_name == "google.protobuf.UInt64Value"
            getattr(message, field.name).value = int(value) if number else value
        elif field.enum_type is not None:
            known = field.enum_type.values_by_name
            setattr(message, field.name, known[value].number if value in known else int(value))
        else:
            setattr(message, field.name, int(value) if field.cpp_type == field.CPPTYPE_UINT64 else value)
    except (json_format.ParseError, ValueError, TypeError, LookupError) as error:
        raise SchemaMismatchError(
            f"{what}: column {field.name!r} holds a value that its Protobuf field can't ({type(error).__name__}).",
            "Correct it; nested columns hold JSON of the declared form, enums the names of their values.",
            column=field.name,
        ) from error
