"""Extractors: what of a record becomes a dataset's entries (SAMZA-1278, "Key and Value")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from resources.schema import Schema


@runtime_checkable
class KeyValueExtractor(Protocol):
    """Turns input records into entries: none, one or several for each record.

    Extractors are frozen values, comparable and picklable; `describe()` is what the manifest keeps of one.
    """

    def schema(self, records: Schema, what: str) -> Schema:
        """Return the columns of the entries; `what` names the dataset in errors. Raises SchemaMismatchError."""
        ...

    def apply(self, records: DataFrame, schema: Schema) -> DataFrame:
        """Return entries with the columns of `schema`; the columns of META pass through, record by record."""
        ...

    def describe(self) -> str:
        """Return what it does, in one line, without addresses of objects."""
        ...
