"""Finds what is restated: the keys of datasets that have changed, and the records that were joined
by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from dagster_adjunct.assets.reading.change_streams import commit_offset, parse_commit
from dagster_adjunct.assets.reading.changed_keys import SINCE, UNTIL, ChangedKeys, VersionIds
from dagster_adjunct.assets.reading.served_history import ServedHistory
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import ResolvedStartpoint
from dagster_adjunct.orchestration.batch_log.intent import Ranges
from dagster_adjunct.orchestration.operators.lookups import Restate
from dagster_adjunct.orchestration.planner.planned import PlannedRestatement, RestatedInput
from dagster_adjunct.orchestration.startpoints.positions import (
    AskedApplication,
    InputPositions,
    StreamSnapshot,
)
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.lazy_modules import np, pa, pc
from dagster_adjunct.resources.schemas.types import arrow_type
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION, OffsetRange
from dagster_adjunct.resources.times import subtract_span

Places: TypeAlias = "Mapping[str, pa.Table]"
"""By input stream, the places of records: PARTITION and OFFSET, in order."""


@dataclass(frozen=True, slots=True)
class DueRestatement:
    """The changes of datasets, by their partition, by which results are restated next: how many
    `keys` have changed, and the `places` of the records with them.
    """

    changes: Ranges
    places: Places
    keys: int

    @property
    def records(self) -> int:
        """How many records are read again."""
        return sum(places.num_rows for places in self.places.values())


def find_restatement(
    asked: AskedApplication,
    streams: Mapping[str, StreamSnapshot],
    positions: InputPositions,
    changes: Ranges,
    served: Mapping[str, VersionIds],
) -> DueRestatement:
    """Return the records whose results these changes of datasets concern. Raises RestatementError
    if there are more such records, or more changed keys, than a join allows, or if a version is
    gone, or a file with records.

    `streams` are the input streams, `served` what is served now by dataset. `positions` has the
    startpoints in the changes.
    """
    found: dict[str, list[pa.Table]] = {}
    keys = 0
    restatements: Sequence[PlannedRestatement] = ()
    if asked.plan is not None:
        restatements = asked.plan.late_data.restatements
    for restated in restatements:
        ranges = {ssp: span for ssp, span in changes.items() if ssp.stream == restated.dataset}
        if not ranges:
            continue
        startpoints = [positions.startpoints[ssp] for ssp in ranges if ssp in positions.startpoints]
        search = _Search(asked, streams, restated, served[restated.dataset], ranges, startpoints)
        keys += search.key_count
        for stream, places in search.find_places():
            found.setdefault(stream, []).append(places)
    merged = {name: _merge(places) for name, places in found.items()}
    return DueRestatement(changes, merged, keys)


def _options(app: Application, restated: PlannedRestatement) -> Restate:
    """Return the user's options of the join whose results are restated."""
    match = app.operator(restated.join).spec.match
    assert match is not None, "it is a join"
    assert match.restate is not None, "it restates"
    return match.restate


def _merge(places: list[pa.Table]) -> pa.Table:
    """Return the places in order, each once."""
    every = pa.concat_tables(places).group_by([PARTITION, OFFSET]).aggregate([])
    return every.select([PARTITION, OFFSET]).sort_by(
        [(PARTITION, "ascending"), (OFFSET, "ascending")]
    )


