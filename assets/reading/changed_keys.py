"""Which keys of a dataset had other entries between two of its commits, and in which interval of
valid time.

A key whose entry changed and changed back counts too: somebody may have read what it was in
between. So keys are not those of the net difference. Of a table they are all keys in deltas; where
its base was replaced by another one, versions that were read before and after that are compared. Of
a dataset that arrives in versions, each version that was read is compared with the one served at
the end. There may be keys among them that did not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from dagster_adjunct.assets.reading.change_streams import ComparedVersions, choose_versions
from dagster_adjunct.assets.reading.diff import compare_tables
from dagster_adjunct.assets.reading.entry_changes import EntryChanges, list_own_generations
from dagster_adjunct.assets.reading.served_history import ServedHistory
from dagster_adjunct.assets.reading.stored_file import list_generation_files, read_stored_file
from dagster_adjunct.assets.reading.stored_versions import read_batch_version
from dagster_adjunct.assets.reading.valid_time import Span, read_rows_over_time, version_spans
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.manifest import BoundedManifest
from dagster_adjunct.assets.versions.version import SealedVersion
from dagster_adjunct.resources.bucketing.files import VALID_FROM, Generation
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.schemas.version_columns import NamedColumns
from dagster_adjunct.resources.times import to_microseconds

SINCE = "__since"
UNTIL = "__until"
"""The interval [since, until) in which a key had other entries, in microseconds; null where it is
open.
"""


@dataclass(frozen=True, slots=True)
class ReadBetween:
    """A version of a dataset that somebody read (None for nothing), and those that were read over
    time.
    """

    version: SealedVersion | None
    over_time: tuple[SealedVersion, ...] = ()


@dataclass(frozen=True)
class ChangedKeys:
    """The keys of a dataset that changed between the commits `since` and `until`.

    `read` has the ids of the versions that were read, in order: of one that was served (None for
    nothing), and of those over time. Of a table it suffices to name the first and the last one with
    the same base. `from_start` says that what was served after the commit `since` was read, too.
    """

    store: ObjectStore
    history: ServedHistory
    since: int
    until: int
    read: Sequence[tuple[str | None, Sequence[str]]] = ()
    from_start: bool = False

    def find(self) -> pa.Table:
        """Return the keys whose current entries changed, each once, in the columns of the key.

        Raises VersionDiscardedError if that is not known any more.
        """
        found = []
        if isinstance(self.history.manifest, BoundedManifest):
            served = self._served(self.until).version
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
            now = self._served(self.until).over_time
            for before in self._list_read():
                found += self._compare_over_time(before.over_time, now, oldest=oldest)
        else:
            for step in self._steps():
                found.append(self._intervals_of_step(step, oldest=oldest))
        return pa.concat_tables(found)

    # -- of a dataset that arrives in versions

    def _list_read(self) -> list[ReadBetween]:
        """Return what somebody has read."""
        found = [self._served(self.since)] if self.from_start else []
        for version, over_time in self.read:
            one = None if version is None else self._open(version)
            found.append(ReadBetween(one, tuple(map(self._open, over_time))))
        return found

    def _served(self, number: int) -> ReadBetween:
        """Return what was served after a commit."""
        stored = self.history.versions_at(number)
        manifest = self.history.at(number).manifest
        if not stored or not isinstance(manifest, BoundedManifest):
            return ReadBetween(None)
        return ReadBetween(stored[0], tuple(map(self._open, manifest.versions_over_time)))

    def _open(self, version: str) -> SealedVersion:
        return read_batch_version(self.history.log, self.history.manifest, version)

    def _compare(self, old: SealedVersion | None, new: SealedVersion | None) -> pa.Table:
        """Return the keys whose entries differ between two versions."""
        if old is None or new is None:
            one = old or new
            if one is None:
                return self._no_keys
            return self._keys_of(EntryChanges(None, self._reader(one)))
        if old.id == new.id:
            return self._no_keys
        return self._keys_of(EntryChanges(self._reader(old), self._reader(new)))

    def _compare_over_time(
        self, old: Sequence[SealedVersion], new: Sequence[SealedVersion], *, oldest: bool
    ) -> Iterator[pa.Table]:
        """Yield the keys whose entries differ, by the interval in which they do.

        Nothing is known any more of times before the oldest version that is left: there, only what
        was revoked counts as changed.
        """
        before = version_spans(old)
        after = version_spans(new)
        starts = sorted({to_microseconds(span.start) for span in (*before, *after)})
        edges: list[int | None] = [*starts, None]
        if oldest:
            edges.insert(0, None)
        for start, end in pairwise(edges):
            one = _valid_at(before, start)
            other = _valid_at(after, start)
            if one is not None and other is None and not self._is_revoked(one):
                continue
            yield _with_interval(self._compare(one, other), start, end)

    def _is_revoked(self, version: SealedVersion) -> bool:
        manifest = self.history.manifest
        ref = manifest.ref(version.id) if isinstance(manifest, BoundedManifest) else None
        return ref is None or ref.state == "revoked"

    # -- of a table that follows changes

    def _steps(self) -> Iterator[ComparedVersions]:
        """Yield the versions to compare, each read one with the next."""
        numbers = {self.since} if self.from_start else set()
        for version, _ in self.read:
            numbers.add(0 if version is None else _commit_of(version))
        before = sorted(number for number in numbers if number < self.until)
        for since, until in pairwise([*before, self.until]):
            yield choose_versions(self.history, since, until)

    def _keys_of_step(self, step: ComparedVersions) -> pa.Table:
        if not step.by_deltas:
            return self._compare(step.old, step.new)
        found = [self._no_keys]
        for version, generation in _list_deltas(step):
            for rows in self._read(version, generation):
                found.append(rows.select(self._no_keys.column_names))
        return pa.concat_tables(found)

    def _intervals_of_step(self, step: ComparedVersions, *, oldest: bool) -> pa.Table:
        """Return the intervals in which rows of keys changed: from the first one up to the next
        row that did not.
        """
        if not step.by_deltas:
            changed, rows = self._compare_rows(step)
        else:
            changed, rows = self._rows_in_deltas(step)
        times = _times_by_key(rows)
        keys = []
        since: list[int | None] = []
        until: list[int | None] = []
        for key, moved in _times_by_key(changed).items():
            first, last = min(moved), max(moved)
            known = times.get(key, set())
            is_first = not any(time < first for time in known)
            keys.append(key)
            since.append(None if is_first and oldest else first)
            until.append(min((time for time in known if time > last), default=None))
        columns = [
            pa.array([key[place] for key in keys], field.type)
            for place, field in enumerate(self._no_keys.schema)
        ]
        columns += [pa.array(since, pa.int64()), pa.array(until, pa.int64())]
        return pa.table(columns, names=[*self._no_keys.column_names, SINCE, UNTIL])

    def _rows_in_deltas(self, step: ComparedVersions) -> tuple[pa.Table, pa.Table]:
        """Return the rows in deltas, and all rows of their keys."""
        names = [*self._no_keys.column_names, VALID_FROM]
        changed = []
        for version, generation in _list_deltas(step):
            changed += [rows.select(names) for rows in self._read(version, generation)]
        versions = [self._reader(version) for version in step.ends]
        own = {generation.id for _, generation in _list_deltas(step)}
        rows = []
        for reader in versions:
            for bucket in reader.buckets:
                keys = sorted({key for one in versions for key in one.keys_in(bucket, own)})
                stored, _ = reader.stored_rows_of(bucket, keys)
                rows.append(stored.select(names))
        return pa.concat_tables(changed), pa.concat_tables(rows)

    def _compare_rows(self, step: ComparedVersions) -> tuple[pa.Table, pa.Table]:
        """Return the rows over time that differ, and all of them."""
        key = [*self._no_keys.column_names, VALID_FROM]
        both = [read_rows_over_time(self._reader(version)) for version in step.ends]
        rows = pa.concat_tables([one.select(key) for one in both])
        if len(both) < 2:
            return rows, rows
        old, new = both
        values = [name for name in new.column_names if name in old.column_names]
        shared = [name for name in values if old.schema.field(name) == new.schema.field(name)]
        found = compare_tables(old, new, key, [name for name in shared if name not in key])
        if found is None or len(shared) < len({*old.column_names, *new.column_names}):
            return rows, rows
        (inserted, deleted, _, changed), _ = found
        moved = [new.take(inserted), old.take(deleted), new.take(changed)]
        return pa.concat_tables([one.select(key) for one in moved]), rows

    def _read(self, version: SealedVersion, generation: Generation) -> Iterator[pa.Table]:
        what = f"dataset {self.history.log.name!r}, version {version.id}"
        named = version.named_as(self._columns)
        for stored in list_generation_files(self.store, what, generation):
            yield read_stored_file(stored, named.layout)

    # -- both

    @cached_property
    def _columns(self) -> NamedColumns:
        columns = self.history.manifest.named_columns
        assert columns is not None, "it has had a version"
        return columns

    @cached_property
    def _no_keys(self) -> pa.Table:
        """No keys, in the columns of the key."""
        key = self.history.manifest.declaration.key
        return self._columns.schema.select(key).to_arrow().empty_table()

    def _reader(self, version: SealedVersion) -> VersionReader:
        named = version.named_as(self._columns)
        return VersionReader(self.store, self.history.log.name, named)

    def _keys_of(self, changes: EntryChanges) -> pa.Table:
        found = [self._no_keys]
        for batch in changes.batches():
            keys = pa.Table.from_batches([pa.RecordBatch.from_struct_array(batch.column("key"))])
            found.append(keys.select(self._no_keys.column_names).cast(self._no_keys.schema))
        return pa.concat_tables(found)


def _commit_of(version: str) -> int:
    """Return the number of the commit that made this version of a table."""
    return int(version.removeprefix("v").partition("-")[0])


def _list_deltas(step: ComparedVersions) -> list[tuple[SealedVersion, Generation]]:
    """Return the deltas that one of two versions has and the other has not, each once."""
    assert step.old is not None, "versions that share a base"
    assert step.new is not None
    found = {}
    before = step.old
    for one, other in (*step.compactions, (step.new, step.new)):
        for version, without in ((before, one), (one, before)):
            for generation in list_own_generations(version, without):
                found[generation.id, generation.folder] = version, generation
        before = other
    return [*found.values()]


def _times_by_key(rows: pa.Table) -> dict[tuple[Any, ...], set[int]]:
    """Return the times of rows (VALID_FROM, after the columns of their key) by key."""
    times: dict[tuple[Any, ...], set[int]] = {}
    columns = [rows.column(name).to_pylist() for name in rows.column_names if name != VALID_FROM]
    moments = rows.column(VALID_FROM).cast("int64").to_pylist()
    for *key, moment in zip(*columns, moments, strict=True):
        times.setdefault(tuple(key), set()).add(moment)
    return times


def _valid_at(spans: Sequence[Span], start: int | None) -> SealedVersion | None:
    """Return the version that is valid from a time on; with None, the oldest."""
    if start is None:
        return spans[0].version if spans else None
    valid = None
    for span in spans:
        if to_microseconds(span.start) <= start:
            valid = span.version
    return valid


def _with_interval(keys: pa.Table, start: int | None, end: int | None) -> pa.Table:
    for name, edge in ((SINCE, start), (UNTIL, end)):
        keys = keys.append_column(name, pa.array([edge] * keys.num_rows, pa.int64()))
    return keys


def _distinct(keys: pa.Table) -> pa.Table:
    return keys.group_by(keys.column_names).aggregate([]).select(keys.column_names)
