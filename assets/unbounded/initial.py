"""A bulk snapshot to begin with: the table as it was at a recorded position of its change stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from assets.dataset import AdjunctDataset
    from resources.schema import Schema
    from resources.streams.ssp import SystemStreamPartition


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Rows with the dataset's columns, and the next offset to read of each partition of its stream."""

    rows: DataFrame
    position: Mapping[SystemStreamPartition, str]


@runtime_checkable
class InitialLoad(Protocol):
    """Gives the whole table at once. A frozen value, free of secrets."""

    def load(
        self, spec: AdjunctDataset, schema: Schema, ssps: tuple[SystemStreamPartition, ...], spark: SparkSession
    ) -> Snapshot:
        """Return the table and where its stream goes on; `schema` are the dataset's columns.

        A change that is in the snapshot already may come again on the stream, but none may be missing from both.
        """
        ...

    def describe(self) -> str:
        """Return what it is, in one line, without secrets."""
        ...
