"""What a format of message keys and values is: a frozen value that makes readers and writers, for whole batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.streams.kafka.record_values import Problems

if TYPE_CHECKING:
    import pyarrow as pa

FAIL = "fail"


class Reader(Protocol):
    def __call__(self, data: Sequence[bytes | None], problems: Problems) -> list[pa.Array]:
        """Return one array a column of the format's schema; null throughout where the bytes are None.

        Where bytes can't be read all is null and `problems` says why, by row. Raises TransientError where something
        that is needed is out of reach.
        """
        ...


class Writer(Protocol):
    def __call__(self, columns: Sequence[pa.Array]) -> list[bytes]:
        """Return the bytes of each row. Raises SchemaMismatchError for a value that the format can't hold."""
        ...


@runtime_checkable
class Format(Protocol):
    """How bytes hold columns. `malformed` is "fail", or the BINARY column that gets bytes which can't be read."""

    @property
    def malformed(self) -> str: ...

    def columns(self) -> Schema:
        """Return the columns that are read and written, without `malformed`."""
        ...

    def reader(self) -> Reader:
        """Return what reads, for one process."""
        ...

    def writer(self, what: str, subject: str) -> Writer:
        """Return what writes; `what` names the stream in errors.

        `subject` is where a registry keeps the schema unless the format names another.
        """
        ...

    def describe(self) -> str:
        """Return the format in a few words, for errors."""
        ...


def check_malformed(declared: str, schema: Schema, what: str) -> None:
    """Refuse a column for malformed bytes that is one of the format's own."""
    if not declared:
        raise ConfigurationError(
            f"{what}: malformed is empty.",
            f'Give the name of a column, or "{FAIL}", which is the default.',
            argument="malformed",
        )
    if declared != FAIL:
        Schema((*schema.fields, Field(declared, "binary")))


def as_schema(given: Schema | str, what: str) -> Schema:
    """Return a schema that was given as one, or as DDL."""
    schema = Schema.from_ddl(given, what) if isinstance(given, str) else given
    if not isinstance(schema, Schema) or not schema.fields:
        raise SchemaMismatchError(
            f"{what} declares no columns.", 'Write them like "tailnum STRING, seats INT".', argument="schema"
        )
    return schema
