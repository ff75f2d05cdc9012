"""What a dataset says of other times than now: all entries with the time in which each was valid, or those of a moment.

This is the time that entries state (*valid time*). What was committed when, and served then, is another question:
`open_dataset(…, as_of=…)` answers that one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.rows_of_key import without_history
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.reading.versions_over_time import VersionsOverTime, micros
from dagster_adjunct.assets.versions.kept_history import VALID_FROM, VALID_TO, moment_of
from dagster_adjunct.assets.versions.sealed_version import TOMBSTONE
from dagster_adjunct.resources.errors import ConfigurationError, DatasetError
from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.given_session import session_of
from dagster_adjunct.resources.spark.spark_errors import unwrapped

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from dagster_adjunct.resources.objects.object_store import ObjectStore

Reader = VersionReader | VersionsOverTime
_STARTS, _RUN = "__starts", "__run"


@dataclass(frozen=True, slots=True)
class EntriesOverTime:
    """All entries of a dataset over time, as a frame of type 2: one row for each interval of a key.

    Beside the entry's columns a row has `valid_from`, `valid_to` (excluded; null: it is valid now) and `is_current`.
    Deletions are gaps, and touching intervals of one key with equal entries are one. What had ended by the edge of the
    history is left out.
    """

    reader: Reader

    def __post_init__(self) -> None:
        check_history(self.reader)

    @property
    def dataset(self) -> str:
        """The dataset's name."""
        return self.reader.dataset

    @property
    def version(self) -> str:
        """The id of the version that was read (of a bounded dataset, of the one sealed last)."""
        return self.reader.version

    @property
    def store(self) -> ObjectStore:
        """Where the files are."""
        return self.reader.store

    @property
    def names(self) -> tuple[str | None, str, str]:
        """What the three columns of time are called; see `names_of_times`."""
        return names_of_times(self.reader)

    @property
    def schema(self) -> Schema:
        """The columns of the entries. Those of time follow them."""
        return self.reader.schema

    @unwrapped()
    def frame(self, spark: SparkSession | Callable[[], SparkSession]) -> DataFrame:
        """Return the frame. A partitioned dataset is read with no exchange; each bucket is sorted by key and time."""
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        rows = self.reader.history_frame(session_of(spark))
        edge = edge_of(self.reader)
        if edge is not None:  # whether or not a compaction has dropped it already
            rows = rows.where(F.col(VALID_TO).isNull() | (F.col(VALID_TO) > F.timestamp_micros(F.lit(edge))))
        if not self.reader.sealed.partition_by:
            rows = rows.coalesce(1)
        key = [column(name) for name in self.reader.sealed.key]
        in_time = Window.partitionBy(*key).orderBy(VALID_FROM)
        goes_on = F.lag(VALID_TO).over(in_time) == F.col(VALID_FROM)
        same: Column = F.coalesce(goes_on, F.lit(False)) & ~F.lag(TOMBSTONE, 1, True).over(in_time)
        for name in content_of(self.reader):
            same = same & F.lag(column(name)).over(in_time).eqNullSafe(column(name))
        starts = (F.col(TOMBSTONE) | ~same).cast("int")
        runs = rows.withColumn(_STARTS, starts).withColumn(_RUN, F.sum(_STARTS).over(in_time))
        whole = Window.partitionBy(*key, _RUN).orderBy(VALID_FROM).rowsBetween(0, Window.unboundedFollowing)
        ended = runs.withColumn(VALID_TO, F.last(VALID_TO).over(whole))
        start, end, current = self.names
        return ended.where((F.col(_STARTS) == 1) & ~F.col(TOMBSTONE)).select(
            *[column(name) for name in self.schema.names],
            *([F.col(VALID_FROM).alias(start)] if start else []),
            F.col(VALID_TO).alias(end),
            F.col(VALID_TO).isNull().alias(current),
        )


@dataclass(frozen=True, slots=True)
class EntriesAt:
    """The entries of a dataset that were valid at a moment; raises DatasetError for one that its history lacks."""

    reader: Reader
    moment: datetime

    def __post_init__(self) -> None:
        check_history(self.reader)
        check_moment(self.reader, self.moment)

    @property
    def dataset(self) -> str:
        """The dataset's name."""
        return self.reader.dataset

    @property
    def version(self) -> str:
        """The id of the version that was read (of a bounded dataset, of the one that was valid)."""
        return self.read.version

    @property
    def store(self) -> ObjectStore:
        """Where the files are."""
        return self.reader.store

    @property
    def schema(self) -> Schema:
        """The columns of the entries."""
        return self.read.schema

    @property
    def read(self) -> VersionReader:
        """The version whose files are read."""
        if isinstance(self.reader, VersionReader):
            return self.reader
        valid = self.reader.at(self.moment)
        assert valid is not None, "the moment was checked"
        return valid

    @unwrapped()
    def frame(self, spark: SparkSession | Callable[[], SparkSession]) -> DataFrame:
        """Return the entries as a DataFrame with the columns of `schema`: a bucketed scan, as `Dataset.frame` is."""
        from pyspark.sql import functions as F

        if isinstance(self.reader, VersionsOverTime):
            return self.read.frame(spark)
        return self.reader.frame_at(spark, F.timestamp_micros(F.lit(micros(self.moment))))


def check_history(reader: Reader) -> None:
    """Refuse a version that holds entries of one time only. Raises DatasetError."""
    if isinstance(reader, VersionReader) and reader.sealed.history is None:
        raise without_history(reader.dataset)


def check_moment(reader: Reader, moment: datetime) -> None:
    """Refuse a time without its zone, and one that lies before what the history holds."""
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        raise ConfigurationError(
            f"dataset {reader.dataset!r} is to be read as it was valid at {moment!r}: expected a time with its zone.",
            "Give a datetime with one: tzinfo=UTC.",
            argument="moment",
            dataset=reader.dataset,
        )
    edge = edge_of(reader)
    asked = micros(moment)
    assert asked is not None
    if edge is not None and asked < edge:
        since = moment_of(edge)
        raise DatasetError(
            f"dataset {reader.dataset!r}: what was valid at {moment.astimezone(UTC)} is not known; its history "
            f"begins at {since.astimezone(UTC)}.",
            "A longer history keeps more: history=… of a change stream, discard=DiscardPolicy(keep=…) of versions.",
            dataset=reader.dataset,
        )


def edge_of(reader: Reader) -> int | None:
    """Return the first moment that the history is whole at, in microseconds since the epoch; None: it has no begin."""
    return reader.edge if isinstance(reader, VersionsOverTime) else reader.sealed.edge


def content_of(reader: Reader) -> list[str]:
    """Return the columns that say whether two entries of a key are equal: not since when they are valid."""
    told = _told_by(reader)
    return [name for name in reader.schema.names if name not in reader.sealed.key and name != told]


def names_of_times(reader: Reader) -> tuple[str | None, str, str]:
    """Return what the columns of time are called beside those of entries.

    Where entries tell since when they are valid in a column `valid_from`, that is it (None: there is no other). Where
    they have another column that is called as one of the three, all begin with `__`.
    """
    own = {name.lower() for name in reader.schema.names}
    told = _told_by(reader) == "valid_from"
    if own & ({"valid_to", "is_current"} if told else {"valid_from", "valid_to", "is_current"}):
        return ("__valid_from", "__valid_to", "__is_current")
    return (None if told else "valid_from", "valid_to", "is_current")


def _told_by(reader: Reader) -> str | None:
    """Return the column that says since when an entry is valid, None where its record or version does."""
    history = reader.sealed.history if isinstance(reader, VersionReader) else None
    return None if history is None else history.valid_from
