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
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from dagster_adjunct.assets.declaration.change_formats import KEPT
from dagster_adjunct.assets.declaration.change_values import Samples
from dagster_adjunct.assets.declaration.dataset import UnboundedDataset
from dagster_adjunct.assets.sources.changes import decode_changes, fail_on_problems
from dagster_adjunct.assets.sources.entries import (
    Offsets,
    OpenedChanges,
    Ranges,
    look_for_files,
    offsets_to_json,
    open_changes,
)
from dagster_adjunct.assets.sources.order_samples import find_order_samples
from dagster_adjunct.assets.sources.transactions import limit_to_complete_transactions
from dagster_adjunct.assets.unbounded.complete_rows import RowCompletion, complete_frame
from dagster_adjunct.assets.unbounded.progress import StreamPosition
from dagster_adjunct.assets.unbounded.recovery import incomplete_stream_error, lost_changes_error
from dagster_adjunct.assets.unbounded.tied_changes import find_tie_rule
from dagster_adjunct.assets.versions.manifest import Decision
from dagster_adjunct.assets.versions.reports import Action, AdvanceReport, Stages
from dagster_adjunct.assets.versions.version import POSITION, StoredPositions, build_layout
from dagster_adjunct.resources.bucketing.files import SET_AT
from dagster_adjunct.resources.documents import first_validation_problem
from dagster_adjunct.resources.errors import (
    AdjunctError,
    DatasetError,
    MalformedDocumentError,
    OffsetOutOfRangeError,
)
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.schemas.schema import Schema, named_columns
from dagster_adjunct.resources.spark.in_process import is_remote, resolve_session
from dagster_adjunct.resources.spark.jvm import release_checkpoint
from dagster_adjunct.resources.streams.system import (
    OFFSET,
    PARTITION,
    TOMBSTONE,
    StreamSystem,
    SystemStreamPartition,
)
from dagster_adjunct.resources.threads import requested_once
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
        if isinstance(error, ValidationError):
            problem = first_validation_problem(error)
        else:
            problem = str(error)
        raise MalformedDocumentError(
            f"dataset {dataset!r} is transient, and {version!r} is not a version of it: {problem}.",
            "Run the application with the release that wrote its batch log, or a newer one.",
            dataset=dataset,
        ) from error


