"""Where versions of a bounded dataset come from: what every source answers, be it a stream, files or a query."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from dagster_adjunct.assets.sources.entries import derive_entry_schema
from dagster_adjunct.assets.versions.deliveries import Lost, MarkerFacts
from dagster_adjunct.assets.versions.manifest import BoundedManifest, resume_bounded_manifest
from dagster_adjunct.assets.versions.version import declaration_from_spec

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.versions.manifest import DatasetManifest
    from dagster_adjunct.assets.versions.version import DatasetDeclaration
    from dagster_adjunct.resources.schemas.schema import Schema


@dataclass(frozen=True, slots=True)
class Delivery:
    """A version that has arrived whole, from whatever source: what it is called and where its records are.

    `offsets` are the manifest's after it, `ranges` what it takes in by stream partition; both are empty for files
    and queries. `markers` are what it promised, by stream partition or by completion object. `redelivered` counts
    records dropped before it, `lost` what retention took before it was read. `notes` tell of what was not taken, and
    `stream` which stream this is. `copies` are deliveries that lie there anew with the same contents: by name, what
    their markers are now. `content` is the source's own. `identity` tells files from any others, so that a build of
    them that died after it was finished is taken up; "" where nothing does. `valid_from` are the times that its markers
    say it is valid from: one, none, or by mistake several.
    """

    version: str
    offsets: Mapping[str, str] = field(default_factory=dict)
    ranges: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    markers: Mapping[str, MarkerFacts] = field(default_factory=dict)
    redelivered: int = 0
    lost: Lost | None = None
    notes: tuple[str, ...] = ()
    copies: Mapping[str, Mapping[str, MarkerFacts]] = field(default_factory=dict)
    stream: str | None = None
    content: Any = None
    identity: str = ""
    valid_from: tuple[datetime, ...] = ()


@dataclass(frozen=True, slots=True)
class Awaiting:
    """No version is complete. `version` is the one that has begun, if any; `missing` names the markers it lacks.

    `offsets` are the manifest's behind dropped re-deliveries and what retention took (`lost`). `idle` says that nothing
    at all has arrived. `notes` tell of what was not taken, and of what may be wrong with the place that was looked at.
    """

    version: str | None
    missing: tuple[str, ...]
    offsets: Mapping[str, str] = field(default_factory=dict)
    redelivered: int = 0
    idle: bool = False
    lost: Lost | None = None
    notes: tuple[str, ...] = ()
    copies: Mapping[str, Mapping[str, MarkerFacts]] = field(default_factory=dict)
    stream: str | None = None


class VersionSource(Protocol):
    """Where versions of one dataset come from, looked at once: `next` decides from what was seen then.

    Every source refuses, with DatasetError naming the dataset, what can't make it: no schema, key columns missing.
    """

    @property
    def spec(self) -> AdjunctDataset: ...

    @property
    def schema(self) -> Schema:
        """The columns of the entries, after extractor and `columns`."""
        ...

    @property
    def declaration(self) -> DatasetDeclaration: ...

    @property
    def copartitioned(self) -> bool:
        """Whether partition i of what `read` returns holds exactly bucket i, so that no exchange is needed."""
        ...

    @property
    def ordered_by(self) -> tuple[str, ...]:
        """Columns of what `read` returns that put records of one key in order, the last one counting."""
        ...

    def first_manifest(self) -> BoundedManifest:
        """Return the manifest of a dataset that has no commit yet."""
        ...

    def follow_repartition(self, stored: DatasetManifest) -> DatasetManifest | None:
        """Return a stored manifest at its place in an input that was rewritten just when all was read; None else."""
        ...

    def resume_manifest(self, stored: DatasetManifest) -> BoundedManifest:
        """Return a stored manifest to go on from, with order and policy as they are declared now.

        Raises DatasetError for another declaration, and OffsetOutOfRangeError for a stream that was made anew.
        """
        ...

    def next(self, manifest: BoundedManifest) -> Delivery | Awaiting:
        """Return the next complete version after what the manifest has settled. Raises MarkerConflictError."""
        ...

    def check(self, delivery: Delivery, spark: Callable[[], SparkSession]) -> int | None:
        """Return how many records it holds; raise MarkerConflictError where they are not what was promised."""
        ...

    def read(self, delivery: Delivery, spark: Callable[[], SparkSession]) -> DataFrame | pa.Table:
        """Return its records: the columns of `schema`, those of META, and `ordered_by`. Checked strictly.

        As a frame of the session, of IN_PROCESS as a table.
        """
        ...

    def place(self, delivery: Delivery, partition: int, offset: int) -> str:
        """Say where the record lies that `read` gave this `__partition` and `__offset`; "" where it lies nowhere."""
        ...


class NonStreamSource:
    """The dataset that versions are made for, and what follows from it: no partitions and no offsets to begin with."""

    def __init__(self, spec: AdjunctDataset, records: Schema) -> None:
        self._spec, self._schema = spec, derive_entry_schema(spec, records)

    @property
    def spec(self) -> AdjunctDataset:
        return self._spec

    @property
    def schema(self) -> Schema:
        return self._schema

    @property
    def declaration(self) -> DatasetDeclaration:
        return declaration_from_spec(self._spec, self._schema)

    @property
    def copartitioned(self) -> bool:
        return False

    def first_manifest(self) -> BoundedManifest:
        return BoundedManifest(name=self._spec.name, declaration=self.declaration, offsets={})

    def follow_repartition(self, stored: DatasetManifest) -> None:
        return None

    def resume_manifest(self, stored: DatasetManifest) -> BoundedManifest:
        return resume_bounded_manifest(stored, self.declaration)
