"""The protocol of version sources: streams, files and queries that deliver versions of a bounded dataset."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.versions.manifest import (
    BoundedManifest,
    DatasetManifest,
    Lost,
    MarkerFacts,
    resume_bounded_manifest,
)
from dagster_adjunct.assets.versions.version import DatasetDeclaration
from dagster_adjunct.resources.schemas.schema import Schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a source answers: a delivery, or what it awaits.

    `offsets` are the manifest's offsets after it (empty for files and queries), after dropped re-deliveries and what
    retention removed (`lost`); `redelivered` is the number of records dropped. `notes` describe what was left out and
    possible problems of the source, and `stream` is the identity of the stream. `copies` are new marker facts, by name,
    of earlier deliveries whose files were copied without a change.
    """

    offsets: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    redelivered: int = field(default=0, kw_only=True)
    lost: Lost | None = field(default=None, kw_only=True)
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    copies: Mapping[str, Mapping[str, MarkerFacts]] = field(default_factory=dict, kw_only=True)
    stream: str | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class Delivery(_Answer):
    """A completely delivered version: its name and the location of its records.

    `ranges` are the records that it reads by stream partition, empty for files and queries. `markers` are its marker
    facts, by stream partition or by completion object. `content` is private to the source. `identity` identifies the
    files, so that a finished build of them can be reused after a crash; "" if there is no such identity. `valid_from`
    are the times stated by its markers: one, none, or by mistake several.
    """

    version: str
    ranges: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    markers: Mapping[str, MarkerFacts] = field(default_factory=dict)
    content: Any = None
    identity: str = ""
    valid_from: tuple[datetime, ...] = ()


@dataclass(frozen=True, slots=True)
class Awaiting(_Answer):
    """No version is complete. `version` is the one that has begun, if any; `missing` names its missing markers.

    `idle` means that nothing at all has arrived.
    """

    version: str | None
    missing: tuple[str, ...]
    idle: bool = False


class VersionSource(ABC):
    """A source of versions of one dataset, read once: `next` decides from what was found then.

    `schema` are the columns of the entries, after extractor and `columns`. `ordered_by` are the columns that order the
    records of one key; the last record is kept. `copartitioned` says that partition i of the records that `read`
    returns is exactly bucket i, so that no exchange is needed. A source raises DatasetError, naming the dataset, if the
    dataset can't be made from it: no schema, or no key columns. The methods here are those of sources without a stream:
    files and queries, which have no partitions and no offsets.
    """

    copartitioned = False

    def __init__(
        self, spec: AdjunctDataset, schema: Schema, declaration: DatasetDeclaration, ordered_by: tuple[str, ...]
    ) -> None:
        self.spec, self.schema, self.declaration, self.ordered_by = spec, schema, declaration, ordered_by

    def first_manifest(self) -> BoundedManifest:
        """Return the initial manifest of a dataset without a commit."""
        return BoundedManifest(name=self.spec.name, declaration=self.declaration, offsets={})

    def follow_repartition(self, stored: DatasetManifest) -> DatasetManifest | None:
        """Return a stored manifest at its position in an input that was repartitioned after all was read; else None."""
        return None

    def resume_manifest(self, stored: DatasetManifest) -> BoundedManifest:
        """Return a stored manifest with the declared order and policies, to continue from.

        Raises DatasetError for an incompatible declaration, and OffsetOutOfRangeError for a recreated stream.
        """
        return resume_bounded_manifest(stored, self.declaration)

    @abstractmethod
    def next(self, manifest: BoundedManifest) -> Delivery | Awaiting:
        """Return the next complete version that the manifest has not settled. Raises MarkerConflictError."""

    @abstractmethod
    def check(self, delivery: Delivery, spark: Callable[[], SparkSession]) -> int | None:
        """Return its number of records; raise MarkerConflictError if they differ from what the markers state."""

    @abstractmethod
    def read(self, delivery: Delivery, spark: Callable[[], SparkSession]) -> DataFrame | pa.Table:
        """Return its records: the columns of `schema`, those of META, and `ordered_by`, with exactly these types.

        They are a frame of the session, or an Arrow table for IN_PROCESS.
        """

    def place(self, delivery: Delivery, partition: int, offset: int) -> str:
        """Return the location of the record with this `__partition` and `__offset`; "" if it has none."""
        return ""
