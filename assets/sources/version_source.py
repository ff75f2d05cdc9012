"""Where the versions of a dataset come from: `VersionSource`, and what it answers.

A stream, files and a query are sources of versions. Each answers with a `Delivery`, a version that
has arrived completely, or with what it is `Awaiting`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.declaration.dataset import BoundedDataset
from dagster_adjunct.assets.sources import entries
from dagster_adjunct.assets.versions.manifest import (
    BoundedManifest,
    DatasetManifest,
    Lost,
    MarkerFacts,
    as_bounded,
)
from dagster_adjunct.assets.versions.version import DatasetDeclaration, check_declaration
from dagster_adjunct.resources.errors import MarkerConflictError
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What a source answers: a delivery, or what it awaits.

    `offsets` are those that the manifest has after this answer ({} for files and queries): after
    the delivery, dropped re-deliveries and what retention removed (`lost`). `redelivered` is the
    number of records of dropped re-deliveries. `left_out` is the number of dropped records of
    versions that are no partitions, and `outside` are the names of such versions that have arrived.
    `notes` describe what was left out and possible problems of the source. `stream` is the identity
    of the stream. `copies` are, by version name, the new marker facts of earlier deliveries whose
    files were copied or completed again unchanged.
    """

    offsets: Mapping[str, str] = field(default_factory=dict)
    redelivered: int = 0
    left_out: int = 0
    outside: tuple[str, ...] = ()
    lost: Lost | None = None
    notes: tuple[str, ...] = ()
    copies: Mapping[str, Mapping[str, MarkerFacts]] = field(default_factory=dict)
    stream: str | None = None


@dataclass(frozen=True, slots=True)
class Delivery(_Answer):
    """A completely delivered version: its name and the location of its records.

    `ranges` are the offsets [start, end) of its records by stream partition, {} for files and
    queries. `markers` are its marker facts, by stream partition or by completion object. `content`
    is private to the source. `identity` identifies the files, so that a finished build of them can
    be reused after a crash; "" if there is no such identity. `valid_from` are the times stated by
    its markers: one, none, or by mistake several.
    """

    version: str
    ranges: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    markers: Mapping[str, MarkerFacts] = field(default_factory=dict)
    content: Any = None
    identity: str = ""
    valid_from: tuple[datetime, ...] = ()


@dataclass(frozen=True, slots=True)
class Awaiting(_Answer):
    """No version is complete. `version` is the one that has begun, if any; `missing` names its
    missing markers.

    `idle` means that nothing new has arrived. `since` is the time since when the version is
    awaited, None until the advance finds that one is. `files` says in words what is missing where
    versions are files.
    """

    version: str | None
    missing: tuple[str, ...]
    idle: bool = False
    since: datetime | None = None
    files: str = ""

    @property
    def described(self) -> str:
        """What is missing, in words."""
        return self.files or f"the end-of-dataset markers of {', '.join(self.missing)}"


class VersionSource(ABC):
    """A source of versions of one dataset. It looks for versions once; each `next` decides from
    what it found then.

    `schema` are the columns of the entries, after extractor and `columns`. `ordered_by` are the
    columns that order the records of one key; the last record is kept. `copartitioned` says that
    partition i of the records that `read` returns is exactly bucket i, so that no exchange is
    needed. A source raises DatasetError, naming the dataset, if the dataset can't be made from it:
    no schema, or no key columns. The methods here are those of sources without a stream: files and
    queries, which have no partitions and no offsets.
    """

    copartitioned = False
    # Whether offsets alone order the records of a key, which have to be in one of several
    # partitions then.
    ordered_by_offset = False

    def __init__(
        self,
        spec: BoundedDataset,
        schema: Schema,
        declaration: DatasetDeclaration,
        ordered_by: tuple[str, ...],
    ) -> None:
        self.spec = spec
        self.schema = schema
        self.declaration = declaration
        self.ordered_by = ordered_by

    def first_manifest(self) -> BoundedManifest:
        """Return the initial manifest of a dataset without a commit."""
        return BoundedManifest(name=self.spec.name, declaration=self.declaration, offsets={})

    def outside(self, names: Iterable[str]) -> set[str]:
        """Return those of these version names that are no partitions of the dataset; none if it
        has no partitions.
        """
        versions = self.spec.versions
        return set() if versions is None else {name for name in names if not versions.has(name)}

    def describe_outside(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return a note for each of these names of delivered versions that are no partitions."""
        versions = self.spec.versions
        return () if versions is None else tuple(map(versions.describe_outside, names))

    def follow_repartition(self, stored: DatasetManifest) -> DatasetManifest | None:
        """Return the manifest at its position in the repartitioned input.

        None if the input was not repartitioned, or if the dataset had unread records then.
        """
        return None

    def resume_manifest(self, stored: DatasetManifest) -> BoundedManifest:
        """Return a stored manifest with the declared order and policies, to continue from.

        Raises DatasetError for an incompatible declaration, and OffsetOutOfRangeError for a
        recreated stream.
        """
        check_declaration(self.spec, stored.declaration, self.declaration)
        return as_bounded(stored).with_declared_policies(self.declaration)

    @abstractmethod
    def next(self, manifest: BoundedManifest) -> Delivery | Awaiting:
        """Return the next complete version that the manifest has not settled. Raises
        MarkerConflictError.
        """

    @abstractmethod
    def check(self, delivery: Delivery, spark: Callable[[], SparkSession]) -> int | None:
        """Return the delivery's number of records, None if it is unknown before they are read.

        Raises MarkerConflictError if the records differ from what the markers state.
        """

    def reject_empty(self, delivery: Delivery) -> None:
        """Raise EmptyVersionError for a delivery without records, unless that is meant, as the
        markers of a stream say.
        """
        return

    def read(self, delivery: Delivery, spark: Callable[[], SparkSession]) -> DataFrame | pa.Table:
        """Return the delivery's entries: `schema`, META and `ordered_by`, with exactly these types.

        They are a Spark frame, or an Arrow table if `spark` is IN_PROCESS.
        """
        if spark is IN_PROCESS:
            entries.raise_if_spark_needed(self.spec, self.list_spark_needs())
            return entries.entries_from_arrow(
                self.spec, self.records_in_arrow(delivery), self.schema
            )
        return entries.entries_from_frame(
            self.spec, self.records_in_spark(delivery, spark()), self.schema
        )

    @abstractmethod
    def records_in_spark(self, delivery: Delivery, spark: SparkSession) -> DataFrame:
        """Return the delivery's records with the columns of META."""

    @abstractmethod
    def records_in_arrow(self, delivery: Delivery) -> pa.Table:
        """Return what `records_in_spark` returns, in Arrow."""

    def list_spark_needs(self) -> list[str]:
        """Return, in words, why the entries can't be made without Spark; empty if they can."""
        return entries.list_extractor_spark_needs(self.spec)

    def place(self, delivery: Delivery, partition: int, offset: int) -> str:
        """Return where the record with this `__partition` and `__offset` is, for errors; "" if
        it has no location.
        """
        return ""


def contradiction_error(
    problem: str, dataset: str, version: str, expected: str, found: str, step: str = ""
) -> MarkerConflictError:
    """Return the error for a delivery that is not what its markers state. `step` is the next step,
    "" for that of a version of which nothing can be used.
    """
    step = step or (
        "Nothing was published and what is current stays. Deliver the right content under a new"
        f" version name, and abandon this one: abandon_version(lake, {dataset!r}, {version!r},"
        " reason=…, by=…)."
    )
    return MarkerConflictError(
        problem, step, dataset=dataset, version=version, expected=expected, found=found
    )