@dataclass(frozen=True, slots=True, repr=False)
class TransientVersion:
    """One version of a transient table with `rows` entries, in Spark's memory until it is
    released.

    `kept` has the newest change of each key; also its deletion, if changes are ordered by a column.
    """

    dataset: str
    schema: Schema
    ranges: Ranges
    kept: DataFrame
    rows: int

    @property
    def version(self) -> str:
        """The id of the version."""
        return version_from_ranges(self.ranges)

    def __repr__(self) -> str:
        return f"TransientVersion({self.dataset!r}, {self.version!r})"

    def frame(self, spark: SparkSession | Callable[[], SparkSession]) -> DataFrame:
        """Return all entries, with the columns of `schema`.

        Bucket i of a partitioned dataset is partition i, so that a join on its partition columns or
        its key needs no exchange on this side; a broadcast dataset is one partition, which every
        task gets a copy of.
        """
        spark = resolve_session(spark)
        return self.kept.where(f"NOT {TOMBSTONE}").select(*named_columns(self.schema.names))

    def release(self) -> None:
        """Free the memory; the version can't be read afterwards."""
        if not is_remote(self.kept):  # else the server drops it with the last frame of this client
            release_checkpoint(self.kept)


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
        self,
        systems: Mapping[str, StreamSystem],
        spec: UnboundedDataset,
        *,
        last: str | None = None,
    ) -> None:
        self.spec = spec
        self.view: TransientVersion | None = None
        self._systems = systems
        self._last = last
        self._samples: Samples | None = None

    @requested_once
    def _source(self) -> OpenedChanges:
        """The input stream, opened once: a run keeps the columns and partitions that it began
        with.
        """
        return open_changes(self._systems, self.spec)

    def advance(self, spark: Callable[[], SparkSession]) -> AdvanceReport:
        """Build the table, or apply the changes since the last call, up to the stream's current
        end.

        The previous version is released once the new one exists. Raises BadChangeError and
        NullKeyError for changes that can't be applied, DatasetError where the stream no longer
        holds every key for a bootstrap, and OffsetOutOfRangeError where retention has deleted the
        next changes and on_lost_offset="fail", or where the stream now ends before offsets that
        were read.
        """
        look_for_files(self._systems, self.spec)
        source = self._source
        before = self.view
        stages = Stages(self.spec.name)
        with stages("collect"):
            upcoming = source.system.upcoming(source.ssps)
            starts, decision = self._start_offsets(upcoming)
            # A version has no stream identity, only offsets.
            refusal = source.recreated_error(None, starts, upcoming)
            if refusal is not None:
                raise refusal
            fresh = self._next_ranges(starts, upcoming, spark)
            records = 0
            if fresh:
                records = source.count(fresh)
        ends = {**starts, **_end_offsets(fresh)}
        if before is not None and not records:  # only markers, which take offsets
            view = replace(before, ranges=_move_ends(before.ranges, ends))
        else:
            ranges: Ranges
            if before is None:
                ranges = {ssp: (start, ends[ssp]) for ssp, start in starts.items()}
            else:
                ranges = _move_ends(before.ranges, ends)
            with stages("build"):
                view = self._build(spark(), fresh if records else {}, ranges, before)
            if before is not None:
                before.release()
        self.view = view
        return AdvanceReport(
            dataset=self.spec.name,
            kind=self.spec.kind,
            action=_action_on(before, fresh),
            version=view.version,
            rows=view.rows,
            counters={"read": records},
            offsets=offsets_to_json(ends),
            lag={
                str(ssp): source.system.distance(ssp, end, upcoming[ssp])
                for ssp, end in ends.items()
            },
            decision=decision,
            seconds=stages.seconds,
            schema=source.schema,
            note="" if before is not None else f"{decision.action}: {decision.reason}",
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
        ranges = {
            ssp: self._remaining_range(ssp, span, oldest[ssp], upcoming[ssp])
            for ssp, span in ranges.items()
        }
        filled = {}
        for ssp, (start, end) in ranges.items():
            if start != end:
                filled[ssp] = (start, end)
        if filled and not source.count(filled):  # only markers, which take offsets
            filled = {}
        before = self.view
        self.view = self._build(spark(), filled, ranges, None)
        if before is not None:
            before.release()
        return self.view

    def _remaining_range(
        self, ssp: SystemStreamPartition, span: tuple[str, str], oldest: str, upcoming: str
    ) -> tuple[str, str]:
        """Return what the stream still holds of a range that a batch began with; an empty range
        from `oldest` on if that is nothing.

        Raises OffsetOutOfRangeError if the table may not continue without what is lost, or if the
        stream ends before the range does.
        """
        start, end = span
        compare = self._source.system.compare
        if compare(end, upcoming) > 0:
            problem = f"the stream ends at {upcoming}: it was recreated, or has lost changes"
            raise self._lost_range_error(ssp, span, problem, _ABANDON_BATCH)
        needs_nothing = start == end
        if needs_nothing or compare(start, oldest) >= 0:
            return span
        # A table that is bootstrapped has every key, so it can't lack changes.
        may_lack_changes = not self.spec.bootstrap and self.spec.following.on_lost_offset != "fail"
        if not may_lack_changes:
            problem = f"the oldest that the stream still holds is {oldest}"
            raise self._lost_range_error(ssp, span, problem, f"{_ABANDON_BATCH} {_PREVENT_LOSS}")
        if compare(end, oldest) < 0:
            return oldest, oldest
        return oldest, end

    def _lost_range_error(
        self, ssp: SystemStreamPartition, span: tuple[str, str], problem: str, step: str
    ) -> OffsetOutOfRangeError:
        """Return the error for an open batch of which the stream no longer holds this range."""
        start, end = span
        return OffsetOutOfRangeError(
            f"dataset {self.spec.name!r}: the open batch began with offsets {start} to"
            f" {end} of {ssp}, and {problem}. The batch can't be retried.",
            step,
            dataset=self.spec.name,
            stream=ssp.qualified_stream,
            partition=ssp.partition,
        )

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
        """Return the offsets at which the table begins or continues, and the decision that says
        why.
        """
        if self.view is not None:
            return _end_offsets(self.view.ranges), Decision(
                action="continue", store="valid", reason="this run has built it", at=utc_now()
            )
        source = self._source
        oldest = source.system.oldest(source.ssps)
        if self.spec.bootstrap:
            reason = "it is transient, and bootstrapped in each run"
            if not source.system.has_all_keys(source.info.name):
                raise incomplete_stream_error(self.spec, reason, "Declare persistent=True")
            return oldest, Decision(action="bootstrap", store="none", reason=reason, at=utc_now())
        last = self._last_offsets()
        where = "the last offset" if last else "the default offset"
        reason = f"it is transient, and continues from {where}"
        for ssp, end in last.items():
            if source.system.compare(end, oldest[ssp]) >= 0:
                continue
            problem = (
                f"the oldest offset of {ssp} is {oldest[ssp]}, and the table continues at {end}"
            )
            if self.spec.following.on_lost_offset == "fail":
                instead = 'declare on_lost_offset="rebuild" to continue without them'
                raise lost_changes_error(self.spec.name, problem, instead)
            reason += f"; {problem}"
            break  # one example is enough
        decision = Decision(action="create", store="none", reason=reason, at=utc_now())
        return source.start_offsets(last, oldest, upcoming), decision

    def _last_offsets(self) -> dict[SystemStreamPartition, str]:
        """Return the end offsets of the last version, of partitions that still exist."""
        if self._last is None or not is_transient(self._last):
            return {}
        ends = _end_offsets(ranges_from_version(self.spec.name, self._last))
        found = {}
        for ssp in self._source.ssps:
            if ssp in ends:
                found[ssp] = ends[ssp]
        return found

    def _next_ranges(
        self, starts: Offsets, upcoming: Offsets, spark: Callable[[], SparkSession]
    ) -> Ranges:
        """Return the unread ranges, without incomplete transactions if the change format keeps
        these whole.
        """
        system = self._source.system
        ranges = {}
        for ssp, start in starts.items():
            if system.compare(start, upcoming[ssp]):
                ranges[ssp] = (start, upcoming[ssp])
        if not ranges or self.spec.transactions is None:
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
        rows = self._read_changes(spark, fresh)
        if before is not None:  # kept rows have all columns
            rows = before.kept.unionByName(rows, allowMissingColumns=True)
        rows = self._complete(rows)
        # A plan that reads a stream works only while its table is in the session's catalogue, which
        # keeps the newest ones. A checkpoint holds rows alone, so it outlives them.
        kept = self._keep_newest(rows).localCheckpoint()
        count = kept.where(f"NOT {TOMBSTONE}").count()
        return TransientVersion(self.spec.name, self._source.schema, ranges, kept, count)

    def _read_changes(self, spark: SparkSession, ranges: Ranges) -> DataFrame:
        """Return the changes in these ranges, with the columns of the table, the hidden ones, and
        KEPT if changes may leave out columns; without ranges, an empty frame.
        """
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
            if is_remote(spark):
                return spark.createDataFrame([], ddl)
            return spark.createDataFrame(spark.sparkContext.emptyRDD(), ddl)
        self._samples = find_order_samples(source, ranges, lambda: spark, self._samples)
        changes = decode_changes(source, source.read(spark, ranges), samples=self._samples)
        changes = fail_on_problems(changes, self.spec.name)
        kept = []
        if self.spec.following.completes:
            kept = [KEPT]
        return changes.select(*named_columns((*names, *kept)))

    def _complete(self, rows: DataFrame) -> DataFrame:
        """Return the rows, with the columns that changes leave out completed from the rows before
        them; unchanged if changes can't leave out columns and can't be tied.

        Raises KeyOrderError for changes of which nothing says which one is newer.
        """
        spec = self.spec
        merges_columns = self._source.merges_columns
        layout = build_layout(
            self._source.schema,
            spec.key,
            spec.partition_by,
            spec.partitions,
            StoredPositions(by_column=merges_columns),
        )
        if merges_columns and SET_AT not in rows.columns:
            rows = rows.withColumn(SET_AT, F.lit(None).cast("string"))
        ties = find_tie_rule(self._source, layout)
        has_missing_columns = KEPT in rows.columns
        if not has_missing_columns and not merges_columns and ties is None:
            return rows
        completion = RowCompletion(
            spec.name,
            layout,
            generations=(),  # the earlier rows are among `rows`
            by_offset=spec.following.order is None,
            set_aside=False,
            ties=ties,
            groups=self._source.stored_groups,
        )
        order = named_columns((*spec.key, POSITION, OFFSET, PARTITION))
        return complete_frame(self._repartition(rows).sortWithinPartitions(*order), completion)

    def _repartition(self, rows: DataFrame) -> DataFrame:
        """Return the rows, partitioned into the dataset's buckets."""
        spec = self.spec
        if spec.partitions is None:
            return rows.repartition(1)
        return rows.repartition(spec.partitions, *named_columns(spec.partition_by))

    def _keep_newest(self, rows: DataFrame) -> DataFrame:
        """Return the newest change of each key, in the dataset's buckets; ordered by offset,
        without deletions.
        """
        from pyspark.sql import Window

        spec = self.spec
        rows = self._repartition(rows)
        newest_first = [F.col(name).desc() for name in (POSITION, OFFSET, PARTITION)]
        same_key = Window.partitionBy(*named_columns(spec.key)).orderBy(*newest_first)
        newest = (
            rows.withColumn("__rank", F.row_number().over(same_key))
            .where("__rank = 1")
            .drop("__rank")
        )
        # Ordered by a column, a deletion also wins against later changes with a lower value, so it
        # is kept.
        if spec.following.order is not None:
            return newest
        return newest.where(f"NOT {TOMBSTONE}")


def _action_on(before: TransientVersion | None, fresh: Ranges) -> Action:
    """Return what an advance from the previous version over these ranges does."""
    if before is None:
        return "bootstrapped"
    if fresh:
        return "applied"
    return "up-to-date"


def _move_ends(ranges: Ranges, ends: Offsets) -> Ranges:
    """Return the ranges with these end offsets in place of theirs."""
    return {ssp: (start, ends[ssp]) for ssp, (start, _) in ranges.items()}


def _end_offsets(ranges: Ranges) -> dict[SystemStreamPartition, str]:
    return {ssp: end for ssp, (_, end) in ranges.items()}
