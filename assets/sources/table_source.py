"""Versions that are states of an Iceberg or a Delta table: its snapshots, tags or versions.

A version that was built stays, whatever becomes of the table. The marker facts of a delivery say
which state it was: `offset` is its number, `checksum` its id, `contents` the identity of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.declaration.dataset import BoundedDataset
from dagster_adjunct.assets.declaration.policies import natural_sort_key
from dagster_adjunct.assets.declaration.table_versions import IcebergVersions, TableVersions
from dagster_adjunct.assets.sources.entries import derive_entry_schema, hides_values
from dagster_adjunct.assets.sources.version_source import Awaiting, Delivery, VersionSource
from dagster_adjunct.assets.versions.manifest import BoundedManifest, Delivered, MarkerFacts
from dagster_adjunct.assets.versions.version import declaration_from_spec
from dagster_adjunct.resources.errors import (
    DatasetError,
    EmptyVersionError,
    MarkerConflictError,
    SchemaMismatchError,
    SourceChangedError,
)
from dagster_adjunct.resources.lazy_modules import F, pa
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.tasks import read_in_tasks
from dagster_adjunct.resources.streams.system import META
from dagster_adjunct.resources.table_snapshots.iceberg import IcebergSnapshots, TaggedStates
from dagster_adjunct.resources.table_snapshots.table import (
    StateScan,
    TableHistory,
    TableState,
    VersionedTable,
    check_types,
    fit_rows,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_STATE = "state"
_Copies = dict[str, dict[str, MarkerFacts]]


@dataclass(frozen=True, slots=True)
class _Rows:
    """How rows of a state are read, in this process or in a task."""

    table: VersionedTable
    state: TableState
    schema: Schema
    what: str
    shows_values: bool

    def __call__(self, part: Any) -> Iterator[pa.RecordBatch]:
        for rows in self.table.read(self.state, part, self.schema.names):
            yield from self._fit(rows).to_batches()

    def _fit(self, rows: Any) -> pa.Table:
        """Return the rows with the declared columns. Raises SchemaMismatchError for a value that
        does not fit, which it shows unless values are hidden.
        """
        try:
            return fit_rows(rows, self.schema, self.what)
        except SchemaMismatchError as error:
            if self.shows_values:
                raise
            raise SchemaMismatchError(
                f"{self.what}: a value does not fit its declared type; it is not shown, because"
                " columns are sensitive.",
                error.next_step,
                column=error.column,
            ) from None


class TableStateVersions(VersionSource):
    """The versions that are states of a table, as found by the first call of `next`.

    Rows of a table have no order: of several with one key, the one with the greatest values is
    kept.
    """

    def __init__(
        self, spec: BoundedDataset, source: TableVersions, partition: str | None = None
    ) -> None:
        schema = derive_entry_schema(spec, source.schema)
        ordered_by = tuple(name for name in schema.names if name not in spec.key)
        super().__init__(spec, schema, declaration_from_spec(spec, schema), ordered_by)
        self._source = source
        self._partition = partition
        self._table: VersionedTable = source.open()
        self._history: TableHistory | None = None
        self._tags: TaggedStates | None = None
        self._given: set[str] = set()
        self._scans: dict[str, StateScan] = {}

    def next(self, manifest: BoundedManifest) -> Delivery | Awaiting:
        """Return the first state that is no version yet, or that there is none.

        Raises DatasetError if states expired before they were versions, or the table was replaced,
        unless that is declared to be skipped.
        """
        if self._source.tags is not None:
            return self._next_tag(manifest, self._source.tags)
        return self._next_state(manifest)

    # -- snapshots, and versions of a Delta table

    def _next_state(self, manifest: BoundedManifest) -> Delivery | Awaiting:
        """Return the version of the next state that has other rows than the one before it; with
        `take="newest"`, of the newest state. States that can't be read any more are skipped, or
        raise DatasetError (see `_lost`).
        """
        last = _last_facts(manifest)
        if self._history is None:
            self._history = self._table.history(None if last is None else _state_of(last))
        history = self._history
        notes: tuple[str, ...] = ()
        if last is not None and last.contents != history.identity:
            notes = (self._replaced(),)
            self._history = history = self._table.history(None)
            last = None
        states = self._list_unsettled(manifest, history, last)
        changed = [state for state in states if not state.same_rows]
        if not changed:
            return self._nothing_new(manifest, history, states, last)
        if self._source.take == "newest":
            return self._deliver(manifest, states[-1], history.identity, notes)
        if last is not None and not _is_complete(history, last):
            what = f"states after number {last.offset} of the {self._table.describe()} expired"
            notes += (self._lost(f"{what} before they were versions"),)
        for state in changed:
            is_current = state is history.states[-1]  # its files are there
            if is_current or self._table.is_readable(state):
                return self._deliver(manifest, state, history.identity, notes)
            what = f"files of version {state.id} of the {self._table.describe()} are gone"
            notes += (self._lost(f"{what}, before it was a version"),)
        return Awaiting(None, (), idle=True, notes=notes)

    def _list_unsettled(
        self, manifest: BoundedManifest, history: TableHistory, last: MarkerFacts | None
    ) -> list[TableState]:
        """Return the states after the last one that was delivered (None: all), in order, without
        those that were abandoned or given out already.
        """
        if last is not None:
            states = history.after(str(last.checksum), last.offset)
        else:
            states = history.states
        settled = manifest.given_up | self._given
        return [state for state in states if state.id not in settled]

    def _nothing_new(
        self,
        manifest: BoundedManifest,
        history: TableHistory,
        states: Sequence[TableState],
        last: MarkerFacts | None,
    ) -> Awaiting:
        """Return that no state has other rows than the `last` one. The position moves past the
        `states` with the same rows: the last delivery gets the facts of the newest.
        """
        if last is None:
            missing = f"a state of the {self._table.describe()} that has rows"
            return Awaiting(None, (missing,), idle=True, files=missing)
        notes: tuple[str, ...] = ()
        was_rolled_back = bool(history.states) and history.states[-1].number < last.offset
        if was_rolled_back:
            head = history.states[-1].id
            notes = (
                f"the {self._table.describe()} was rolled back to {head}: what was published"
                f" stays. To serve that state again: adjunct dataset rollback {self.spec.name}"
                f" {head} --reason …",
            )
        copies: _Copies = {}
        if states and manifest.delivered:
            name = manifest.delivered[-1].name
            copies[name] = {_STATE: _facts(states[-1], history.identity)}
        return Awaiting(None, (), idle=True, notes=notes, copies=copies)

    def _replaced(self) -> str:
        """Return a note that another table is there now, or raise DatasetError (see `_lost`)."""
        return self._lost(f"another table has its place: {self._source} was replaced")

    def _lost(self, problem: str) -> str:
        """Return a note on states that can't be versions any more, as `problem` says. Raise
        DatasetError instead unless it is declared to skip them.
        """
        if self._source.on_expired == "skip":
            return f"{problem}; the dataset goes on with those that there are"
        raise DatasetError(
            f"dataset {self.spec.name!r}: {problem}. What is served stays.",
            "To go on with what the table has now, declare on_expired='skip' in its input, and"
            " advance it; to keep every state, let the table retain them longer than the time"
            " between two advances.",
            dataset=self.spec.name,
        )

    def _deliver(
        self,
        manifest: BoundedManifest,
        state: TableState,
        identity: str,
        notes: tuple[str, ...] = (),
    ) -> Delivery:
        """Return the version of a state, named by its id, and remember it as given. `identity` is
        that of the table.
        """
        name = state.id
        if name in manifest.names:
            name = f"{state.id}-{identity[:8]}"  # the earlier table at this place had it, too
        self._given.add(state.id)
        return replace(self._delivery(name, state, identity), notes=notes)

    def _delivery(self, name: str, state: TableState, identity: str) -> Delivery:
        """Return the delivery of a state under this name."""
        return Delivery(
            name,
            markers={_STATE: _facts(state, identity)},
            content=state,
            identity=repr((self._source, identity, state.id)),
            valid_from=(state.at,),
        )

    # -- tags

    def _next_tag(self, manifest: BoundedManifest, pattern: str) -> Delivery | Awaiting:
        """Return the version of the first tag that is none yet, in the order of snapshots. Tags are
        those that match `pattern`.

        Raises MarkerConflictError if all such tags are of snapshots before that of a delivered
        version, and versions are in the order of arrival.
        """
        assert isinstance(self._table, IcebergSnapshots)
        if self._tags is None:
            self._tags = self._table.tags(pattern)
        identity = self._tags.identity
        tags = self._tags.states
        last = _last_facts(manifest)
        notes: tuple[str, ...] = ()
        if last is not None and last.contents != identity:
            notes = (self._replaced(),)
        if self._partition is not None:
            return self._requested_tag(manifest, self._partition)
        left_out = self.outside(tags) - manifest.names
        outside = sorted(left_out, key=natural_sort_key)
        waiting, moved = self._compare_tags(manifest, tags, left_out)
        notes += tuple(map(self._describe_moved, sorted(moved)))
        notes += self.describe_outside(outside)
        waiting.sort(key=lambda name: (tags[name].number, natural_sort_key(name)))
        newest = self._newest_delivered(manifest)
        # The number of the snapshot before which tags are late; none is before the first delivery.
        late_before = -1
        if newest is not None:
            late_before = newest.markers[_STATE].offset
        for name in waiting:
            if tags[name].number >= late_before:
                self._given.add(name)
                found = self._delivery(name, tags[name], identity)
                return replace(found, notes=notes, outside=tuple(outside))
        if waiting:
            assert newest is not None, "without it, no tag is late"
            raise self._late_error(waiting[0], newest)
        missing = f"a tag {pattern} of the {self._table.describe()}"
        return Awaiting(
            None, (missing,), idle=True, notes=notes, outside=tuple(outside), files=missing
        )

    def _compare_tags(
        self, manifest: BoundedManifest, tags: Mapping[str, TableState], left_out: set[str]
    ) -> tuple[list[str], list[str]]:
        """Return the tags that are to be versions, and those that name another snapshot now than
        when they were delivered. Tags in `left_out` are neither.
        """
        ended = manifest.given_up | self._given | left_out
        newest = manifest.newest_deliveries
        waiting: list[str] = []
        moved: list[str] = []
        for name in tags.keys() - ended:
            done = newest.get(name)
            if done is None:
                was_delivered_long_ago = name in manifest.names
                if not was_delivered_long_ago:
                    waiting.append(name)
            elif not _differs(done, tags[name]):
                continue
            elif self._may_be_tried_again(manifest, done):
                waiting.append(name)
            else:
                moved.append(name)
        return waiting, moved

    def _requested_tag(self, manifest: BoundedManifest, name: str) -> Delivery | Awaiting:
        """Return the version of the tag that is requested, unless its version is retained and was
        made of the same snapshot.
        """
        assert self._tags is not None
        identity = self._tags.identity
        tags = self._tags.states
        if name not in tags:
            missing = f"the tag {name} of the {self._table.describe()}"
            return Awaiting(name, (missing,), files=missing)
        done = manifest.newest_deliveries.get(name)
        is_there = done is not None and manifest.retains(done.version)
        if done is not None and is_there and not _differs(done, tags[name]):
            return Awaiting(None, (), idle=True)
        return self._delivery(name, tags[name], identity)

    def _may_be_tried_again(self, manifest: BoundedManifest, done: Delivered) -> bool:
        """Whether a tag that was moved may be a version although `done` was delivered under its
        name: that name is free, or that version was rejected and later versions don't matter.
        """
        if done.freed is not None:
            return True
        if done.version not in manifest.rejected:
            return False
        are_ordered_by_name = self.spec.versions is not None
        return are_ordered_by_name or done is manifest.delivered[-1]

    def _newest_delivered(self, manifest: BoundedManifest) -> Delivered | None:
        """Return the delivered version with the newest snapshot, if versions are in the order of
        their arrival; None if there is none. Freed ones may be delivered again.
        """
        if self.spec.versions is not None or self.spec.valid_from is not None:
            return None
        tagged = []
        for done in manifest.delivered:
            if done.freed is None and _STATE in done.markers:
                tagged.append(done)
        return max(tagged, key=lambda done: done.markers[_STATE].offset, default=None)

    def _late_error(self, name: str, newest: Delivered) -> MarkerConflictError:
        """Return the error for a tag of a snapshot before that of the version `newest`."""
        return MarkerConflictError(
            f"dataset {self.spec.name!r}: the tag {name!r} of the {self._table.describe()} names a"
            f" snapshot before that of version {newest.name!r}, which was delivered already.",
            f"Abandon it: abandon_version(lake, {self.spec.name!r}, {name!r}, reason=…, by=…). If"
            ' older snapshots may be tagged later, declare valid_from="marker", or'
            " versions=VersionPartitions(…).",
            dataset=self.spec.name,
            version=name,
        )

    def _describe_moved(self, name: str) -> str:
        """Return a note on a tag that names another snapshot than its version was made of."""
        return (
            f"version {name!r} was delivered, and the tag names another snapshot now: what was"
            " published stays. To publish that snapshot, give it a tag of its own"
        )

    # -- the rows of a version

    def check(self, delivery: Delivery, spark: Callable[[], SparkSession]) -> int | None:
        """Return the number of rows, None if it is unknown before they are read.

        Raises DatasetError for columns that the table does not have, or has with another type.
        """
        scan = self._scan(delivery)
        check_types(scan.columns, self._source.schema, self._what(delivery))
        return scan.rows

    def reject_empty(self, delivery: Delivery) -> None:
        if self._source.allow_empty:
            return
        raise EmptyVersionError(
            f"{self._what(delivery)}: {self._describe(delivery)} has no rows.",
            f"If it may be empty, declare {type(self._source).__name__}(…, allow_empty=True).",
            dataset=self.spec.name,
            version=delivery.version,
        )

    def records_in_arrow(self, delivery: Delivery) -> pa.Table:
        read = self._rows(delivery)
        batches: list[pa.RecordBatch] = []
        for part in self._scan(delivery).parts:
            batches += read(part)
        rows = pa.Table.from_batches(batches, self._source.schema.to_arrow())
        partition, offset, timestamp, tombstone = META
        rows = rows.append_column(partition, pa.repeat(pa.scalar(0, pa.int32()), len(rows)))
        rows = rows.append_column(offset, pa.repeat(pa.scalar(0, pa.int64()), len(rows)))
        rows = rows.append_column(timestamp, pa.nulls(len(rows), pa.timestamp("us", "UTC")))
        return rows.append_column(tombstone, pa.repeat(False, len(rows)))

    def records_in_spark(self, delivery: Delivery, spark: SparkSession) -> DataFrame:
        columns = [(field.name, field.type) for field in self._source.schema.fields]
        parts = self._scan(delivery).parts
        frame = read_in_tasks(spark, parts, self._rows(delivery), columns)
        partition, offset, timestamp, tombstone = META
        return frame.select(
            "*",
            F.lit(0).alias(partition),
            F.lit(0).cast("bigint").alias(offset),
            F.lit(None).cast("timestamp").alias(timestamp),
            F.lit(False).alias(tombstone),
        )

    def _scan(self, delivery: Delivery) -> StateScan:
        """Return what to read of a delivered state, planned once. Raises SourceChangedError if the
        table was replaced.
        """
        if delivery.version not in self._scans:
            scan = self._table.plan(delivery.content, self._source.schema.names)
            if self._table.identity() != delivery.markers[_STATE].contents:
                raise SourceChangedError(
                    f"{self._what(delivery)}: the {self._table.describe()} was replaced while it"
                    " was read.",
                    "Run again.",
                    dataset=self.spec.name,
                )
            self._scans = {delivery.version: scan}
        return self._scans[delivery.version]

    def _rows(self, delivery: Delivery) -> Callable[[Any], Iterator[pa.RecordBatch]]:
        """Return the function that reads a part of a scan, in this process or in a task."""
        shows = not hides_values(self.spec)
        state = delivery.content
        what = f"{self._what(delivery)}: {self._describe(delivery)}"
        return _Rows(self._table, state, self._source.schema, what, shows)

    def _describe(self, delivery: Delivery) -> str:
        """Return the state in words: "version 5 of …", or "snapshot …"."""
        kind = "snapshot" if isinstance(self._source, IcebergVersions) else "version"
        return f"{kind} {delivery.content.id} of the {self._table.describe()}"

    def _what(self, delivery: Delivery) -> str:
        return f"dataset {self.spec.name!r}, version {delivery.version!r}"


def _facts(state: TableState, identity: str) -> MarkerFacts:
    """Return what is recorded of a state."""
    return MarkerFacts(
        offset=state.number, checksum=state.id, contents=identity, completed=state.at
    )


def _last_facts(manifest: BoundedManifest) -> MarkerFacts | None:
    """Return what is recorded of the state that was delivered last, None before the first one."""
    if not manifest.delivered:
        return None
    return manifest.delivered[-1].markers.get(_STATE)


def _state_of(facts: MarkerFacts) -> TableState:
    """Return the state of which these facts were recorded."""
    assert facts.completed is not None
    return TableState(str(facts.checksum), facts.offset, facts.completed)


def _is_complete(history: TableHistory, last: MarkerFacts) -> bool:
    """Whether no state after the `last` one has expired: it is there itself, or the history has all
    states since the one after it.
    """
    if any(state.id == last.checksum for state in history.states):
        return True
    return history.complete_since <= last.offset + 1


def _differs(done: Delivered, state: TableState) -> bool:
    """Whether a tag names another snapshot than when it was delivered; False if it is unknown what
    it named.
    """
    facts = done.markers.get(_STATE)
    return facts is not None and facts.checksum != state.id
