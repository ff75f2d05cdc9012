"""The Protobuf format: which columns its types become, and reading and writing of messages."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.schemas.parsed_columns import Unfit
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Member,
    Simple,
    Struct,
    Type,
    write_name,
)
from dagster_adjunct.resources.schemas.values import python_values
from dagster_adjunct.resources.streams.kafka import formats, schema_registry
from dagster_adjunct.resources.streams.kafka.formats import FAIL, FormatReader, FormatWriter
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


def protobuf_type(field: Any, within: frozenset[str] = frozenset()) -> Type:
    """Return the type of the values of a field in a column; `within` are the full names of the
    messages that contain it.
    """
    if _is_map(field):
        return Map(_value_type(field.message_type.fields_by_name["value"], within))
    if _is_repeated(field):
        return Array(_value_type(field, within))
    return _value_type(field, within)


def _value_type(field: Any, within: frozenset[str]) -> Type:
    """Return the type of one value of a field, which may be repeated."""
    message = field.message_type
    if message is not None and _is_struct(message, within):
        within |= {message.full_name}
        members = [Member(each.name, protobuf_type(each, within)) for each in message.fields]
        return Struct(tuple(members))
    if message is not None:
        kinds = {_TIMESTAMP: "timestamp", **_WRAPPERS}
        return Simple(kinds.get(message.full_name, "string"))
    return Simple(_scalar_type(field))


def _scalar_type(field: Any) -> str:
    """Return the type of a field's values that are no messages."""
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
    texts = "binary" if field.type == field.TYPE_BYTES else "string"
    return kinds.get(field.cpp_type, texts)


@lru_cache(maxsize=1024)
def _is_struct(message: Any, within: frozenset[str]) -> bool:
    """Return whether a message becomes a struct.

    Protobuf's own messages, those without fields or with names that differ only in case, and a
    message within itself, are JSON text or simple values.
    """
    names = {field.name.lower() for field in message.fields}
    own = message.full_name.startswith("google.protobuf.")
    return not own and 0 < len(names) == len(message.fields) and message.full_name not in within


def _is_map(field: Any) -> bool:
    """Whether a field is a map."""
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _is_repeated(field: Any) -> bool:
    """Whether a field has several values; that of a map has its entries."""
    # `is_repeated` exists since Protobuf 6.31; later releases will drop `label`.
    return bool(
        field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED
    )


Getter = Callable[[Any], Any]


def message_getters(message: Any, within: frozenset[str] = frozenset()) -> dict[str, Getter]:
    """Return, for each field of a message type, a function from a message to the field's value."""
    within |= {message.full_name}
    return {field.name: _field_getter(field, within) for field in message.fields}


def _field_getter(field: Any, within: frozenset[str]) -> Getter:
    """Return a function from a message to the value of a field, None if the field is not set."""
    name = field.name
    if _is_map(field):
        of_value = _value_getter(field.message_type.fields_by_name["value"], within)

        def entries(message: Any) -> dict[str, Any]:
            found = getattr(message, name)
            return {_key_text(key): of_value(found[key]) for key in found}

        return entries
    convert = _value_getter(field, within)
    if _is_repeated(field):
        return lambda message: [convert(value) for value in getattr(message, name)]
    if not field.has_presence or field.has_default_value:  # unset, it has its default value
        return lambda message: convert(getattr(message, name))
    return lambda message: convert(getattr(message, name)) if message.HasField(name) else None


def _value_getter(field: Any, within: frozenset[str]) -> Getter:
    """Return a function from one value of a field to its value for a column."""
    message = field.message_type
    if message is not None and _is_struct(message, within):
        getters = message_getters(message, within)

        def members(value: Any) -> dict[str, Any]:
            _check_wire_types(value)
            return {name: get(value) for name, get in getters.items()}

        return members
    if message is not None:
        getter: Getter = _to_json
        if message.full_name == _TIMESTAMP:
            getter = _to_datetime
        elif message.full_name in _WRAPPERS:
            getter = attrgetter("value")
        return getter
    if field.enum_type is None:
        return lambda value: value
    names = field.enum_type.values_by_number
    # A number that the enum does not declare becomes its text.
    return lambda number: names[number].name if number in names else str(number)


def _key_text(key: Any) -> str:
    """Return the key of a map as text, as Protobuf's JSON has it."""
    if isinstance(key, bool):
        return str(key).lower()
    return str(key)


