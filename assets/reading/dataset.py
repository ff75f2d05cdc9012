"""An open dataset: lookups by key, whole frames, earlier versions, and operations on its
versions.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar
from weakref import WeakMethod

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.reading.diff import VersionDiff
from dagster_adjunct.assets.reading.entry_changes import EntryChanges
from dagster_adjunct.assets.reading.key_lookup import FileCache, coerce_key, is_out_of_range
from dagster_adjunct.assets.reading.point_in_time import (
    BeforeHistory,
    Known,
    PointInTime,
    join_records,
)
from dagster_adjunct.assets.reading.served_over_time import ServedOverTime
from dagster_adjunct.assets.reading.served_version import OnDamage, ServedVersion, Watch
from dagster_adjunct.assets.reading.stored_versions import (
    StoredVersions,
    VersionOperations,
    current_manifests,
)
from dagster_adjunct.assets.reading.valid_time import EntriesAt, EntriesOverTime, Reader
from dagster_adjunct.assets.reading.verification import VerifyReport, verify_version
from dagster_adjunct.assets.reading.version_reader import (
    Entry,
    Validity,
    VersionReader,
    find_unreadable_version,
)
from dagster_adjunct.assets.versions.manifest import DatasetManifest
from dagster_adjunct.assets.versions.version import SealedVersion
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.tables.functions import TableReadFunction, TableUse, check_args
from dagster_adjunct.resources.tables.operation import (
    Capabilities,
    Operation,
    Outcomes,
    Problem,
    State,
    key_reorderer,
)
from dagster_adjunct.resources.validation import SecondsOrZero, validated, validated_methods

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@validated_methods
class Dataset(VersionOperations):
    """An open dataset, from `open_dataset`. Safe to share between threads; close it, or use it in a
    `with`.

    A version is one state of the dataset and has an id. A version of a bounded dataset also has a
    name; a name stands for its newest version. The dataset reads the served version until `refresh`
    or a watch moves on to another, or a chosen one permanently. Every call reads one whole version;
    a running iteration keeps its version to the end.

    **Leases.** A lease keeps the version from being discarded (three requests, then one for each
    renewal in the background). It is taken before the second `get` or `get_all`, and before the
    first `items`, `frame`, `watch`, `take_lease` or hand-over to another engine, so a first `get`
    costs three requests: CURRENT, the manifest, and one row group. It is released when the dataset
    has moved on and the calls on the version have ended, or when the dataset is garbage collected.
    A version that was given to `frame` or another engine stays leased until `close`, because its
    files are read later. With `lease=False` a version may be discarded meanwhile: `get` and
    `get_all` then answer from the version served by then, and running reads raise
    VersionDiscardedError. Spark's errors about missing or damaged files of the version leave the
    `with` as VersionDiscardedError or ManifestMismatchError.

    **Damage.** A damaged or missing file raises ManifestMismatchError, unless another version is
    served by then. With `on_damage="previous"` the sealed version before is read, with a warning in
    the log and the error in `damaged`, until another version is served. A running iteration and a
    chosen version fail all the same.
    """

    def __init__(self, stored: StoredVersions, served: ServedVersion) -> None:
        super().__init__(stored.log)
        self._stored = stored
        self._served = served
        self._watch: Watch | None = None

    def __repr__(self) -> str:
        version = None
        if self._served.held is not None:
            version = self._served.held.reader.version
        return f"Dataset({self.name!r}, {version!r})"

    # -- what is read

    @property
    def name(self) -> str:
        """The dataset's name."""
        return self._stored.name

    @property
    def version(self) -> str:
        """The id of the version that the next call reads."""
        return self._served.require().reader.version

    @property
    def sealed(self) -> SealedVersion:
        """The stored facts of the version that the next call reads: name, number, offsets,
        counters and files.
        """
        return self._served.require().reader.sealed

    @property
    def schema(self) -> Schema:
        """The columns of the version's entries."""
        return self._served.require().reader.schema

    @property
    def rows(self) -> int | None:
        """The number of the version's entries; None if counting them needs a merge of deltas."""
        return self._served.require().reader.rows

    @property
    def damaged(self) -> dict[str, errors.ManifestMismatchError]:
        """The errors of versions that were found damaged while reading, by version id."""
        return dict(self._served.damaged)

    # -- reading

    def get(self, key: object) -> Entry | None:
        """Return the entry of `key`, or None.

        A key of several columns is a tuple in the order of the key, or a dict. Raises
        SchemaMismatchError for a value of another type than the key's, and ManifestMismatchError
        for a missing or damaged file.
        """
        return self._served.answer(lambda reader: reader.get(key))

    def history_of(self, key: object) -> list[Validity]:
        """Return the entries of a key over time, oldest first; a deletion has no entry and ends the
        one before.

        Adjacent intervals with equal entries are merged; with `history_columns` those with equal
        values of these. Intervals that ended before the history begins (at its newest time minus
        `history`) are left out. Of a bounded dataset all versions
        that state their time are read, and stay leased until `close`. Raises DatasetError without
        history, and what `get` raises.
        """
        if not self.sealed.positioned:
            return self._served.lend_over_time().history_of(key)
        return self._served.answer(lambda reader: reader.history_of(key))

    def get_all(self, keys: Iterable[K]) -> dict[K, Entry]:
        """Return the entries of these keys, all of one version, under the keys as given.

        Keys without an entry are absent.
        """
        wanted = list(keys)
        return self._served.answer(lambda reader: reader.get_all(wanted))

    def items(
        self, prefix: object = None, *, start: object = None, end: object = None
    ) -> Iterator[tuple[Any, Entry]]:
        """Yield (key, entry) in key order, all of the version that is current at the call.

        `prefix` is a string (or bytes) with which the first key column begins, or a tuple of whole
        values of leading key columns. `start` (included) and `end` (excluded) are keys, or tuples
        of leading values. Only matching row groups are read, when they are reached. Raises
        SchemaMismatchError at once for bounds that do not fit the key.
        """
        return self._served.iterate(lambda reader: reader.items(prefix, start=start, end=end))

    def frame(self, spark: SparkSession | Callable[[], SparkSession]) -> DataFrame:
        """Return all entries as a DataFrame with the columns of `schema`; the version stays leased
        until `close`.

        A partitioned dataset is a bucketed scan: a join on its partition columns or its key needs
        no exchange on this side. Superseded rows are dropped during the scan. Read the frame before
        the dataset is closed. Raises ManifestMismatchError if the stored files are not exactly
        those of the manifest.
        """
        return self._served.lend(lambda reader: reader.frame(spark))

    def valid_at(self, moment: datetime) -> EntriesAt:
        """Return the entries that were valid at a moment (a time with its zone), according to the
        newest history.

        For Spark, call `frame(spark)` of the result; other engines accept it as they accept a
        dataset. Of a bounded dataset they are the entries of the retained version that was valid
        then. The files stay leased until `close`. Raises DatasetError without history, and for a
        moment before it begins.
        """
        return EntriesAt(self._served.lend_over_time(), moment)

    def over_time(self, *, interval_id: bool = False) -> EntriesOverTime:
        """Return all entries over time, each with the start and end of its validity, for Spark or
        other engines.

        With `interval_id` they have a column of this name, which identifies an interval: it follows
        from the key and the interval's start alone. Leases and errors are those of `valid_at`.
        """
        return EntriesOverTime(self._served.lend_over_time(), interval_id)

    def point_in_time(
        self,
        records: Any,
        *,
        on: str | Sequence[str] | Mapping[str, str],
        as_of: str,
        select: Sequence[str] | None = None,
        max_age: timedelta | None = None,
        before_history: BeforeHistory = "null",
        versions: Known = "now",
    ) -> Any:
        """Return records, each with the columns of the entry that was valid at its time: a training
        set.

        `records` are an Arrow table, a pandas or Polars frame, rows as dictionaries, or a Spark
        frame; a frame is returned for a frame, else an Arrow table. All records stay, in their
        order. `on` names the columns of the key: "plane", ["origin", "hour"], or {record column:
        key column}. `as_of` is the column with the record's time, a timestamp with a zone or a
        date. Both may name a value in a struct, "customer.id". `select` lists the columns to add,
        "seats" or "year as built"; by default all but the key. Columns are null where the key had
        no entry then, where it became valid longer than `max_age` before, and for times from before
        the history of the key, unless before_history="error".

        With versions="known-then" it is the entry that the dataset served at that time, by the
        commit that was current then; the dataset needs no history. Commits that were discarded are
        before the history.

        Raises SchemaMismatchError for records that do not fit, and DatasetError for a dataset
        without history.
        """
        reader: Reader | ServedOverTime
        if versions == "known-then":
            reader = self._served.lend_served()
        else:
            reader = self._served.lend_over_time()
        join = PointInTime.of(reader, on, as_of, select, max_age, before_history)
        return join_records(join, records)

    def lend(self, read: Callable[[VersionReader], T]) -> T:
        """Return `read(reader)`, for an engine that reads the version's files later; it stays
        leased until `close`.
        """
        return self._served.lend(read)

    # -- versions

    def diff(self, old: str, new: str, *, sample: int = 20) -> VersionDiff:
        """Return the differences between two versions, by id or name: counts, and up to `sample`
        keys of each kind.

        Raises VersionDiscardedError where one is discarded meanwhile; open and `take_lease` both to
        prevent that.
        """
        return self._stored.diff(old, new, sample=sample)

    def changes(
        self, since: str | datetime | int | None = None, until: str | datetime | int | None = None
    ) -> EntryChanges:
        """Return the entries that differ between two versions: one change for each key, as Python
        objects, Arrow, or a frame.

        Both are the id or name of a version, a time with its zone (the version served then), or a
        commit's number. Without `since`, or at a time when nothing was served yet, all entries are
        inserts; without `until` they are those of the version that the next call reads. They may be
        in any order: after a rollback, the changes go back. Both versions stay leased until
        `close`.

        Raises DatasetError where a version does not exist, was revoked or has another key, and
        VersionDiscardedError where it was discarded.
        """
        new = self._version_at(until)
        if new is None:
            new = self._served.lend_current()
        return EntryChanges(self._version_at(since), new)

    def _version_at(self, asked: str | datetime | int | None) -> VersionReader | None:
        """Return a leased reader of a version; None if none is asked for, or if nothing was served
        at that time or after that commit.
        """
        if asked is None:
            return None
        if isinstance(asked, str):
            return self._served.lend_earlier(asked)
        try:
            return self._served.lend_earlier(as_of=asked)
        except errors.NoSealedVersionError:
            return None

    def verify(self, *, deep: bool = False) -> VerifyReport:
        """Return which stored objects of the version are missing, damaged or unlisted; raises
        nothing for these.

        Reads all bytes once, and with `deep` the key columns once more.
        """
        held = self._served.enter(leased=True)
        try:
            report = verify_version(held.reader, deep=deep)
            if not report.ok:
                self._served.raise_if_discarded(held.reader.version)
            return report
        finally:
            self._served.leave(held)

    # -- moving on

    def refresh(self) -> bool:
        """Move on to the version served now; return whether it is a different one. One request if
        nothing changed.

        Running calls keep their version. Raises NoSealedVersionError when no version is served any
        more, as do all calls until a refresh finds one. A chosen version stays: its refresh raises
        DatasetError once it was revoked or discarded.
        """
        return self._served.refresh()

    def watch(self, interval: float = 5.0) -> Watch:
        """Refresh every `interval` seconds in the background, until the watch is stopped or this
        dataset is closed.
        """
        self.take_lease()
        with self._served.moving:
            if self._watch is None or not self._watch.running:
                self._watch = Watch(self.name, WeakMethod(self._served.refresh), interval).start()
            return self._watch

    def take_lease(self) -> None:
        """Lease the version that the next call reads; does nothing if it is leased already, or
        with `lease=False`.
        """
        self._served.leave(self._served.enter(leased=True))

    def close(self) -> None:
        """Stop watching, and release the leases once running iterations have ended. Later calls
        raise an error.
        """
        if self._watch is not None:
            self._watch.stop()
        self._served.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the dataset. Spark's error about a file of a lent version is raised as our own."""
        lent = self._served.lent
        self.close()
        unreadable = find_unreadable_version(error, lent)
        if unreadable is not None:
            self._served.raise_if_discarded(unreadable.reader.version)
            raise unreadable.error from error

    def _newest(self) -> DatasetManifest:
        return self._stored.require_manifest()


