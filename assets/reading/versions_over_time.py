"""The versions of a bounded dataset over time: each is valid from the time that it states until the next one is.

    versions, by the time that they are valid from   -> one of each time: of several the one that was sealed last
    their files, a generation a version              -> one bucketed table, and the intervals follow from the generation

A key that a version does not hold has no row while that version is valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.file_cache import FileCache
from dagster_adjunct.assets.reading.rows_of_key import Validity, joined
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.kept_history import FIRST, VALID_FROM, VALID_TO
from dagster_adjunct.assets.versions.sealed_version import TOMBSTONE, SealedVersion
from dagster_adjunct.resources.bucketing.bucketed_tables import GENERATION
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.schemas.schema import widens
from dagster_adjunct.resources.spark.given_session import session_of
from dagster_adjunct.resources.spark.spark_errors import unwrapped

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.resources.bucketing.bucket_files import BucketLayout, Generation
    from dagster_adjunct.resources.objects.object_store import ObjectStore
    from dagster_adjunct.resources.schemas.schema import Schema

_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Span:
    """A version and the time [start, end) for which it is valid; the newest one has no end."""

    version: SealedVersion
    start: datetime
    end: datetime | None


class VersionsOverTime:
    """Reads versions of one bounded dataset over time. Raises DatasetError where they can't be read as one table.

    `sealed` are in any order, each with the time that it is valid from. Entries have the columns of the version that
    was sealed last: what earlier ones lack is null there.
    """

    def __init__(self, store: ObjectStore, dataset: str, sealed: Sequence[SealedVersion]) -> None:
        self.store, self.dataset = store, dataset
        self.spans, self._cache = spans_of(sealed), FileCache()
        self._newest = max((span.version for span in self.spans), key=lambda version: version.number, default=None)
        if self._newest is None:
            raise DatasetError(
                f"dataset {dataset!r} has no sealed version that says since when it is valid.",
                'Declare valid_from="name", "marker" or a pattern: versions that are sealed from then on say it.',
                dataset=dataset,
            )
        for span in self.spans:
            _check_readable_as(dataset, span.version, self._newest)

    def __repr__(self) -> str:
        return f"VersionsOverTime({self.dataset!r}, {len(self.spans)} versions)"

    @property
    def sealed(self) -> SealedVersion:
        """The version that was sealed last: columns, key and buckets are its."""
        assert self._newest is not None
        return self._newest

    @property
    def schema(self) -> Schema:
        """The columns of entries."""
        return self.sealed.columns

    @property
    def version(self) -> str:
        """What tells these versions from others, for names: the id of the one that was sealed last."""
        return self.sealed.id

    @property
    def versions(self) -> tuple[str, ...]:
        """The ids of the versions, by the time that they are valid from."""
        return tuple(span.version.id for span in self.spans)

    @property
    def edge(self) -> int | None:
        """Since when the oldest version is valid, in microseconds since the epoch: before it nothing is known."""
        return micros(self.spans[0].start)

    @property
    def layout(self) -> BucketLayout:
        """How the rows of all versions are read."""
        return self.sealed.layout

    @property
    def generations(self) -> tuple[Generation, ...]:
        """The generation of each version, numbered from 1 in the order of time."""
        return tuple(replace(span.version.generations[0], id=n) for n, span in enumerate(self.spans, 1))

    def at(self, moment: datetime) -> VersionReader | None:
        """Return the version that is valid at a moment, None before the oldest one."""
        valid = next((span for span in reversed(self.spans) if span.start <= moment), None)
        return None if valid is None else VersionReader(self.store, self.dataset, valid.version)

    def history_of(self, key: object) -> list[Validity]:
        """Return what was valid of a key and when, oldest first; where a version lacks the key there is no entry.

        Neighbours of the same content are joined. Raises what `VersionReader.get` raises.
        """
        parts: list[Validity] = []
        for span in self.spans:
            held = VersionReader(self.store, self.dataset, span.version, self._cache).get(key)
            entry = None if held is None else {name: held.get(name) for name in self.schema.names}
            if entry is not None or parts:
                parts.append(Validity(span.start, span.end, entry))
        return list(joined(parts))

    @unwrapped()
    def history_frame(self, spark: SparkSession | Callable[[], SparkSession]) -> DataFrame:
        """Return the rows of all versions, each with the interval in which its version is valid.

        One bucketed scan, with the columns of `schema`, `__valid_from`, `__valid_to` (null: open), `__first` (of the
        oldest version) and `__tombstone` (false). Raises ManifestMismatchError as `VersionReader.frame` does.
        """
        from pyspark.sql import functions as F

        from dagster_adjunct.resources.bucketing.bucketed_tables import bucketed_frame

        what = f"dataset {self.dataset!r}, all versions"
        rows = bucketed_frame(session_of(spark), self.store, what, self.layout, self.generations)
        starts = F.array(*[F.lit(micros(span.start)) for span in self.spans])
        ends = F.array(*[F.lit(micros(span.end)).cast("bigint") for span in self.spans])
        return rows.select(
            *[column(name) for name in self.schema.names],
            F.timestamp_micros(F.element_at(starts, F.col(GENERATION))).alias(VALID_FROM),
            F.timestamp_micros(F.element_at(ends, F.col(GENERATION))).alias(VALID_TO),
            (F.col(GENERATION) == 1).alias(FIRST),
            F.lit(False).alias(TOMBSTONE),
        )


def spans_of(sealed: Iterable[SealedVersion]) -> tuple[Span, ...]:
    """Return the versions that say a time, in its order, each valid until the next; of one time the one sealed last."""
    by_time: dict[datetime, SealedVersion] = {}
    for version in sorted(sealed, key=lambda version: version.number):
        if version.valid_from is not None:
            by_time[version.valid_from] = version
    starts = sorted(by_time)
    return tuple(
        Span(by_time[start], start, end) for start, end in zip(starts, [*starts[1:], None][: len(starts)], strict=True)
    )


def micros(moment: datetime | None) -> int | None:
    """Return a moment in microseconds since the epoch."""
    return None if moment is None else (moment - _BEGIN) // timedelta(microseconds=1)


def _check_readable_as(dataset: str, old: SealedVersion, newest: SealedVersion) -> None:
    """Refuse a version that does not lie in the buckets of the newest one, or has a column of another kind."""
    what = f"dataset {dataset!r}: version {old.id} can't be read over time with {newest.id}, which was sealed last: "
    if old.partitions != newest.partitions:
        counts = " and ".join(str(version.partitions or "one copy") for version in (old, newest))
        raise DatasetError(
            f"{what}they have different partitions ({counts}).",
            f"Bring all to one number: adjunct dataset repartition {dataset} --partitions N --reason ….",
            dataset=dataset,
            version=old.id,
        )
    spread = [(version.key, version.partition_by, _types(version, version.key)) for version in (old, newest)]
    if spread[0] != spread[1]:
        raise DatasetError(
            f"{what}they have different keys.",
            "Discard the older versions (adjunct dataset discard), or declare the dataset under a new name.",
            dataset=dataset,
            version=old.id,
        )
    now = {field.name: field.type for field in newest.columns.fields}
    for field in old.columns.fields:
        if field.name in now and not widens(field.type, now[field.name]):
            raise DatasetError(
                f"{what}its column {field.name!r} is {field.type}, and {now[field.name]} there.",
                "Discard the older versions (adjunct dataset discard), or give the column a new name.",
                dataset=dataset,
                version=old.id,
            )


def _types(version: SealedVersion, names: Sequence[str]) -> list[str]:
    return [version.columns.field(name).type for name in names]