def _to_datetime(value: Any) -> dt.datetime:
    """Return a Timestamp as a time, truncated to microseconds."""
    return _EPOCH + dt.timedelta(seconds=value.seconds, microseconds=value.nanos // 1000)


def _to_json(message: Any) -> str:
    """Return a message as JSON text, with the field names of the .proto file. Raises Unfit."""
    from google.protobuf import json_format

    try:
        value = json_format.MessageToDict(message, preserving_proto_field_name=True)
    except (json_format.Error, TypeError) as error:
        # An Any whose type is not in the descriptor set.
        reason = f"a message can't be converted to JSON ({type(error).__name__})"
        raise Unfit(reason) from error
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class FieldWriter:
    """Sets the fields of messages to values of columns.

    `what` names the stream, `column` the column, and `path` the place of the value, in errors;
    `within` are the full names of the messages that contain the value.
    """

    what: str
    column: str
    path: str
    within: frozenset[str]

    def set_field(self, message: Any, field: Any, value: Any) -> None:
        """Set a message's field to a value of its column. Raises SchemaMismatchError for a value
        that does not fit.
        """
        if field.containing_oneof is not None:
            self._check_choice(message, field)
        if _is_map(field):
            self._at("[*]")._add_entries(getattr(message, field.name), field, value)
        elif _is_repeated(field):
            self._at("[]")._add_elements(getattr(message, field.name), field, value)
        elif field.message_type is not None:
            inner = getattr(message, field.name)
            inner.SetInParent()
            self._fill(inner, value)
        else:
            self._try(_set_scalar, message, field, value)

    def _at(self, step: str) -> FieldWriter:
        """Return the writer of parts of this value; `step` is what their path adds."""
        return replace(self, path=self.path + step)

    def _add_entries(self, entries: Any, field: Any, value: Any) -> None:
        """Add the entries of a dictionary, whose keys are texts, to the field of a map.

        Protobuf declares a map's entries as messages with the fields `key` and `value`.
        """
        entry_fields = field.message_type.fields_by_name
        key_field = entry_fields["key"]
        value_field = entry_fields["value"]
        for key_text, part in value.items():
            self._check_present(part)
            key = self._try(_key_from_text, key_field, key_text)
            if value_field.message_type is not None:
                self._fill(entries[key], part)  # reading a key adds an empty message
            else:
                self._try(_set_entry, entries, key, value_field, part)

    def _add_elements(self, elements: Any, field: Any, value: Any) -> None:
        """Add the elements of a list to a repeated field."""
        for part in value:
            self._check_present(part)
            if field.message_type is not None:
                self._fill(elements.add(), part)
            else:
                self._try(_append_scalar, elements, field, part)

    def _fill(self, message: Any, value: Any) -> None:
        """Set what a message has to a value: a struct, a time, a wrapped value, or JSON text."""
        declared = message.DESCRIPTOR
        if not _is_struct(declared, self.within):
            self._try(_fill_simple, message, value)
            return
        within = self.within | {declared.full_name}
        for field in declared.fields:
            if value[field.name] is not None:
                inner = replace(self._at(f".{write_name(field.name)}"), within=within)
                inner.set_field(message, field, value[field.name])

    def _check_choice(self, message: Any, field: Any) -> None:
        """Raise SchemaMismatchError if another field of this field's oneof is set already."""
        choice = field.containing_oneof.name
        other = message.WhichOneof(choice)
        if other is not None:
            problem = f"and {other!r} have values, but only one of the oneof {choice!r} can"
            raise self._error(problem, "Set the others to null.")

    def _check_present(self, part: Any) -> None:
        """Raise SchemaMismatchError for a null within an array or map."""
        if part is None:
            step = "Leave out null elements of arrays, and null values of maps."
            raise self._error("is null, which Protobuf can't represent there", step)

    def _try(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a call returns. Raises SchemaMismatchError if Protobuf rejects a value."""
        try:
            return call(*arguments)
        except (ValueError, TypeError, LookupError) as error:
            problem = f"has a value that does not fit its Protobuf field ({type(error).__name__})"
            step = (
                "Enums need the names of their values, keys of maps texts of their type, and JSON"
                " text that of its message."
            )
            raise self._error(problem, step) from error

    def _error(self, problem: str, step: str) -> SchemaMismatchError:
        """Return the error of the column with this problem."""
        text = f"{self.what}: column {self.path!r} {problem}."
        return SchemaMismatchError(text, step, column=self.column)


def _scalar(field: Any, value: Any) -> Any:
    """Return a simple value of a column for a field of this type: the number of an enum's name, or
    of the text of a number that the enum does not declare. The inverse of the conversion by
    `_value_getter`.
    """
    if field.enum_type is not None:
        known = field.enum_type.values_by_name
        return known[value].number if value in known else int(value)
    if field.cpp_type == field.CPPTYPE_UINT64:
        return int(value)
    return value


def _key_from_text(field: Any, text: str) -> Any:
    """Return the key of a map from its text; the inverse of `_key_text`. Raises ValueError for any
    other text.
    """
    if field.cpp_type == field.CPPTYPE_STRING:
        return text
    key: Any
    if field.cpp_type == field.CPPTYPE_BOOL:
        key = text == "true"
    else:
        key = int(text)
    if _key_text(key) != text:  # such as " 7": another key could become the same
        raise ValueError(text)
    return key


def _set_scalar(message: Any, field: Any, value: Any) -> None:
    """Set a field to a simple value."""
    setattr(message, field.name, _scalar(field, value))


def _set_entry(entries: Any, key: Any, field: Any, value: Any) -> None:
    """Set the value of a key in a map to a simple value."""
    entries[key] = _scalar(field, value)


def _append_scalar(elements: Any, field: Any, value: Any) -> None:
    """Add a simple value to a repeated field."""
    elements.append(_scalar(field, value))


def _fill_simple(message: Any, value: Any) -> None:
    """Set a message to a time, a wrapped value, or what JSON text has. Raises ValueError."""
    declared = message.DESCRIPTOR
    if declared.full_name == _TIMESTAMP:
        message.FromDatetime(value)
    elif declared.full_name in _WRAPPERS:
        message.value = _scalar(declared.fields_by_name["value"], value)
    else:
        from google.protobuf import json_format

        try:
            json_format.ParseDict(json.loads(value), message)
        except json_format.ParseError as error:
            raise ValueError(str(error)) from error


@validated
@dataclass(frozen=True, slots=True)
class Protobuf:
    """A Protobuf message of the type `message` (its full name) in each Kafka message.

    `descriptor_set` is a FileDescriptorSet with all imports: its bytes, or the path of its file,
    which is read at once. Columns are the message's fields. Unsigned 64-bit numbers are
    DECIMAL(20,0), enums their names, Timestamps TIMESTAMP (truncated to microseconds), wrappers
    their values; other messages are structs, and keys of maps texts. Protobuf's own messages
    (Struct, Any, Duration), those without fields, and a message within itself are JSON text in a
    STRING. A field with presence is null if it is not set. With a registry messages begin with
    Confluent's bytes; writing needs the schema in the registry, under `subject` (default: topic +
    "-value" or "-key").
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
        declared = self._message_class().DESCRIPTOR
        within = frozenset({declared.full_name})
        fields = [Field(each.name, str(protobuf_type(each, within))) for each in declared.fields]
        return Schema(tuple(fields))

    def _message_class(self) -> Any:
        """Return the Python class of the message type."""
        assert isinstance(self.descriptor_set, bytes)
        return message_class(self.descriptor_set, self.message)

    def reader(self) -> FormatReader:
        message = self._message_class()
        getters = message_getters(message.DESCRIPTOR)
        indexes = message_indexes(message.DESCRIPTOR)

        def parse(datum: bytes) -> dict[str, Any]:
            from google.protobuf.message import DecodeError

            try:
                if self.registry is not None:
                    bare = _without_head(datum, self.registry, indexes)
                else:
                    bare = datum
                parsed = message.FromString(bare)
                _check_wire_types(parsed)
                return {name: get(parsed) for name, get in getters.items()}
            except Unfit:
                raise
            except (DecodeError, ValueError, OverflowError) as error:
                raise Unfit(f"not {self.message}: {type(error).__name__}") from error

        return formats.row_reader(parse, self.columns())

    def writer(self, what: str, subject: str) -> FormatWriter:
        message = self._message_class()
        fields = list(message.DESCRIPTOR.fields)
        within = frozenset({message.DESCRIPTOR.full_name})
        writers = [FieldWriter(what, field.name, field.name, within) for field in fields]
        head = self._head(what, self.subject or subject)

        def write(columns: Sequence[pa.Array]) -> list[bytes]:
            given = [*map(python_values, columns)]
            made: list[bytes] = []
            for values in zip(*given, strict=True):
                one = message()
                for writer, field, value in zip(writers, fields, values, strict=True):
                    if value is not None:
                        writer.set_field(one, field, value)
                made.append(head + one.SerializeToString(deterministic=True))
            return made

        return write

    def _head(self, what: str, subject: str) -> bytes:
        """Return what messages begin with: nothing, or with a registry the id of the schema under
        this subject, and the message indexes. Raises SchemaMismatchError for another format.
        """
        if self.registry is None:
            return b""
        registered = self.registry.latest(subject)
        if registered.kind != "PROTOBUF":
            problem = (
                f"{what}: the registry's subject {subject!r} is {registered.kind}, not Protobuf."
            )
            raise SchemaMismatchError(problem, "Correct the subject.", url=self.registry.url)
        indexes = message_indexes(self._message_class().DESCRIPTOR)
        head = schema_registry.encode_schema_id(registered.id)
        return head + schema_registry.encode_message_indexes(indexes)

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
    """Return a message without its schema id and message indexes. Raises Unfit unless they are
    those of the declared message type.
    """
    schema_registry.read_schema_id(data, registry, "PROTOBUF", "Protobuf")
    indexes, at = schema_registry.parse_message_indexes(data, HEADER_BYTES)
    if indexes != declared:
        raise Unfit(
            f"another message type of its file: indexes {list(indexes)[:10]}, declared"
            f" {list(declared)}"
        )
    return data[at:]
