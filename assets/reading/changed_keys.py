"""Which keys of a dataset have other entries than somebody has read, and in which interval of valid
time.

A key whose entry changed and changed back counts too: somebody may have read what it was in
between. So keys are not those of the net difference. Of a table they are all keys in deltas; where
its base was replaced by another one, versions that were read before and after that are compared. Of
a dataset that arrives in versions, each version that was read is compared with the one served at
the end. There may be keys among them that did not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from dagster_adjunct.assets.reading.change_streams import choose_versions
from dagster_adjunct.assets.reading.diff import compare_tables
from dagster_adjunct.assets.reading.entry_changes import (
    ComparedVersions,
    EntryChanges,
    VersionDelta,
)
from dagster_adjunct.assets.reading.key_lookup import Key
from dagster_adjunct.assets.reading.served_history import ServedHistory
from dagster_adjunct.assets.reading.stored_file import list_generation_files, read_stored_file
from dagster_adjunct.assets.reading.stored_versions import read_batch_version
from dagster_adjunct.assets.reading.valid_time import Span, read_rows_over_time, version_spans
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.manifest import BoundedManifest
from dagster_adjunct.assets.versions.version import TOMBSTONE, SealedVersion, version_number
from dagster_adjunct.resources.bucketing.files import VALID_FROM
from dagster_adjunct.resources.errors import DatasetError, VersionDiscardedError
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.schemas.types import arrow_type
from dagster_adjunct.resources.schemas.version_columns import NamedColumns
from dagster_adjunct.resources.streams.system import CHANGES
from dagster_adjunct.resources.times import to_microseconds

SINCE = "__since"
UNTIL = "__until"
"""The interval [since, until) in which a key had other entries, in microseconds; null where it is
open.
"""


class VersionIds(NamedTuple):
    """The id of a version that was served (None for nothing), and those of versions over time."""

    served: str | None
    over_time: Sequence[str]


@dataclass(frozen=True, slots=True)
class ReadVersion:
    """A version of a dataset that somebody read (None for nothing), and those that were read over
    time.
    """

    version: SealedVersion | None
    over_time: tuple[SealedVersion, ...] = ()


@dataclass(frozen=True)
class ChangedKeys:
    """The keys of a dataset whose entries are others `now` than when they were `read`.

    `read` has the versions that somebody has read, in order; of a table it suffices to name the
    first and the last one with the same base. What was served after the commit `since` was read,
    too; None for no commit.
    """

    store: ObjectStore
    history: ServedHistory
    read: Sequence[VersionIds]
    now: VersionIds
    since: int | None = None

    def find(self) -> pa.Table:
        """Return the keys whose current entries changed, each once, in the columns of the key.

        Raises VersionDiscardedError if that is not known any more.
        """
        found = []
        if isinstance(self.history.manifest, BoundedManifest):
            served = self._open_ids(self.now).version
            for before in self._list_read():
                found.append(self._compare(before.version, served))
        else:
            for step in self._steps():
                found.append(self._keys_of_step(step))
        return _distinct(pa.concat_tables([self._no_keys, *found]))

    def find_over_time(self, *, oldest: bool) -> pa.Table:
        """Return the keys whose entries over time changed, with SINCE and UNTIL; a key may have
        several intervals. With `oldest`, its first entry counts for all times before it, too.

        Raises VersionDiscardedError if that is not known any more.
        """
        found = [_with_interval(self._no_keys, None, None)]
        if isinstance(self.history.manifest, BoundedManifest):
            now = self._open_ids(self.now).over_time
            for before in self._list_read():
                found += self._compare_over_time(before.over_time, now, oldest=oldest)
        else:
            for step in self._steps():
                found.append(self._intervals_of_step(step, oldest=oldest))
        return pa.concat_tables(found)

    # -- of a dataset that arrives in versions

    def _list_read(self) -> list[ReadVersion]:
        """Return the versions that somebody has read: those of `read`, and what was served after
        the commit `since`.
        """
        found = list(map(self._open_ids, self.read))
        if self.since is not None:
            manifest = self.history.at(self.since).manifest
            if isinstance(manifest, BoundedManifest):
                over_time = sorted(manifest.versions_over_time, key=manifest.time_of)
                found.append(self._open_ids(VersionIds(manifest.served_id, over_time)))
            else:  # nothing was served
                found.append(ReadVersion(None))
        return found

    def _open_ids(self, ids: VersionIds) -> ReadVersion:
        """Return the versions with these ids."""
        served = None
        if ids.served is not None:
            served = self._open(ids.served)
        return ReadVersion(served, self._open_over_time(ids.over_time))

    def _open_over_time(self, versions: Sequence[str]) -> tuple[SealedVersion, ...]:
        """Return these versions, which are in the order of their times. The first ones are left out
        if they have been discarded since: nothing is known of their times any more. Raises
        VersionDiscardedError if a later one was.
        """
        opened: list[SealedVersion] = []
        for version in versions:
            try:
                opened.append(self._open(version))
            except VersionDiscardedError:
                is_first = not opened
                if not is_first:
                    raise
        return tuple(opened)

    def _open(self, version: str) -> SealedVersion:
        """Return a version by its id. Raises VersionDiscardedError if it is gone."""
        name = self.history.log.name
        try:
            return read_batch_version(self.history.log, self.history.manifest, version)
        except DatasetError as error:
            raise VersionDiscardedError(
                f"dataset {name!r}: version {version} has been discarded, by which results were"
                " made, so what has changed since is unknown.",
                "Leave these results as they are, and follow later changes: adjunct startpoint set"
                f" MODULE:APP {CHANGES}.{name} --upcoming --reason …; or replay the input.",
                dataset=name,
                version=version,
            ) from error

    def _compare(self, old: SealedVersion | None, new: SealedVersion | None) -> pa.Table:
        """Return the keys whose entries differ between two versions; None stands for no entries."""
        if old is None and new is None:
            return self._no_keys
        if old is None or new is None:  # all keys of the other one
            only = old or new
            assert only is not None
            return self._keys_of(EntryChanges(None, self._reader(only)))
        if old.id == new.id:
            return self._no_keys
        return self._keys_of(EntryChanges(self._reader(old), self._reader(new)))

    def _compare_over_time(
        self, old: Sequence[SealedVersion], new: Sequence[SealedVersion], *, oldest: bool
    ) -> Iterator[pa.Table]:
        """Yield the keys whose entries differ, by the interval in which they do.

        Nothing is known any more of times before the oldest version that is left: there, only what
        was revoked counts as changed. With `oldest`, that version counts for them.
        """
        before = version_spans(old)
        after = version_spans(new)
        starts = sorted({to_microseconds(span.start) for span in (*before, *after)})
        edges: list[int | None] = [*starts, None]
        if oldest:
            edges.insert(0, None)
        # Between two edges, one version was valid and one is valid now.
        for start, end in pairwise(edges):
            was = _valid_at(before, start, oldest=oldest)
            now = _valid_at(after, start, oldest=oldest)
            is_before_oldest = _valid_at(after, start, oldest=False) is None
            if is_before_oldest and self._was_discarded(was, after):
                continue
            yield _with_interval(self._compare(was, now), start, end)

    def _was_discarded(self, version: SealedVersion | None, spans: Sequence[Span]) -> bool:
        """Whether a version is not among these spans because it was discarded as too old, and not
        because it was revoked; False for None.
        """
        if version is None:
            return False
        if any(span.version.id == version.id for span in spans):
            return False
        ref = self.history.manifest.ref(version.id)
        return ref is None or ref.state != "revoked"

    # -- of a table that follows changes

    def _steps(self) -> Iterator[ComparedVersions]:
        """Yield the versions to compare: each one that was read with the next, and the last one
        with what is served `now`.
        """
        numbers = {_commit_of(ids.served) for ids in self.read}
        if self.since is not None:
            numbers.add(self.since)
        last = _commit_of(self.now.served)
        before = sorted(number for number in numbers if number < last)
        for since, until in pairwise([*before, last]):
            yield choose_versions(self.history, since, until)

    def _keys_of_step(self, step: ComparedVersions) -> pa.Table:
        """Return the keys whose entries may have changed between two versions."""
        if not step.by_deltas:
            return self._compare(step.old, step.new)
        found = [self._no_keys]
        for delta in step.list_deltas():
            for rows in self._read(delta):
                found.append(rows.select(self._no_keys.column_names))
        return pa.concat_tables(found)

    def _intervals_of_step(self, step: ComparedVersions, *, oldest: bool) -> pa.Table:
        """Return, for each key with changed rows, the interval from the first of them up to the
        next row after the last of them.

        With `oldest`, the interval of a key without an earlier entry has no beginning.
        """
        changed = self._rows_in_deltas(step) if step.by_deltas else self._compare_rows(step)
        rows = changed.all_rows
        times = _times_by_key(rows.drop_columns([TOMBSTONE]))
        deletions = rows.filter(rows.column(TOMBSTONE)).drop_columns([TOMBSTONE])
        deleted = _times_by_key(deletions)
        keys = []
        since: list[int | None] = []
        until: list[int | None] = []
        for key, changed_times in _times_by_key(changed.changed).items():
            first = min(changed_times)
            all_times = times.get(key, set())
            entry_times = all_times - deleted.get(key, set())
            has_earlier_entry = any(time < first for time in entry_times)
            keys.append(key)
            if oldest and not has_earlier_entry:
                since.append(None)
            else:
                since.append(first)
            until.append(_first_after(max(changed_times), all_times))
        columns = []
        for index, field in enumerate(self._no_keys.schema):
            columns.append(pa.array([key[index] for key in keys], field.type))
        columns += [pa.array(since, pa.int64()), pa.array(until, pa.int64())]
        return pa.table(columns, names=[*self._no_keys.column_names, SINCE, UNTIL])

    def _rows_in_deltas(self, step: ComparedVersions) -> _ChangedRows:
        """Return the rows in deltas, and all rows of their keys in both versions."""
        names = [*self._no_keys.column_names, VALID_FROM]
        nothing = self._no_keys.append_column(VALID_FROM, pa.array([], arrow_type("timestamp")))
        changed = [nothing]
        deltas = step.list_deltas()
        for delta in deltas:
            for rows in self._read(delta):
                changed.append(rows.select(names))
        numbers = {delta.generation.id for delta in deltas}
        readers = [self._reader(version) for version in step.ends]
        all_rows = [nothing.append_column(TOMBSTONE, pa.array([], pa.bool_()))]
        for reader in readers:
            for bucket in reader.buckets:
                keys = set[Key]()
                for each in readers:
                    keys.update(each.keys_in(bucket, numbers))
                stored = reader.stored_rows_of(bucket, sorted(keys)).rows
                all_rows.append(stored.select([*names, TOMBSTONE]))
        return _ChangedRows(pa.concat_tables(changed), pa.concat_tables(all_rows))

    def _compare_rows(self, step: ComparedVersions) -> _ChangedRows:
        """Return the rows over time that differ between two versions, and all rows of both. All
        count as changed if there is only one version, or if the rows can't be compared: they have
        other columns, or a key and time twice.
        """
        key = [*self._no_keys.column_names, VALID_FROM]
        both = [read_rows_over_time(self._reader(version)) for version in step.ends]
        rows = pa.concat_tables([one.select([*key, TOMBSTONE]) for one in both])
        all_changed = _ChangedRows(rows.select(key), rows)
        if len(both) < 2:
            return all_changed
        old, new = both
        if {*old.schema} != {*new.schema}:
            return all_changed
        values = [name for name in new.column_names if name not in key]
        found = compare_tables(old, new, key, values)
        if found is None:
            return all_changed
        differing = [new.take(found.added), old.take(found.removed), new.take(found.changed_after)]
        return _ChangedRows(pa.concat_tables([one.select(key) for one in differing]), rows)

    def _read(self, delta: VersionDelta) -> Iterator[pa.Table]:
        """Yield the rows of each file of a delta, with the columns that the dataset has now."""
        what = f"dataset {self.history.log.name!r}, version {delta.version.id}"
        named = delta.version.named_as(self._columns)
        for stored in list_generation_files(self.store, what, delta.generation):
            yield read_stored_file(stored, named.layout)

    # -- both

    @cached_property
    def _columns(self) -> NamedColumns:
        """The columns that the dataset has now."""
        columns = self.history.manifest.named_columns
        assert columns is not None, "it has had a version"
        return columns

    @cached_property
    def _no_keys(self) -> pa.Table:
        """No keys, in the columns of the key."""
        key = self.history.manifest.declaration.key
        return self._columns.schema.select(key).to_arrow().empty_table()

    def _reader(self, version: SealedVersion) -> VersionReader:
        """Return a reader of a version, in which columns have the names that they have now."""
        named = version.named_as(self._columns)
        return VersionReader(self.store, self.history.log.name, named)

    def _keys_of(self, changes: EntryChanges) -> pa.Table:
        """Return the keys of changes, each once."""
        found = [self._no_keys]
        for batch in changes.batches():
            keys = pa.Table.from_batches([pa.RecordBatch.from_struct_array(batch.column("key"))])
            found.append(keys.select(self._no_keys.column_names).cast(self._no_keys.schema))
        return pa.concat_tables(found)


def _commit_of(version: str | None) -> int:
    """Return the number of the commit that made this version of a table, 0 for none."""
    if version is None:
        return 0
    return version_number(version)


class _ChangedRows(NamedTuple):
    """Rows over time. `changed` are those that changed, with their key and VALID_FROM. `all_rows`
    are at least all rows of their keys, with TOMBSTONE, too.
    """

    changed: pa.Table
    all_rows: pa.Table


def _first_after(moment: int, times: Iterable[int]) -> int | None:
    """Return the first of some times that is later than a moment, None without one."""
    return min((time for time in times if time > moment), default=None)


def _times_by_key(rows: pa.Table) -> dict[tuple[Any, ...], set[int]]:
    """Return the times of rows (VALID_FROM, after the columns of their key) by key."""
    times: dict[tuple[Any, ...], set[int]] = {}
    columns = [rows.column(name).to_pylist() for name in rows.column_names if name != VALID_FROM]
    moments = rows.column(VALID_FROM).cast("int64").to_pylist()
    for *key, moment in zip(*columns, moments, strict=True):
        times.setdefault(tuple(key), set()).add(moment)
    return times


def _valid_at(spans: Sequence[Span], start: int | None, *, oldest: bool) -> SealedVersion | None:
    """Return the version that is valid from a time on, None if there is none. `start` None is
    before all times. With `oldest`, the oldest version counts for all times before it, too.
    """
    valid = None
    if oldest and spans:
        valid = spans[0].version
    for span in spans:
        if start is not None and to_microseconds(span.start) <= start:
            valid = span.version
    return valid


def _with_interval(keys: pa.Table, start: int | None, end: int | None) -> pa.Table:
    """Return the keys, each with the interval [start, end)."""
    starts = pa.array([start] * keys.num_rows, pa.int64())
    ends = pa.array([end] * keys.num_rows, pa.int64())
    return keys.append_column(SINCE, starts).append_column(UNTIL, ends)


def _distinct(keys: pa.Table) -> pa.Table:
    """Return the keys, each once."""
    return keys.group_by(keys.column_names).aggregate([]).select(keys.column_names)
