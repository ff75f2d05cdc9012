"""Declarations of streams, as systems store them: how they are built and compared."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import Field, PlainSerializer, PlainValidator, ValidationError

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.documents import StoredDocument, first_validation_problem
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.paths import normal_path
from dagster_adjunct.resources.schemas.schema import Schema, check_key_types


def _schema_from_stored(value: Any) -> Schema:
    """Return the columns of a stored document. Raises ValueError, as validators of pydantic do."""
    try:
        if isinstance(value, Schema):  # of a declaration that is not stored yet
            return value
        return Schema.from_json(value)
    except errors.AdjunctError as error:
        raise ValueError(str(error)) from error


StoredSchema = Annotated[
    Schema, PlainValidator(_schema_from_stored), PlainSerializer(Schema.to_json)
]


class StreamDeclaration(StoredDocument):
    """A declared stream, as given to `create`. Systems with more options have a subclass.

    The `key` has names of columns, and paths of values in columns (`normal_path`).
    """

    columns: StoredSchema
    key: tuple[str, ...]
    partitions: Annotated[int, Field(ge=1, le=100_000)]


D = TypeVar("D", bound=StreamDeclaration)


def build_declaration(
    kind: type[D], stream: str, schema: Schema, key: tuple[str, ...], partitions: int, **more: Any
) -> D:
    """Return the validated declaration of `stream` ("lake.orders"); `more` are fields of this kind
    of declaration.

    Raises ConfigurationError or SchemaMismatchError.
    """
    what = f"stream {split_stream_name(stream)[1]!r}"
    if not schema.fields:
        raise errors.SchemaMismatchError(
            f"{what} has no columns.", "Name at least one column.", stream=stream
        )
    key = tuple(name if name in schema else normal_path(name) for name in key)
    if len(set(key)) != len(key):
        problem = f"{what}: key columns {list(key)} contain a column twice."
        raise errors.ConfigurationError(problem, argument="key", stream=stream)
    check_key_types(schema, key, what)
    if not key and partitions != 1:
        problem = (
            f"{what} has no key and {partitions} partitions: without a key it can only have one."
        )
        raise errors.ConfigurationError(
            problem, "Name key columns, or declare partitions=1.", stream=stream
        )
    try:
        return kind(columns=schema, key=key, partitions=partitions, **more)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]["input"]
        problem = f"{what}: {first_validation_problem(error)} (found {found!r})."
        raise errors.ConfigurationError(problem, stream=stream) from None


def check_same_declaration(
    stream: str,
    stored: StreamDeclaration,
    wanted: StreamDeclaration,
    columns: list[str] | None = None,
    next_step: str = "Declare the stream as it exists, or use another name.",
) -> None:
    """Raise StreamExistsError with the differences if two declarations differ.

    `columns` describes the differences of their columns; None compares these here. Fields that are
    None in `wanted` are not compared: an application creates its output without knowing what was
    configured since.
    """
    differences = list(columns or ())
    if columns is None:
        difference = stored.columns.difference(wanted.columns)
        if difference:
            differences.append(f"columns: {difference}")
    for field_name in type(wanted).model_fields:
        new = getattr(wanted, field_name)
        old = getattr(stored, field_name)
        if field_name != "columns" and new is not None and old != new:
            differences.append(f"{field_name} is {new!r}, expected {old!r}")
    if differences:
        name = split_stream_name(stream)[1]
        problem = f"stream {name!r} exists with another declaration: {'; '.join(differences)}."
        raise errors.StreamExistsError(problem, next_step, stream=stream)
