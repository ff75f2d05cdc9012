"""The changes of datasets as streams: `changes.planes` has those of the dataset `planes`.

A range of offsets gives the difference between what the dataset served at its start and at its end:
one record for each key whose entry differs. An offset is the number of a commit of the dataset,
times `STRIDE`; 0 is before the first one. The records of a range are numbered from its start on, in
the order of their keys, so that each has an offset of its own.

Readers stop at commits only. Reading needs the two versions, and nothing of what was between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from dagster_adjunct.assets.reading.change_records import ChangeRecords, RecordForm, records_schema
from dagster_adjunct.assets.reading.diff import buckets_to_read
from dagster_adjunct.assets.reading.entry_changes import ComparedVersions, shares_base
from dagster_adjunct.assets.reading.served_history import ServedHistory
from dagster_adjunct.assets.reading.stored_versions import list_datasets
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.version import SealedVersion
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.bucketing.files import Generation
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import named_column
from dagster_adjunct.resources.schemas.version_columns import NamedColumns
from dagster_adjunct.resources.spark.in_process import resolve_session
from dagster_adjunct.resources.spark.tasks import read_in_tasks, small_frame
from dagster_adjunct.resources.streams.system import (
    CHANGE_IMAGES,
    CHANGES,
    RECORD_META_COLUMNS,
    NumberedOffsets,
    OffsetRange,
    Repartitioning,
    StreamCapabilities,
    StreamInfo,
    StreamSystem,
    SystemStreamPartition,
    check_partition,
    check_range,
    parse_offset,
    register_system,
    require_one_stream,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STRIDE = 10**10
"""How far the offsets of two commits are apart: more than a partition has records."""
_BEGINNING = datetime.fromtimestamp(0, UTC)
_FEW_RECORDS = 100_000


def followed_dataset(stream: str) -> str | None:
    """Return the dataset whose changes a stream ("changes.planes") has, None for other streams."""
    system, _, dataset = stream.partition(".")
    if system not in (CHANGES, CHANGE_IMAGES):
        return None
    return dataset


def parse_commit(offset: str, what: str) -> int:
    """Return the number of the commit of an offset. Raises OffsetOutOfRangeError, in which `what`
    names the partition or system.
    """
    number, rest = divmod(parse_offset(offset, what), STRIDE)
    if rest:
        raise errors.OffsetOutOfRangeError(
            f"{what}: {offset} is not the offset of a commit of the dataset: expected a commit's"
            f" number followed by {len(str(STRIDE)) - 1} zeros.",
            f"Commit {number} has the offset {number * STRIDE}. Find commits in the history of the"
            " dataset: adjunct dataset history NAME.",
            offset=offset,
        )
    return number


def commit_offset(number: int) -> str:
    """Return the offset of a commit, which is after its changes: what is read from there on has
    changed since.
    """
    return str(number * STRIDE)


def identity_of(partitions: int) -> str:
    """Return the identity of the stream of a dataset with this number of partitions. With another
    number it is another stream: offsets stay, but records are in other partitions.
    """
    return f"{partitions}-partitions"


class ChangeStreams(NumberedOffsets):
    """The changes of each dataset of a lake as a stream of its name, in its partitions.

    Each record is the entry of a key after the range that was read, or a tombstone. A timestamp is
    the position of what was served then.
    """

    name = CHANGES
    default_offset = "oldest"
    capabilities = StreamCapabilities(reads_arrow=True, finds_times=True, exchanges_reads=True)
    _images: ClassVar[bool] = False

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._known: dict[str, ServedHistory] = {}
        self._is_snapshot = False

    # -- what there is

    def list_streams(self) -> list[str]:
        return list_datasets(self._lake)

    def snapshot(self, stream: str) -> StreamSystem:
        """Return this system with what the stream has now: later commits are not seen."""
        view = copy(self)
        view._known = {stream: self._read_history(stream)}
        view._is_snapshot = True
        return view

    def _read_history(self, stream: str) -> ServedHistory:
        """Return the commits of a dataset as they are now. Raises StreamNotFoundError."""
        try:
            history = ServedHistory.read(self._lake, stream)
        except errors.DatasetNotFoundError as error:
            raise errors.StreamNotFoundError(
                f"stream '{self.name}.{stream}' does not exist: {error.problem}",
                "It begins with the first commit of the dataset: advance it, or correct the name.",
                stream=f"{self.name}.{stream}",
            ) from error
        self._known[stream] = replace(history, system=self.name)
        return self._known[stream]

    def _history(self, stream: str, number: int | None = None) -> ServedHistory:
        """Return the commits of a dataset as they are now; as they were last known if these include
        `number`, or if this is a snapshot.
        """
        known = self._known.get(stream)
        if known is None:
            return self._read_history(stream)
        includes_number = number is not None and number <= known.number
        if self._is_snapshot or includes_number:
            return known
        return self._read_history(stream)

    def info(self, stream: str) -> StreamInfo:
        """Return the partitions, key and columns of a stream. Raises StreamNotFoundError."""
        history = self._history(stream)
        form = self._record_form(history)
        repartitioned = None
        before = history.manifest.repartitioned
        if before is not None:
            offset = commit_offset(before.commit)
            repartitioned = Repartitioning(
                identity_of(before.partitions),
                ended=(offset,) * before.partitions,
                continued_at=(offset,) * form.partitions,
            )
        return StreamInfo(
            stream,
            form.partitions,
            form.partition_by,
            "spark-murmur3",
            form.schema,
            identity=identity_of(form.partitions),
            repartitioned=repartitioned,
        )

    def _record_form(self, history: ServedHistory) -> RecordForm:
        """Return what all records of a stream have in common."""
        declared = history.manifest.declaration
        return RecordForm(
            dataset=history.log.name,
            key=declared.key,
            partition_by=declared.partition_by or declared.key,
            partitions=declared.partitions or 1,
            columns=self._columns(history).schema,
            images=self._images,
        )

    def _columns(self, history: ServedHistory) -> NamedColumns:
        """Return the columns of the version that is served; if none is, those that the dataset has
        had. Raises StreamNotFoundError if it never had a version.
        """
        served = history.manifest.version
        if served is None:
            columns = history.manifest.named_columns
        else:
            columns = served.named_columns
        if columns is None:
            name = f"{self.name}.{history.log.name}"
            raise errors.StreamNotFoundError(
                f"stream {name!r} has no columns yet: the dataset has no version.",
                f"Advance the dataset: adjunct dataset advance {history.log.name} MODULE:APP.",
                stream=name,
            )
        return columns

    def oldest(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        return dict.fromkeys(ssps, commit_offset(0))

    def upcoming(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        """Return the offsets after all changes so far."""
        ends: dict[str, str] = {}  # by stream
        found = {}
        for ssp in ssps:
            if ssp.stream not in ends:
                ends[ssp.stream] = commit_offset(self._history(ssp.stream).last_change())
            found[ssp] = ends[ssp.stream]
        return found

    def fingerprint(self, stream: str) -> str:
        """Return what differs once the dataset has another commit."""
        known = self._known.get(stream)
        if known is None:
            known = self._read_history(stream)
        log = known.shared or known.log.log
        return str(log.pointer_etag())

    def offset_for_timestamp(self, ssp: SystemStreamPartition, timestamp_ms: int) -> str:
        moment = _BEGINNING + timedelta(milliseconds=timestamp_ms)
        history = self._history(ssp.stream)
        return commit_offset(min(history.number_at(moment), history.last_change()))

    # -- offsets

    def compare(self, left: str, right: str) -> int:
        a = parse_commit(left, self.name)
        b = parse_commit(right, self.name)
        return (a > b) - (a < b)

    def distance(self, ssp: SystemStreamPartition, start: str, end: str) -> int:
        """Return how many records the range has at most; 0 if it ends before it starts."""
        since = parse_commit(start, str(ssp))
        until = parse_commit(end, str(ssp))
        if since >= until:
            return 0
        history = self._history(ssp.stream, until)
        return self._count_most(history, ssp.partition, since, until)

    def _count_most(self, history: ServedHistory, partition: int, since: int, until: int) -> int:
        """Return how many records a partition has at most, between two commits: the stored rows
        that have to be compared.
        """
        try:
            compared = choose_versions(history, since, until)
        except errors.VersionDiscardedError:  # it is reported where it is to be read
            compared = ComparedVersions(None, history.newest.version)
        partitions = history.manifest.declaration.partitions or 1
        have_other_buckets = any(
            version.layout.partitions != partitions for version in compared.ends
        )
        if have_other_buckets:
            return sum(version.stored_rows for version in compared.ends)
        if compared.by_deltas:
            deltas = [delta.generation for delta in compared.list_deltas()]
            return _count_rows(deltas, partition)
        if compared.old is not None and compared.new is not None:
            old = VersionReader(self._lake.store, history.log.name, compared.old)
            new = VersionReader(self._lake.store, history.log.name, compared.new)
            if partition not in buckets_to_read(old, new).buckets:
                return 0
        return sum(_count_rows(version.generations, partition) for version in compared.ends)

    def advance(self, ssp: SystemStreamPartition, start: str, count: int) -> str:
        """Return the offset of the last commit up to which the range has at most `count` records,
        but at least that of the next commit: a commit is read as a whole. `start` itself if `count`
        is not above 0.
        """
        since = parse_commit(start, str(ssp))
        if count <= 0:
            return start
        history = self._history(ssp.stream)
        last = history.last_change()
        if not _is_retained(history, since):
            return commit_offset(last)  # records after an erasure must not show what was erased
        cuts = history.cuts(since, last)
        # The last cut with few enough records, by bisection; the first one in any case.
        low = 0
        high = len(cuts) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._count_most(history, ssp.partition, since, cuts[middle]) <= count:
                low = middle
            else:
                high = middle - 1
        return commit_offset(cuts[low])

    def records_between(self, ranges: Mapping[SystemStreamPartition, OffsetRange]) -> int:
        """Return how many records the ranges have at most: only reading them tells exactly."""
        return sum(self.distance(ssp, span.start, span.end) for ssp, span in ranges.items())

    # -- reading

    def needed_versions(
        self, ranges: Mapping[SystemStreamPartition, OffsetRange]
    ) -> dict[str, tuple[str, ...]]:
        """Return the ids of the versions that reading the ranges needs, by dataset."""
        needed: dict[str, dict[str, None]] = {}  # each id once, in order
        for ssp, span in ranges.items():
            since = parse_commit(span.start, str(ssp))
            until = parse_commit(span.end, str(ssp))
            history = self._history(ssp.stream, until)
            for version in choose_versions(history, since, until).all:
                if history.is_retained(version):
                    needed.setdefault(ssp.stream, {})[version.id] = None
        return {dataset: tuple(versions) for dataset, versions in needed.items()}

    def read_arrow(
        self,
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        """Return the records of the ranges, with these columns of theirs (None: all)."""
        stream = require_one_stream(self.name, ranges)
        located = self._locate(ranges)
        tables = [records_schema(located.form.schema).empty_table()]
        try:
            for part in located.parts:
                tables += part.read(self._lake.store)
        except errors.ManifestMismatchError as error:
            self._raise_if_discarded(stream, ranges, error)
            raise
        table = pa.concat_tables(tables)
        if columns is None:
            return table
        return table.select([*columns, *(name for name, _ in RECORD_META_COLUMNS)])

    def find_records(
        self,
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        keys: pa.Table,
        columns: Sequence[str] = (),
    ) -> pa.Table:
        """Raise ConfigurationError: these streams can't find records by keys. A record is what a
        whole range changed, so that parts of the range have other records.
        """
        step = "Look the keys up in the dataset, or read its changes."
        raise self._unable("find records by keys", step)

    def read(
        self,
        spark: SparkSession | Callable[[], SparkSession],
        ranges: Mapping[SystemStreamPartition, OffsetRange],
    ) -> DataFrame:
        """Return the records of the ranges, each partition in one task; few records are read in
        this process.
        """
        spark = resolve_session(spark)
        located = self._locate(ranges)
        info = self.info(require_one_stream(self.name, ranges))
        if self.records_between(ranges) <= _FEW_RECORDS:
            frame = small_frame(spark, self.read_arrow(ranges))
        else:
            columns = [(field.name, field.type) for field in located.form.schema.fields]
            columns += RECORD_META_COLUMNS
            frame = read_in_tasks(spark, located.parts, ChangeRecords.batches, columns)
        if info.partitions == 1:
            return frame.coalesce(1)
        return frame.repartition(info.partitions, *[named_column(name) for name in info.key])

    def _locate(self, ranges: Mapping[SystemStreamPartition, OffsetRange]) -> _LocatedRecords:
        """Return the records of these ranges of one stream as what has to be read: versions to
        compare, by partition. Empty ranges are left out. Raises OffsetOutOfRangeError.
        """
        stream = require_one_stream(self.name, ranges)
        history = self._history(stream)
        columns = self._columns(history)
        form = self._record_form(history)
        upcoming = history.last_change() * STRIDE
        parts = []
        for ssp, span in sorted(ranges.items()):
            check_partition(ssp, form.partitions)
            since = parse_commit(span.start, str(ssp))
            until = parse_commit(span.end, str(ssp))
            check_range(ssp, since * STRIDE, until * STRIDE, 0, upcoming)
            if since == until:
                continue
            compared = choose_versions(history, since, until)
            served = history.at(until)
            part = ChangeRecords(
                store=self._lake.store.descriptor,
                form=form,
                partition=ssp.partition,
                compared=replace(
                    compared,
                    old=_named_as(compared.old, columns),
                    new=_with_columns(compared.new, columns),
                ),
                first=since * STRIDE,
                version=served.id,
                at=served.at or _BEGINNING,
                before_known=self._may_show_before(history, compared.old, since, until),
            )
            parts.append(part)
        return _LocatedRecords(parts, form)

    def _may_show_before(
        self, history: ServedHistory, old: SealedVersion | None, since: int, until: int
    ) -> bool:
        """Whether the entries before may be shown: not if they may hold keys that were erased in
        between. True where records don't show them.
        """
        if not self._images or old is None:
            return True
        if history.is_retained(old):  # an erasure leaves no retained version with the keys
            return True
        return not history.may_have_erased(since, until)

    def _raise_if_discarded(
        self,
        stream: str,
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        error: errors.ManifestMismatchError,
    ) -> None:
        """Raise VersionDiscardedError if `error` comes from a version that was discarded."""
        history = self._read_history(stream)
        for span in ranges.values():
            for offset in (span.start, span.end):
                number = parse_commit(offset, stream)
                version = history.at(number).version
                if version is not None and not history.is_retained(version):
                    raise history.discarded_error(number) from error


class ChangeImageStreams(ChangeStreams):
    """The same changes, with the entries before and after: the key, `kind` ("insert", "update" or
    "delete"), the structs `before` and `after`, the `version` that was served at the end of the
    range, and since when, `at`.

    A range in which keys were erased has no entries before.
    """

    name = CHANGE_IMAGES
    _images = True


class _LocatedRecords(NamedTuple):
    """The records of ranges, by partition, and what they have in common."""

    parts: list[ChangeRecords]
    form: RecordForm


def choose_versions(history: ServedHistory, since: int, until: int) -> ComparedVersions:
    """Return the versions to compare for the changes between two commits.

    Of versions with the same entries, two are chosen that differ in deltas only, if there are such;
    else two between which the base was only replaced by compactions that are known; else the newest
    ones. Raises VersionDiscardedError if none is left of one commit.
    """
    before = history.versions_at(since)
    after = history.versions_at(until)
    for old, new in product(before, reversed(after)):
        if shares_base(old, new):
            return ComparedVersions(old, new, by_deltas=True)
    if before and after and before[-1].positioned:
        old = before[-1]
        new = after[-1]
        compactions = history.compactions(since, until)
        if compactions:
            base_before = compactions[0].before
            base_after = compactions[-1].after
            if shares_base(old, base_before) and shares_base(base_after, new):
                return ComparedVersions(old, new, compactions, by_deltas=True)
    newest_before = next(iter(before), None)
    newest_after = next(iter(after), None)
    return ComparedVersions(newest_before, newest_after)


def _is_retained(history: ServedHistory, number: int) -> bool:
    """Whether what was served after a commit can be leased, or was nothing."""
    try:
        versions = history.versions_at(number)
    except errors.VersionDiscardedError:
        return False
    return all(map(history.is_retained, versions[:1]))


def _named_as(version: SealedVersion | None, columns: NamedColumns) -> SealedVersion | None:
    """Return the version with the names that its columns have among these."""
    if version is None:
        return None
    return version.named_as(columns)


def _with_columns(version: SealedVersion | None, columns: NamedColumns) -> SealedVersion | None:
    """Return the version with just these columns."""
    if version is None or version.named_columns == columns:
        return version
    return version.read_as(columns)


def _count_rows(generations: Iterable[Generation], bucket: int) -> int:
    """Return the number of stored rows of a bucket in these generations."""
    rows = 0
    for generation in generations:
        rows += sum(file.rows for file in generation.files if file.bucket == bucket)
    return rows


register_system(CHANGES, ChangeStreams)
register_system(CHANGE_IMAGES, ChangeImageStreams)