@dataclass
class _Search:
    """Finds the records that a join has joined by keys which are `served` with other entries now.

    `ranges` are the changes of the dataset; `startpoints` may say since when they count. `changed`
    are the changed keys; in a join by time, with the intervals in which they did. `keys` are the
    same, each once, in the order of the dataset's key.
    """

    asked: AskedApplication
    streams: Mapping[str, StreamSnapshot]
    restated: PlannedRestatement
    served: VersionIds
    ranges: Ranges
    startpoints: Sequence[ResolvedStartpoint]
    changed: pa.Table = field(init=False)
    keys: pa.Table = field(init=False)

    def __post_init__(self) -> None:
        # Not when they are first asked for: cached_property of Python 3.11 has one lock for all
        # searches, which one of a stopped thread would hold.
        self.changed = self._find_changed()
        self.keys = self._find_keys()

    @property
    def options(self) -> Restate:
        """The user's options of the join."""
        return _options(self.asked.app, self.restated)

    def _find_changed(self) -> pa.Table:
        """Return the changed keys; in a join by time, with the intervals in which they changed."""
        asked = self.asked
        name = self.restated.dataset
        since = [parse_commit(start.offset, str(start.ssp)) for start in self.startpoints]
        joined_before = []
        if not self._passes_over:  # else only changes since the startpoint count
            for versions in self.asked.state.offsets.joined.get(name, ()):
                joined_before.append(VersionIds(versions.version, versions.over_time))
        history = ServedHistory.read(asked.lake, name)
        store = asked.lake.store
        keys = ChangedKeys(store, history, joined_before, self.served, min(since, default=None))
        match = asked.app.operator(self.restated.join).spec.match
        try:
            if match is not None and match.as_of is not None:
                return keys.find_over_time(oldest=match.as_of.before_history == "oldest")
            return keys.find()
        except errors.VersionDiscardedError as error:
            raise self._error(
                "a version by which results were made has been discarded, so it is not known which"
                " of them are others now.",
                "Leave them as they are, and follow later changes:"
                f" {self._startpoint('--upcoming')}. To make all of them again, replay the"
                " input as well. Versions are kept longer with"
                " discard=DiscardPolicy(followed=…) of the dataset.",
            ) from error

    @property
    def _passes_over(self) -> bool:
        """Whether a startpoint leaves out changes that are not restated yet, or says since when
        results follow changes for the first time.
        """
        for start in self.startpoints:
            before = self.asked.state.checkpoint.get(start.ssp)
            if before is None:
                return True
            if self.asked.systems[start.ssp.system].compare(before, start.offset) < 0:
                return True
        return False

    def _find_keys(self) -> pa.Table:
        """Return the changed keys, each once, in the order of the dataset's key."""
        match = self.asked.app.operator(self.restated.join).spec.match
        assert match is not None
        key = [entry for _, entry in match.on]
        return self.changed.group_by(key).aggregate([]).select(key)

    @property
    def key_count(self) -> int:
        """How many keys have changed."""
        return int(self.keys.num_rows)

    def find_places(self) -> Iterator[tuple[str, pa.Table]]:
        """Yield each input stream with the places of its records. Raises RestatementError before
        the first one if there are too many changed keys or records.
        """
        self._check("keys", self.key_count, self.options.most_keys)
        records = 0
        searched_offsets = 0
        found = []
        for source in self.restated.inputs:
            ranges = self._select_young(source.stream)
            searched_offsets += self._count_offsets(ranges)
            if not ranges or not self.key_count:
                continue
            places = self._without_skipped(source.stream, self._find(source, ranges))
            records += places.num_rows
            found.append((source.stream, places))
        self._check("records", records, self.options.most_records)
        # A single record is never too many.
        most = max(int(searched_offsets * self.options.most_share), 1)
        self._check("records", records, most, f" ({self.options.most_share:.0%} of them)")
        yield from found

    def _count_offsets(self, ranges: Ranges) -> int:
        """Return how many offsets these ranges have."""
        count = 0
        for ssp, span in ranges.items():
            count += self.asked.systems[ssp.system].distance(ssp, span.start, span.end)
        return count

    def _check(self, what: str, number: int, most: int, share: str = "") -> None:
        """Raise RestatementError for more keys or records (`what`) than are allowed, unless a
        startpoint has `force`; `share` describes the limit.
        """
        is_forced = any(start.force for start in self.startpoints)
        if number <= most or is_forced:
            return
        since = min(parse_commit(span.start, str(ssp)) for ssp, span in self.ranges.items())
        on_purpose = f"--offset {commit_offset(since)} --force"
        raise self._error(
            f"its results of {number:,} {what} would be restated: at most {most:,}{share} are"
            " allowed.",
            f"Restate them on purpose, once: {self._startpoint(on_purpose)}. Or leave these results"
            f" as they are: {self._startpoint('--upcoming')}.",
            changed_keys=self.key_count,
        )

    def _startpoint(self, position: str) -> str:
        """Return the command that asks for a startpoint in the changes of the dataset."""
        return f"adjunct startpoint set MODULE:APP {self.restated.changes} {position} --reason …"

    def _error(
        self, problem: str, next_step: str, changed_keys: int | None = None
    ) -> errors.RestatementError:
        """Return the error for a restatement that is not made."""
        restated = self.restated
        return errors.RestatementError(
            f"{restated.join}: dataset {restated.dataset!r} has changed, and {problem}",
            next_step,
            application=self.asked.app.name,
            operator=restated.join,
            dataset=restated.dataset,
            changed_keys=changed_keys,
        )

    def _select_young(self, stream: str) -> Ranges:
        """Return the offsets of records of a stream that were written at most `age` ago, up to the
        checkpoint; partitions without any are left out.
        """
        snapshot = self.streams[stream]
        since = subtract_span(self.asked.at, self.options.age)
        moment = int(since.timestamp() * 1000)
        ranges = {}
        for ssp in snapshot.partitions:
            end = self.asked.state.checkpoint.get(ssp)
            if end is None:
                continue
            start = snapshot.system.offset_for_timestamp(ssp, moment)
            if snapshot.system.compare(start, snapshot.oldest[ssp]) < 0:
                start = snapshot.oldest[ssp]
            if snapshot.system.compare(start, end) < 0:
                ranges[ssp] = OffsetRange(start, end)
        return ranges

    def _find(self, source: RestatedInput, ranges: Ranges) -> pa.Table:
        """Return the places of the records in these ranges that have changed keys, at a time in
        which they have changed.
        """
        system = self.streams[source.stream].system
        keys = self.keys.rename_columns(source.keys)
        columns: list[str] = []
        if source.time is not None:
            columns = list(dict.fromkeys((*source.keys, source.time)))
        try:
            records = system.find_records(ranges, keys, columns)
        except (errors.AdmittedFileError, errors.SchemaMismatchError) as error:
            if error.file is None:
                raise
            raise self._error(
                f"the records that this may concern can't be read: {error.problem}",
                f"{error.next_step} Or leave these results as they are, and follow later changes:"
                f" {self._startpoint('--upcoming')}.",
                changed_keys=self.key_count,
            ) from error
        if source.time is not None:
            records = self._within_intervals(source, records)
        return records.select([PARTITION, OFFSET])

    def _within_intervals(self, source: RestatedInput, records: pa.Table) -> pa.Table:
        """Return those of the records whose time is in an interval in which their key changed;
        none without a time.
        """
        changes = self.changed.rename_columns([*source.keys, SINCE, UNTIL])
        intervals_of: dict[tuple[Any, ...], list[_Interval]] = {}
        starts = changes[SINCE].to_pylist()
        ends = changes[UNTIL].to_pylist()
        keys = _iter_keys(changes, source.keys)
        for key, since, until in zip(keys, starts, ends, strict=True):
            intervals_of.setdefault(key, []).append(_Interval(since, until))
        time = records.column(source.time).cast(arrow_type("timestamp")).cast(pa.int64())
        moments = time.to_numpy()
        is_known = pc.is_valid(time).to_numpy()
        is_within = np.zeros(records.num_rows, np.bool_)
        for row, key in enumerate(_iter_keys(records, source.keys)):
            if is_known[row]:
                moment = moments[row]
                is_within[row] = any(interval.has(moment) for interval in intervals_of[key])
        return records.filter(pa.array(is_within))

    def _without_skipped(self, stream: str, places: pa.Table) -> pa.Table:
        """Return the places without those that the main input has skipped."""
        for ssp, spans in self.asked.state.offsets.skipped.items():
            if ssp.qualified_stream != stream:
                continue
            for start, end in spans:
                is_here = pc.equal(places.column(PARTITION), ssp.partition)
                offsets = places.column(OFFSET)
                is_within = pc.and_(pc.greater_equal(offsets, start), pc.less(offsets, end))
                places = places.filter(pc.invert(pc.and_(is_here, is_within)))
        return places


class _Interval(NamedTuple):
    """A span of time in which a key has changed, in microseconds; None where it has no end."""

    since: int | None
    until: int | None

    def has(self, moment: int) -> bool:
        """Return whether a moment is in the interval."""
        if self.since is not None and moment < self.since:
            return False
        return self.until is None or moment < self.until


def _iter_keys(records: pa.Table, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yield the key of each record: its values in these columns."""
    values = [records.column(name).to_pylist() for name in columns]
    yield from zip(*values, strict=True)
