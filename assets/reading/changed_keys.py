"""Which keys of a dataset have other entries than somebody has read, and in which interval of valid
time.

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
from typing import Any, TypeAlias

from dagster_adjunct.assets.reading.change_streams import ComparedVersions, choose_versions
from dagster_adjunct.assets.reading.diff import compare_tables
from dagster_adjunct.assets.reading.entry_changes import EntryChanges, list_own_generations
from dagster_adjunct.assets.reading.served_history import ServedHistory
from dagster_adjunct.assets.reading.stored_file import list_generation_files, read_stored_file
from dagster_adjunct.assets.reading.stored_versions import read_batch_version
from dagster_adjunct.assets.reading.valid_time import Span, read_rows_over_time, version_spans
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.manifest import BoundedManifest
from dagster_adjunct.assets.versions.version import TOMBSTONE, SealedVersion
from dagster_adjunct.resources.bucketing.files import VALID_FROM, Generation
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


VersionIds: TypeAlias = tuple[str | None, Sequence[str]]


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

    Both are ids of versions: of the one that was served (None for nothing), and of those over time.
    `read` is in order; of a table it suffices to name the first and the last one with the same
    base. What was served after the commit `since` was read, too; None for no commit.
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
        """Return what somebody has read."""
        found = list(map(self._open_ids, self.read))
        if self.since is not None:
            manifest = self.history.at(self.since).manifest
            if isinstance(manifest, BoundedManifest):
                over_time = sorted(manifest.versions_over_time, key=manifest.time_of)
                found.append(self._open_ids((manifest.served_id, over_time)))
            else:
                found.append(ReadVersion(None))
        return found

    def _open_ids(self, ids: VersionIds) -> ReadVersion:
        version, over_time = ids
        one = None if version is None else self._open(version)
        return ReadVersion(one, self._open_over_time(over_time))

    def _open_over_time(self, versions: Sequence[str]) -> tuple[SealedVersion, ...]:
        """Return these versions, in the order of their times, without the first ones if they have
        been discarded since: nothing is known of their times any more.
        """
        opened: list[SealedVersion] = []
        for version in versions:
            try:
                opened.append(self._open(version))
            except VersionDiscardedError:
                if opened:
                    raise
        return tuple(opened)

    def _open(self, version: str) -> SealedVersion:
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
        was revoked counts as changed. With `oldest`, that version counts for them.
        """
        before = version_spans(old)
        after = version_spans(new)
        starts = sorted({to_microseconds(span.start) for span in (*before, *after)})
        edges: list[int | None] = [*starts, None]
        if oldest:
            edges.insert(0, None)
        for start, end in pairwise(edges):
            one = _valid_at(before, start, oldest=oldest)
            other = _valid_at(after, start, oldest=oldest)
            is_known = other is not None and _valid_at(after, start, oldest=False) is not None
            if not is_known and self._is_dropped(one, after):
                continue
            yield _with_interval(self._compare(one, other), start, end)

    def _is_dropped(self, version: SealedVersion | None, left: Sequence[Span]) -> bool:
        """Whether a version is not left because it is old, and not because it was revoked."""
        if version is None or version.id in {span.version.id for span in left}:
            return False
        manifest = self.history.manifest
        ref = manifest.ref(version.id) if isinstance(manifest, BoundedManifest) else None
        return ref is None or ref.state != "revoked"

    # -- of a table that follows changes

    def _steps(self) -> Iterator[ComparedVersions]:
        """Yield the versions to compare, each read one with the next."""
        numbers = {_commit_of(version) for version, _ in self.read}
        if self.since is not None:
            numbers.add(self.since)
        last = _commit_of(self.now[0])
        before = sorted(number for number in numbers if number < last)
        for since, until in pairwise([*before, last]):
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
        times = _times_by_key(rows.drop_columns([TOMBSTONE]))
        deleted = _times_by_key(rows.filter(rows.column(TOMBSTONE)).drop_columns([TOMBSTONE]))
        keys = []
        since: list[int | None] = []
        until: list[int | None] = []
        for key, moved in _times_by_key(changed).items():
            first, last = min(moved), max(moved)
            known = times.get(key, set())
            entries = known - deleted.get(key, set())
            is_first = not any(time < first for time in entries)
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
        """Return the rows in deltas, and all rows of their keys, with TOMBSTONE."""
        names = [*self._no_keys.column_names, VALID_FROM]
        nothing = self._no_keys.append_column(VALID_FROM, pa.array([], arrow_type("timestamp")))
        changed = [nothing]
        for version, generation in _list_deltas(step):
            changed += [rows.select(names) for rows in self._read(version, generation)]
        versions = [self._reader(version) for version in step.ends]
        own = {generation.id for _, generation in _list_deltas(step)}
        rows = [nothing.append_column(TOMBSTONE, pa.array([], pa.bool_()))]
        for reader in versions:
            for bucket in reader.buckets:
                keys = sorted({key for one in versions for key in one.keys_in(bucket, own)})
                stored, _ = reader.stored_rows_of(bucket, keys)
                rows.append(stored.select([*names, TOMBSTONE]))
        return pa.concat_tables(changed), pa.concat_tables(rows)

    def _compare_rows(self, step: ComparedVersions) -> tuple[pa.Table, pa.Table]:
        """Return the rows over time that differ, and all of them, with TOMBSTONE."""
        key = [*self._no_keys.column_names, VALID_FROM]
        both = [read_rows_over_time(self._reader(version)) for version in step.ends]
        rows = pa.concat_tables([one.select([*key, TOMBSTONE]) for one in both])
        if len(both) < 2:
            return rows.select(key), rows
        old, new = both
        values = [name for name in new.column_names if name in old.column_names]
        shared = [name for name in values if old.schema.field(name) == new.schema.field(name)]
        found = compare_tables(old, new, key, [name for name in shared if name not in key])
        if found is None or len(shared) < len({*old.column_names, *new.column_names}):
            return rows.select(key), rows
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


def _commit_of(version: str | None) -> int:
    """Return the number of the commit that made this version of a table, 0 for none."""
    return 0 if version is None else int(version.removeprefix("v").partition("-")[0])


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


def _valid_at(spans: Sequence[Span], start: int | None, *, oldest: bool) -> SealedVersion | None:
    """Return the version that is valid from a time on (None: from before all); with `oldest`, the
    oldest one before it is valid.
    """
    valid = spans[0].version if spans and oldest else None
    for span in spans:
        if start is not None and to_microseconds(span.start) <= start:
            valid = span.version
    return valid


def _with_interval(keys: pa.Table, start: int | None, end: int | None) -> pa.Table:
    for name, edge in ((SINCE, start), (UNTIL, end)):
        keys = keys.append_column(name, pa.array([edge] * keys.num_rows, pa.int64()))
    return keys


def _distinct(keys: pa.Table) -> pa.Table:
    return keys.group_by(keys.column_names).aggregate([]).select(keys.column_names)