@validated
def open_dataset(
    lake: Lake,
    dataset: AdjunctDataset | str,
    *,
    version: str | None = None,
    as_of: datetime | int | str | None = None,
    cache: FileCache | None = None,
    lease: bool = True,
    on_damage: OnDamage | None = None,
    holder: str | None = None,
) -> Dataset:
    """Open a dataset at the served version, or permanently at `version` (an id or name) or `as_of`
    a time.

    `dataset` is the name, or a declaration, which must match the stored one. `as_of` is a time with
    its zone (the newest commit at or before it), or a commit's number or id. `cache` may be shared
    by datasets. `Dataset` explains `lease` and `on_damage` (by default that of the declaration).
    The lease stores `holder` for operators, by default the machine and process.

    Raises DatasetNotFoundError; for a version or moment, DatasetError where it does not exist or
    was revoked, NoSealedVersionError where nothing was served, and VersionDiscardedError where it
    was discarded. A dataset that serves no version can be opened; reading it raises
    NoSealedVersionError.
    """
    stored = StoredVersions(lake, dataset, cache)
    fixed = None
    if version is not None or as_of is not None:
        fixed = stored.version(version, as_of=as_of)
    served = ServedVersion(stored, fixed, leases=lease, on_damage=on_damage, holder=holder)
    return Dataset(stored, served)


