"""What a stream was declared to be: checked when it is made, and compared with what is stored of it."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError, field_serializer, field_validator

from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    SchemaMismatchError,
    StreamExistsError,
)
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.schema import Schema, check_key_types
from dagster_adjunct.resources.stored_documents import StoredDocument, first_problem


class StreamDeclaration(StoredDocument):
    """What `create` was told of a stream. Systems that are told more have a subclass of it."""

    columns: Any
    key: tuple[str, ...]
    partitions: Annotated[int, Field(ge=1, le=100_000)]

    @field_validator("columns")
    @classmethod
    def _columns_are_a_schema(cls, value: Any) -> Schema:
        return stored_schema(value)

    @field_serializer("columns")
    def _write_columns(self, value: Schema) -> list[dict[str, Any]]:
        return value.to_json()

    @property
    def schema_(self) -> Schema:
        schema: Schema = self.columns
        return schema


D = TypeVar("D", bound=StreamDeclaration)


def declared(kind: type[D], stream: str, schema: Schema, key: tuple[str, ...], partitions: int, **more: Any) -> D:
    """Return the declaration of `stream` ("lake.orders"); `more` is what only this kind of it has.

    Raises ConfigurationError or SchemaMismatchError saying what can't be.
    """
    what = f"stream {split_stream_name(stream)[1]!r}"
    if not schema.fields:
        raise SchemaMismatchError(f"{what} has no columns.", "Name at least one column.", stream=stream)
    if len(set(key)) != len(key):
        raise ConfigurationError(
            f"{what}: key columns {list(key)} stand twice.", "Name each once.", argument="key", stream=stream
        )
    check_key_types(schema, key, what)
    if not key and partitions != 1:
        raise ConfigurationError(
            f"{what} has no key and {partitions} partitions: without a key nothing says where a record belongs.",
            "Name key columns, or declare partitions=1.",
            stream=stream,
        )
    try:
        return kind(columns=schema, key=key, partitions=partitions, **more)
    except ValidationError as error:
        raise ConfigurationError(
            f"{what}: {first_problem(error)} (found {error.errors(include_url=False)[0]['input']!r}).",
            "Correct the declaration.",
            stream=stream,
        ) from None


def check_equal(stream: str, stored: StreamDeclaration, wanted: StreamDeclaration) -> None:
    """Raise StreamExistsError with the differences of two declarations of `stream`, if there are any."""
    columns = stored.schema_.difference(wanted.schema_)
    refuse_differences(
        stream,
        [*([f"columns: {columns}"] if columns else []), *differences_beside_columns(stored, wanted)],
        "Declare it as it is, or choose another name.",
    )


def differences_beside_columns(stored: StreamDeclaration, wanted: StreamDeclaration) -> list[str]:
    """Return in words how two declarations of a kind differ in all but their columns.

    What is left out asks for nothing: an application creates its output without knowing what somebody configured since.
    """
    parts = [name for name in type(wanted).model_fields if name != "columns"]
    values = [(part, getattr(stored, part), getattr(wanted, part)) for part in parts]
    return [f"{part} is {new!r}, expected {old!r}" for part, old, new in values if new is not None and old != new]


def refuse_differences(stream: str, differences: list[str], next_step: str) -> None:
    """Raise StreamExistsError if there are any differences between what `stream` is and what it was declared to be."""
    if differences:
        raise StreamExistsError(
            f"stream {split_stream_name(stream)[1]!r} is there and declared otherwise: {'; '.join(differences)}.",
            next_step,
            stream=stream,
        )


def stored_schema(value: Any) -> Schema:
    """Return the columns that are stored of a stream, for a field of a document: what they can't be is a ValueError."""
    try:
        return value if isinstance(value, Schema) else Schema.from_json(value)
    except AdjunctError as error:
        raise ValueError(str(error)) from error
