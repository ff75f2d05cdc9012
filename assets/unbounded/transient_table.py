"""Transient tables (`persistent=False`): built for one run in Spark's memory, and never stored
(SAMZA-1278).

A table that is marked for bootstrap is built from the stream's oldest offset up to its end; any
other continues from the last offset that its application has read. A version is the text
"offsets-1:" followed by the stream ranges as JSON. Reading the same ranges again gives the same
table, so a batch that a crash interrupted can be retried.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from dagster_adjunct.assets.declaration.change_formats import KEPT
from dagster_adjunct.assets.declaration.change_values import Samples
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.sources.changes import decode_changes, fail_on_problems
from dagster_adjunct.assets.sources.entries import Offsets, OpenedStream, Ranges, offsets_to_json
from dagster_adjunct.assets.sources.order_samples import find_order_samples
from dagster_adjunct.assets.sources.transactions import limit_to_complete_transactions
from dagster_adjunct.assets.unbounded.complete_rows import RowCompletion, complete_frame
from dagster_adjunct.assets.unbounded.progress import StreamPosition
from dagster_adjunct.assets.unbounded.recovery import incomplete_stream_error, lost_changes_error
from dagster_adjunct.assets.versions.manifest import Decision
from dagster_adjunct.assets.versions.reports import Action, AdvanceReport, Stages
from dagster_adjunct.assets.versions.version import POSITION, build_layout
from dagster_adjunct.resources.documents import first_validation_problem
from dagster_adjunct.resources.errors import (
    AdjunctError,
    DatasetError,
    MalformedDocumentError,
    OffsetOutOfRangeError,
)
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.schemas.schema import Schema, named_column
from dagster_adjunct.resources.spark.in_process import is_remote, resolve_session
from dagster_adjunct.resources.streams.system import (
    OFFSET,
    PARTITION,
    TOMBSTONE,
    StreamSystem,
    SystemStreamPartition,
)
from dagster_adjunct.resources.times import utc_now

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_KIND = "offsets-"
_FORM = "offsets-1:"
_STORED = TypeAdapter(dict[str, tuple[str, str]])


def is_transient(version: str) -> bool:
    """Whether a version id is that of a transient table."""
    return version.startswith(_KIND)


def version_from_ranges(ranges: Ranges) -> str:
    """Return the id of the version that is built from the changes in these ranges."""
    spans = {str(ssp): list(ranges[ssp]) for ssp in sorted(ranges)}
    return _FORM + json.dumps(spans, separators=(",", ":"))


def ranges_from_version(dataset: str, version: str) -> Ranges:
    """Return the ranges of a version id. Raises MalformedDocumentError for any other text."""
    try:
        if not version.startswith(_FORM):
            raise ValueError(f"it does not begin with {_FORM}")
        ranges = _STORED.validate_json(version.removeprefix(_FORM))
        return {SystemStreamPartition.parse(ssp): span for ssp, span in ranges.items()}
    except (ValueError, AdjunctError) as error:
        problem = (
            first_validation_problem(error) if isinstance(error, ValidationError) else str(error)
        )
        raise MalformedDocumentError(
            f"dataset {dataset!r} is transient, and {version!r} is not a version of it: {problem}.",
            "Run the application with the release that wrote its batch log, or a newer one.",
            dataset=dataset,
        ) from error


class TransientVersion:
    """One version of a transient table with `rows` entries, in Spark's memory until it is
    released.
    """

    def __init__(
        self, dataset: str, schema: Schema, ranges: Ranges, kept: DataFrame, rows: int
    ) -> None:
        self.dataset = dataset
        self.schema = schema
        self.ranges = ranges
        self.rows = rows
        self.version = version_from_ranges(ranges)
        self.kept = kept

    def __repr__(self) -> str:
        return f"TransientVersion({self.dataset!r}, {self.version!r})"

    def frame(self, spark: SparkSession | Callable[[], SparkSession]) -> DataFrame:
        """Return all entries, with the columns of `schema`.

        Bucket i of a partitioned dataset is partition i, so that a join on its partition columns or
        its key needs no exchange on this side; a broadcast dataset is one partition, which every
        task gets a copy of.
        """
        spark = resolve_session(spark)
        return self.kept.where(f"NOT {TOMBSTONE}").select(
            *[named_column(name) for name in self.schema.names]
        )

    def release(self) -> None:
        """Free the memory; the version can't be read afterwards."""
        if is_remote(self.kept):  # the server drops it with the last frame of this client
            return
        rdd = self.kept._jdf.queryExecution().logical().rdd()
        # As RDD.unpersist does, without its warning that the rows can't be computed again.
        rdd.context().unpersistRDD(rdd.id(), False)