@validated
def current_versions(
    lake: Lake, datasets: Iterable[AdjunctDataset | str]
) -> dict[str, Dataset | None]:
    """Open the version that each dataset serves now, permanently; None for a dataset that serves
    none.

    Members of one version set come from one snapshot of it.
    """
    stored = {}
    for dataset in datasets:
        versions = StoredVersions(lake, dataset)
        stored[versions.name] = versions
    opened: dict[str, Dataset | None] = {}
    for name, manifest in current_manifests(stored).items():
        reader = stored[name].reader_of(manifest)
        if reader is None:
            opened[name] = None
        else:
            opened[name] = Dataset(stored[name], ServedVersion(stored[name], reader))
    return opened


@validated
class DatasetTable(TableReadFunction[Any, dict[str, Any]]):
    """Read function over a served dataset: `RemoteTable("planes", key="tailnum",
    read_function=DatasetTable(…))`.

    All keys of one request are read from one version. From the second request on it is leased,
    until the table moves on or is closed. A request that comes more than `refresh_every` seconds
    after the last check first moves on to the served version (one more request); with None that
    happens only when the table is closed and opened again. With `version`, an id or a name, the
    version never changes. As in joins, its columns have the names that they have now. Threads and
    event loops share the open dataset and its cache.

    The table is read-only: writes are rejected.
    """

    compares_keys: ClassVar[bool] = True

    def __init__(
        self,
        lake: Lake | str,
        dataset: str,
        *,
        version: str | None = None,
        refresh_every: SecondsOrZero | None = 5.0,
    ) -> None:
        self.lake = lake
        self.dataset = dataset
        self.version = version
        self.refresh_every = refresh_every
        self._reported: frozenset[str] = frozenset()  # columns that stored_types has returned
        self._reset()

    def _reset(self) -> None:
        """Forget what is open, without closing it."""
        self._open: ServedVersion | None = None
        self._checked_at = 0.0
        self._moving = threading.Lock()  # held while the dataset is opened, refreshed or closed

    def __repr__(self) -> str:
        return f"DatasetTable({self._url!r}, {self.dataset!r})"

    @property
    def _url(self) -> str:
        if isinstance(self.lake, str):
            return self.lake
        return self.lake.url

    def to_dict(self) -> dict[str, Any]:
        """The declaration as plain values."""
        settings = {"version": self.version, "refresh_every": self.refresh_every}
        return {"lake": self._url, "dataset": self.dataset, **settings}

    def __getstate__(self) -> dict[str, Any]:
        """Return the declaration, without what is open."""
        found = {}
        for name, value in self.__dict__.items():
            if name not in ("_open", "_checked_at", "_moving"):
                found[name] = value
        return found

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    def column_types(self) -> dict[str, str] | None:
        """Return the columns of the version that is open, None if none is."""
        served = self._open
        if served is None:
            return None
        return served.require().reader.schema.types

    async def stored_types(self) -> dict[str, str] | None:
        """Return the columns of the served version."""
        served = await asyncio.to_thread(self._current)
        types = served.require().reader.schema.types
        self._reported = frozenset(types)
        return types

    def problem_of(self, error: BaseException, *, sent: bool = True) -> Problem:
        return super().problem_of(error, sent=False)  # a failed read can be repeated

    async def check(self, use: TableUse) -> None:
        """Open the dataset, which must have a version, with the key that the table declares."""
        served = await asyncio.to_thread(self._current)
        own = served.require().reader.sealed.key
        key_reorderer(f"dataset {self.dataset!r}", own, use.key)

    async def close(self) -> None:
        """Release the lease when the running requests have ended; the next request opens the
        dataset again.
        """
        await asyncio.to_thread(self._close)

    async def get(self, key: Any, *args: object) -> dict[str, Any] | None:
        return (await self.get_all([key], *args)).get(key)

    async def _send_entries(self, operation: Operation[Any]) -> Outcomes:
        check_args(self, operation)
        return await self.send(operation)

    async def send(self, operation: Operation[Any]) -> Outcomes:
        """Return the entries of the operation's keys. Raises ConfigurationError for a write."""
        if operation.kind.writes:
            problem = (
                f"dataset {self.dataset!r} is a read-only table, and was asked to"
                f" {operation.kind.value}."
            )
            raise errors.ConfigurationError(
                problem, "Publish to the dataset's input instead.", dataset=self.dataset
            )
        try:
            return await asyncio.to_thread(self._read, operation)
        except errors.ConfigurationError:
            raise
        except Exception as error:  # noqa: BLE001 - it becomes the outcome
            return Outcomes.all(len(operation), self.problem_of(error))

    def _read(self, operation: Operation[Any]) -> Outcomes:
        """Return the entries of the operation's keys, all of one version."""
        served = self._current()
        try:
            return served.answer(partial(self._look_up, operation))
        except errors.DatasetError:
            was_closed = served is not self._open  # by another request, before this one read
            if not was_closed:
                raise
            return self._read(operation)

    def _look_up(self, operation: Operation[Any], reader: VersionReader) -> Outcomes:
        """Return the entries of the operation's keys in this version; a key that does not fit gets
        its own problem, and one that no entry can have gets no entry.

        Raises SchemaMismatchError if a column that `stored_types` has returned is gone.
        """
        missing = sorted(self._reported.difference(reader.schema.names))
        if missing:  # else it would be null
            raise errors.SchemaMismatchError(
                f"dataset {self.dataset!r}: its column {missing[0]!r} was renamed or dropped after"
                " the columns of this table were compared with those to look up.",
                "Run the application again, which compares them first.",
                column=missing[0],
                dataset=self.dataset,
            )
        keys = operation.entries.keys
        reorder = key_reorderer(f"dataset {self.dataset!r}", reader.sealed.key, operation.key)
        if reorder is not None:
            keys = list(map(reorder, keys))
        misfits: dict[int, Problem | None] = {}
        try:
            entries = reader.get_all(keys)
        except (errors.SchemaMismatchError, errors.NullKeyError):
            misfits = self._invalid_keys(reader, keys)
            fitting = [key for index, key in enumerate(keys) if index not in misfits]
            entries = reader.get_all(fitting)
        values = []
        for index, key in enumerate(keys):
            values.append(None if index in misfits else entries.get(key))
        problems = {}
        for index, problem in misfits.items():
            if problem is not None:
                problems[index] = problem
        return Outcomes(len(keys), values, problems)

    def _invalid_keys(
        self, reader: VersionReader, keys: Sequence[Any]
    ) -> dict[int, Problem | None]:
        """Return the problems of keys that do not fit the dataset's key, by index.

        None for a value that is out of its type's range: no entry can have it.
        """
        fields = [reader.schema.field(name) for name in reader.sealed.key]
        misfits: dict[int, Problem | None] = {}
        for index, key in enumerate(keys):
            try:
                coerce_key(f"dataset {self.dataset!r}", fields, key)
            except (errors.SchemaMismatchError, errors.NullKeyError) as error:
                if is_out_of_range(error):
                    misfits[index] = None
                else:
                    misfits[index] = Problem(State.REFUSED, error)
        return misfits

    def _current(self) -> ServedVersion:
        """Return the open dataset, which is opened by the first request, and moved on to the served
        version if `refresh_every` seconds have passed.
        """
        with self._moving:
            if self._open is None:
                self._open = self._open_dataset()
                self._checked_at = time.monotonic()
            elif self._is_refresh_due():
                self._open.refresh()
                self._checked_at = time.monotonic()
            return self._open

    def _open_dataset(self) -> ServedVersion:
        """Return the dataset, opened at `version` or at the one served now."""
        lake = open_lake(self.lake, create=False) if isinstance(self.lake, str) else self.lake
        stored = StoredVersions(lake, self.dataset, named_now=True)
        fixed = None
        if self.version is not None:
            fixed = stored.version(self.version)
        return ServedVersion(stored, fixed)

    def _is_refresh_due(self) -> bool:
        """Whether the version can change, and was last checked `refresh_every` seconds ago."""
        if self.version is not None or self.refresh_every is None:
            return False
        return time.monotonic() - self._checked_at >= self.refresh_every

    def _close(self) -> None:
        """Close the open dataset, if any; the next request opens it again."""
        with self._moving:
            served = self._open
            self._open = None
        if served is not None:
            served.close()