_ABANDON_BATCH = (
    "Abandon the batch (adjunct checkpoint abandon APPLICATION --reason …): the next one reads the"
    " table as it is then."
)
_PREVENT_LOSS = "Longer retention of the stream, or persistent=True, prevents this."
_HIDDEN = (POSITION, TOMBSTONE, OFFSET, PARTITION)


class TransientTable:
    """The table of a dataset with `persistent=False` during one run of an application.

    `last` is the version that the application's last batch read. Without bootstrap the table begins
    at the end offsets of that version, or at the stream's default offset if there is none.
    """

    def __init__(
        self, systems: Mapping[str, StreamSystem], spec: AdjunctDataset, *, last: str | None = None
    ) -> None:
        self.spec = spec
        self.view: TransientVersion | None = None
        self._systems = systems
        self._last = last
        self._samples: Samples | None = None

    @cached_property
    def _source(self) -> OpenedStream:
        """The input stream, opened once: a run keeps the columns and partitions that it began
        with.
        """
        return OpenedStream.of(self._systems, self.spec)

    def advance(self, spark: Callable[[], SparkSession]) -> AdvanceReport:
        """Build the table, or apply the changes since the last call, up to the stream's current
        end.

        The previous version is released once the new one exists. Raises BadChangeError and
        NullKeyError for changes that can't be applied, DatasetError where the stream no longer
        holds every key for a bootstrap, and OffsetOutOfRangeError where retention has deleted the
        next changes and on_lost_offset="fail", or where the stream now ends before offsets that
        were read.
        """
        source = self._source
        before = self.view
        stages = Stages(self.spec.name)
        with stages("collect"):
            upcoming = source.system.upcoming(source.ssps)
            if before is None:
                starts, decision = self._start_offsets(upcoming)
            else:
                starts = _end_offsets(before.ranges)
                decision = Decision(
                    action="continue", store="valid", reason="this run has built it", at=utc_now()
                )
            refusal = source.recreated_error(
                None, starts, upcoming
            )  # a version has no stream identity, only offsets
            if refusal is not None:
                raise refusal
            fresh = self._next_ranges(starts, upcoming, spark)
            records = source.count(fresh) if fresh else 0
        action: Action = "up-to-date"
        if before is None or fresh:
            action = "applied" if before is not None else "bootstrapped"
            since = (
                {ssp: start for ssp, (start, _) in before.ranges.items()}
                if before is not None
                else starts
            )
            ranges = {
                ssp: (since[ssp], fresh[ssp][1] if ssp in fresh else starts[ssp])
                for ssp in source.ssps
            }
            if before is not None and not records:  # only markers, which take offsets
                self.view = TransientVersion(
                    self.spec.name, source.schema, ranges, before.kept, before.rows
                )
            else:
                with stages("build"):
                    self.view = self._build(spark(), fresh if records else {}, ranges, before)
                if before is not None:
                    before.release()
        assert self.view is not None
        ends = _end_offsets(self.view.ranges)
        return AdvanceReport(
            dataset=self.spec.name,
            kind=self.spec.kind,
            action=action,
            version=self.view.version,
            rows=self.view.rows,
            counters={"read": records},
            offsets=offsets_to_json(ends),
            lag={
                str(ssp): source.system.distance(ssp, end, upcoming[ssp])
                for ssp, end in ends.items()
            },
            decision=decision,
            seconds=stages.seconds,
            schema=source.schema,
            note=f"{decision.action}: {decision.reason}" if before is None else "",
        )

    def restore(self, version: str, spark: Callable[[], SparkSession]) -> TransientVersion:
        """Rebuild the table from the ranges of this version, return it, and continue from there.

        Where retention has deleted a part of them, the version of the remaining changes is returned
        if the table is declared to continue without lost changes; else OffsetOutOfRangeError is
        raised. Raises DatasetError where the partitions of the input have changed.
        """
        if self.view is not None and self.view.version == version:
            return self.view
        source = self._source
        ranges = dict(ranges_from_version(self.spec.name, version))
        if set(ranges) != set(source.ssps):
            raise DatasetError(
                f"dataset {self.spec.name!r}: the open batch began with offsets of"
                f" {', '.join(map(str, sorted(ranges)))}, and the declared input is"
                f" {self.spec.input} with {len(source.ssps)} partitions.",
                "Declare the previous input until the batch has ended.",
                dataset=self.spec.name,
            )
        oldest = source.system.oldest(source.ssps)
        upcoming = source.system.upcoming(source.ssps)
        for ssp, (start, end) in [*ranges.items()]:
            beyond = source.system.compare(end, upcoming[ssp]) > 0
            lost = start != end and source.system.compare(start, oldest[ssp]) < 0
            if beyond or (
                lost and (self.spec.bootstrap or self.spec.following.on_lost_offset == "fail")
            ):
                problem = f"the oldest that the stream still holds is {oldest[ssp]}"
                if beyond:
                    problem = (
                        f"the stream ends at {upcoming[ssp]}: it was recreated, or has lost changes"
                    )
                raise OffsetOutOfRangeError(
                    f"dataset {self.spec.name!r}: the open batch began with offsets {start} to"
                    f" {end} of {ssp}, and {problem}. The batch can't be retried.",
                    _ABANDON_BATCH if beyond else f"{_ABANDON_BATCH} {_PREVENT_LOSS}",
                    dataset=self.spec.name,
                    stream=ssp.qualified_stream,
                    partition=ssp.partition,
                )
            if lost:
                first = oldest[ssp]
                ranges[ssp] = (first, first if source.system.compare(end, first) < 0 else end)
        filled = {ssp: span for ssp, span in ranges.items() if span[0] != span[1]}
        before = self.view
        self.view = self._build(
            spark(), filled if filled and source.count(filled) else {}, ranges, None
        )
        if before is not None:
            before.release()
        return self.view

    def raise_if_stale(self, max_staleness: timedelta) -> None:
        """Raise StaleDatasetError where unread changes are older than `max_staleness`.

        After an advance, only changes of an incomplete transaction are unread.
        """
        assert self.view is not None
        system = self._source.system
        ssps = self._source.ssps
        at = StreamPosition(
            system, _end_offsets(self.view.ranges), system.oldest(ssps), system.upcoming(ssps), None
        )
        step = (
            "Deliver the rest of the transaction that it waits for, or raise the limit:"
            " max_staleness=…."
        )
        at.raise_if_stale(self.spec.name, max_staleness, utc_now(), step)

    def release(self) -> None:
        """Free the memory at the end of the run."""
        if self.view is not None:
            self.view.release()
            self.view = None

    def _start_offsets(self, upcoming: Offsets) -> tuple[Offsets, Decision]:
        """Return the offsets at which a new table begins, and the decision that says why."""
        source = self._source
        oldest = source.system.oldest(source.ssps)
        if self.spec.bootstrap:
            reason = "it is transient, and bootstrapped in each run"
            if not source.system.has_all_keys(source.info.name):
                raise incomplete_stream_error(self.spec, reason, "Declare persistent=True")
            return oldest, Decision(action="bootstrap", store="none", reason=reason, at=utc_now())
        last: dict[
            SystemStreamPartition, str
        ] = {}  # end offsets of the last version, of partitions that still exist
        if self._last is not None and is_transient(self._last):
            ends = _end_offsets(ranges_from_version(self.spec.name, self._last))
            last = {ssp: ends[ssp] for ssp in source.ssps if ssp in ends}
        lost = [ssp for ssp, end in last.items() if source.system.compare(end, oldest[ssp]) < 0]
        reason = "it is transient, and continues from " + (
            "the last offset" if last else "the default offset"
        )
        if lost:
            ssp = lost[0]
            problem = (
                f"the oldest offset of {ssp} is {oldest[ssp]}, and the table continues at"
                f" {last[ssp]}"
            )
            if self.spec.following.on_lost_offset == "fail":
                instead = 'declare on_lost_offset="rebuild" to continue without them'
                raise lost_changes_error(self.spec.name, problem, instead)
            reason += f"; {problem}"
        decision = Decision(action="create", store="none", reason=reason, at=utc_now())
        return source.start_offsets(last, oldest, upcoming), decision

    def _next_ranges(
        self, starts: Offsets, upcoming: Offsets, spark: Callable[[], SparkSession]
    ) -> Ranges:
        """Return the unread ranges, without incomplete transactions if the change format keeps
        these whole.
        """
        system = self._source.system
        ranges = {
            ssp: (start, upcoming[ssp])
            for ssp, start in starts.items()
            if system.compare(start, upcoming[ssp])
        }
        if not ranges or not getattr(self.spec.following.changes, "transactions", None):
            return ranges
        return limit_to_complete_transactions(
            self.spec, self._systems, spark(), self._source, ranges
        )

    def _build(
        self, spark: SparkSession, fresh: Ranges, ranges: Ranges, before: TransientVersion | None
    ) -> TransientVersion:
        """Return the version of `ranges`: the rows of the version `before`, if any, and the
        `fresh` changes.
        """
        schema = self._source.schema
        rows = self._read_changes(spark, fresh)
        if before is not None:
            rows = before.kept.unionByName(
                rows, allowMissingColumns=True
            )  # kept rows have all columns
        if self.spec.following.completes:
            rows = self._complete(rows)
        # A plan that reads a stream works only while its table is in the session's catalogue, which
        # keeps the newest ones. A checkpoint holds rows alone, so it outlives them.
        kept = self._keep_newest(rows).localCheckpoint()
        return TransientVersion(
            self.spec.name, schema, ranges, kept, kept.where(f"NOT {TOMBSTONE}").count()
        )

    def _read_changes(self, spark: SparkSession, ranges: Ranges) -> DataFrame:
        source = self._source
        names = (*source.schema.names, *_HIDDEN)
        if not ranges:
            # Spark must not know that there are no rows, or it would optimise their partitioning
            # away. Spark Connect has no RDDs, so that a join with an empty table may shuffle.
            hidden = (
                f"{POSITION} {source.position_type}, {TOMBSTONE} BOOLEAN, {OFFSET} BIGINT,"
                f" {PARTITION} INT"
            )
            ddl = f"{source.schema.ddl()}, {hidden}"
            return spark.createDataFrame(
                [] if is_remote(spark) else spark.sparkContext.emptyRDD(), ddl
            )
        self._samples = find_order_samples(source, ranges, lambda: spark, self._samples)
        changes = decode_changes(source, source.read(spark, ranges), samples=self._samples)
        changes = fail_on_problems(changes, self.spec.name)
        kept = [KEPT] if self.spec.following.completes else []
        return changes.select(*[named_column(name) for name in (*names, *kept)])

    def _complete(self, rows: DataFrame) -> DataFrame:
        """Return the rows, with missing columns completed from the rows before them."""
        spec = self.spec
        if KEPT not in rows.columns:
            return rows
        layout = build_layout(
            self._source.schema, spec.key, spec.partition_by, spec.partitions, positioned=True
        )
        completion = RowCompletion(
            spec.name, layout, (), spec.following.order is None, set_aside=False
        )
        order = [named_column(name) for name in (*spec.key, POSITION, OFFSET, PARTITION)]
        return complete_frame(self._repartition(rows).sortWithinPartitions(*order), completion)

    def _repartition(self, rows: DataFrame) -> DataFrame:
        """Return the rows, partitioned into the dataset's buckets."""
        spec = self.spec
        if spec.partitions is None:
            return rows.repartition(1)
        return rows.repartition(
            spec.partitions, *[named_column(name) for name in spec.partition_by]
        )

    def _keep_newest(self, rows: DataFrame) -> DataFrame:
        """Return the newest change of each key, in the dataset's buckets; ordered by offset,
        without deletions.
        """
        from pyspark.sql import Window

        spec = self.spec
        rows = self._repartition(rows)
        newest_first = [F.col(name).desc() for name in (POSITION, OFFSET, PARTITION)]
        same_key = Window.partitionBy(*[named_column(name) for name in spec.key]).orderBy(
            *newest_first
        )
        newest = (
            rows.withColumn("__rank", F.row_number().over(same_key))
            .where("__rank = 1")
            .drop("__rank")
        )
        # Ordered by a column, a deletion also wins against later changes with a lower value, so it
        # is kept.
        return newest if spec.following.order is not None else newest.where(f"NOT {TOMBSTONE}")


def _end_offsets(ranges: Ranges) -> dict[SystemStreamPartition, str]:
    return {ssp: end for ssp, (_, end) in ranges.items()}
