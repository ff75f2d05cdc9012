"""Reads what a dataset served when: the rows of all entries, each with the time in which it was
served.

This is not *valid time* (`valid_time.py`): a commit counts from the time at which it was made, and
later corrections do not change what was served before.

Commits that only append changes to the same table make one *stretch*: the row of a change is served
from the commit with which it was appended, if it was the newest of its key then. Each other commit
that changes the entries begins a stretch, with all rows of the version that it serves. So what is
read is one bucketed scan of the files of all stretches:

    commit   1: a base      2: a delta    3: a compaction    4: a delta     5: a rollback
    stretch  [ base         + delta 2                        + delta 4 )    [ the files of 5
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_adjunct.assets.reading.served_history import SAME_ENTRIES, Served, ServedHistory
from dagster_adjunct.assets.reading.stored_file import list_generation_files, read_stored_file
from dagster_adjunct.assets.reading.superseded import key_codes, number_values, sortable_positions
from dagster_adjunct.assets.versions.version import POSITION, TOMBSTONE, SealedVersion
from dagster_adjunct.resources.bucketing.files import (
    GENERATION_COLUMN,
    IS_FIRST,
    VALID_FROM,
    VALID_TO,
    Generation,
    bucketed_frame,
)
from dagster_adjunct.resources.errors import VersionDiscardedError
from dagster_adjunct.resources.lazy_modules import F, np, pa
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.schemas.evolution import is_widening
from dagster_adjunct.resources.schemas.records import frame_from_arrow
from dagster_adjunct.resources.schemas.schema import named_columns, quote_name
from dagster_adjunct.resources.schemas.types import arrow_type
from dagster_adjunct.resources.schemas.version_columns import NamedColumns
from dagster_adjunct.resources.spark.in_process import resolve_session
from dagster_adjunct.resources.spark.tasks import translate_spark_errors
from dagster_adjunct.resources.threads import map_in_threads
from dagster_adjunct.resources.times import to_microseconds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_READ_AT_ONCE = 256
_STRETCH = "__stretch"
_AT = "__at"
_UNTIL = "__until"
_ORDER = "__order"
_RANK = "__rank"


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of a generation in a stretch, served from the time `at` on, in microseconds. The
    stretch ends at the time `until`, None if it lasts. `version` has the names of their columns.
    """

    generation: Generation
    version: SealedVersion
    stretch: int
    at: int
    until: int | None


class ServedOverTime:
    """Reads the entries that a dataset has served after these commits, which are in the order of
    time.

    `first` is the number of the first of them, 0 if nothing was served before. Entries have the
    columns of the version that is served last, or just these `columns`.
    """

    def __init__(
        self,
        store: ObjectStore,
        dataset: str,
        served: Sequence[Served],
        *,
        first: int,
        columns: NamedColumns | None = None,
    ) -> None:
        self.store = store
        self.dataset = dataset
        self.commits = (first, served[-1].number)
        """The numbers of the first commit, 0 for the beginning, and of the last one."""
        self.known_from: int | None = None
        if first and served[0].at is not None:
            self.known_from = to_microseconds(served[0].at)
        """The time before which nobody knows any more what was served, in microseconds; None if all
        is known.
        """
        versions = [one.version for one in served if one.version is not None]
        newest = versions[-1]
        if columns is not None:
            newest = newest.read_as(columns)
        self.sealed = newest
        self.version = newest.id
        self.schema = newest.columns
        self.layout = replace(newest.layout, projected=True)
        self.versions = tuple(dict.fromkeys(version.id for version in versions))
        """The ids of the versions that were served, in the order of time."""
        self._parts = tuple(_list_parts(served, newest.named_columns))
        # by folder, with the number of the generation in the scan
        self._numbered: dict[str, Generation] = {}
        for part in self._parts:
            folder = part.generation.folder
            if folder not in self._numbered:
                number = len(self._numbered) + 1
                self._numbered[folder] = replace(part.generation, id=number)

    def __repr__(self) -> str:
        return f"ServedOverTime({self.dataset!r}, {len(self.versions)} versions)"

    @property
    def leased(self) -> tuple[str, ...]:
        """The versions to lease, so that all files stay: of a table that follows changes, a lease
        on one version keeps the later ones.
        """
        if self.sealed.positioned:
            return self.versions[:1]
        return tuple(sorted(self.versions))

    @property
    def generations(self) -> tuple[Generation, ...]:
        """The generations that are read, each once."""
        return tuple(self._numbered.values())

    def rows(self) -> pa.Table:
        """Return all rows, without Spark; those of a key are adjacent and sorted by time.

        They have the columns of entries, `__valid_from` and `__valid_to` (null: open) with the time
        in which the row was served, `__first` (false) and `__tombstone`. Raises
        ManifestMismatchError for damaged files.
        """
        tables = map_in_threads(self._read, self._parts)
        rows = pa.concat_tables([self._no_rows(), *tables])
        sizes = [table.num_rows for table in tables]

        def by_row(values: list[int]) -> Any:
            """Return a value for each row, given one for each part."""
            return np.repeat(np.array(values, np.int64), sizes)

        stretch = by_row([part.stretch for part in self._parts])
        at = by_row([part.at for part in self._parts])
        part_ends = [-1 if part.until is None else part.until for part in self._parts]
        until = by_row(part_ends)
        # In the order in which lexsort takes them: the last one counts most.
        ranks = [by_row([part.generation.id for part in self._parts])]
        if POSITION in rows.column_names:
            ranks.append(sortable_positions(rows.column(POSITION)))
        if VALID_FROM in rows.column_names:
            ranks.append(rows.column(VALID_FROM).cast("int64").to_numpy())
        rank = np.empty(rows.num_rows, np.int64)
        rank[np.lexsort(ranks)] = np.arange(rows.num_rows)
        key = number_values(key_codes(rows.select(self.sealed.key).columns)).numbers
        order = np.lexsort((rank, at, stretch, key))
        # The rows of a key in a stretch are a group. A row is served if none before it in its group
        # is newer: group numbers are so far apart that the maximum never goes beyond a group.
        group = np.cumsum(_differs(key[order], stretch[order])) * rows.num_rows
        highest = group + rank[order]
        is_newest = np.maximum.accumulate(highest) == highest
        # Of several rows of a group with which a commit began, the last one.
        if len(group):
            is_last = np.append(_differs(group, at[order])[1:], True)
        else:
            is_last = is_newest
        is_served = is_newest & is_last
        order = order[is_served]
        group = group[is_served]
        begins = at[order]
        ends = until[order]
        has_next = group[1:] == group[:-1]  # in the same stretch
        ends[:-1][has_next] = begins[1:][has_next]  # else it ends with its stretch
        rows = rows.take(order)
        entries = rows.select(self.schema.names)
        if TOMBSTONE in rows.column_names:
            deleted = rows.column(TOMBSTONE)
        else:
            deleted = pa.repeat(pa.scalar(False), rows.num_rows)
        values = {
            VALID_FROM: pa.array(begins, pa.int64()).cast(arrow_type("timestamp")),
            TOMBSTONE: deleted,
            VALID_TO: pa.array(ends, pa.int64(), mask=ends < 0).cast(arrow_type("timestamp")),
            IS_FIRST: pa.repeat(pa.scalar(False), rows.num_rows),
        }
        for name, value in values.items():
            entries = entries.append_column(name, value)
        return entries

    def _no_rows(self) -> pa.Table:
        return self.layout.arrow_schema().empty_table()

    def _read(self, part: _Part) -> pa.Table:
        """Return the stored rows of a part."""
        what = f"dataset {self.dataset!r}, version {part.version.id}"
        layout = replace(part.version.layout, projected=True)
        tables = [self._no_rows()]
        for stored in list_generation_files(self.store, what, part.generation):
            tables.append(read_stored_file(stored, layout, threads=False))
        return pa.concat_tables(tables)

    @translate_spark_errors()
    def frame(self, spark: SparkSession | Callable[[], SparkSession]) -> DataFrame:
        """Return all rows as a frame, a bucketed scan with the columns that `rows` has."""
        session = resolve_session(spark)
        what = f"dataset {self.dataset!r}, all versions that it has served"
        rows = bucketed_frame(session, self.store, what, self.layout, self.generations)
        if not self.sealed.partition_by:
            rows = rows.coalesce(1)
        parts = frame_from_arrow(session, self._parts_table())
        placed = rows.join(F.broadcast(parts), GENERATION_COLUMN)
        ranks = [VALID_FROM, POSITION, _ORDER]
        rank = F.struct(*[F.col(name) for name in ranks if name in placed.columns])
        placed = placed.withColumn(_RANK, rank)
        in_stretch = f"PARTITION BY {', '.join(map(quote_name, self.sealed.key))}, {_STRETCH}"
        upto = "RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW"
        newest = placed.selectExpr(
            "*", f"max({_RANK}) OVER ({in_stretch} ORDER BY {_AT} {upto}) AS __newest"
        ).where(f"{_RANK} = __newest")
        ended = newest.selectExpr(
            "*", f"coalesce(lead({_AT}) OVER ({in_stretch} ORDER BY {_AT}), {_UNTIL}) AS __end"
        )
        deleted = F.col(TOMBSTONE) if TOMBSTONE in placed.columns else F.lit(False)
        return ended.select(
            *named_columns(self.schema.names),
            F.timestamp_micros(F.col(_AT)).alias(VALID_FROM),
            F.timestamp_micros(F.col("__end")).alias(VALID_TO),
            F.lit(False).alias(IS_FIRST),
            deleted.alias(TOMBSTONE),
        )

    def _parts_table(self) -> pa.Table:
        """Return the parts as a table, each with the number of its generation in the scan."""
        numbers = [self._numbered[part.generation.folder].id for part in self._parts]
        return pa.table(
            {
                GENERATION_COLUMN: pa.array(numbers, pa.int32()),
                _STRETCH: pa.array([part.stretch for part in self._parts], pa.int32()),
                _AT: pa.array([part.at for part in self._parts], pa.int64()),
                _UNTIL: pa.array([part.until for part in self._parts], pa.int64()),
                _ORDER: pa.array([part.generation.id for part in self._parts], pa.int32()),
            }
        )


def _differs(*columns: Any) -> Any:
    """Return for each row whether it differs from the one before (numpy); the first one does."""
    changed = np.ones(len(columns[0]), np.bool_)
    changed[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return changed


def _list_parts(served: Sequence[Served], columns: NamedColumns) -> Iterator[_Part]:
    """Yield the parts of each stretch of these commits, which are in the order of time.

    A commit with the same entries goes on with the stretch, and so does one that only appends
    generations. Any other commit ends it, and begins another one if it serves a version.
    """
    of_stretch: list[_Part] = []
    stretch = 0
    before: SealedVersion | None = None
    at = 0
    for one in served:
        version = one.version
        if one.at is not None:
            at = max(at, to_microseconds(one.at))  # clocks of writers may differ
        if version is not None and before is not None:
            if version.id == before.id or one.action in SAME_ENTRIES:
                before = version
                continue
            only_appends = before.folders <= version.folders
            if only_appends:
                of_stretch += _parts_of(version, before.folders, columns, stretch, at)
                before = version
                continue
        yield from (replace(part, until=at) for part in of_stretch)
        of_stretch = []
        stretch += 1
        if version is not None:
            of_stretch = _parts_of(version, frozenset(), columns, stretch, at)
        before = version
    yield from of_stretch


def _parts_of(
    version: SealedVersion, known: frozenset[str], columns: NamedColumns, stretch: int, at: int
) -> list[_Part]:
    """Return the generations of a version as parts of a stretch, without those whose folders are
    `known`.
    """
    named = version.read_as(columns)
    found = []
    for generation in version.nonempty:
        if generation.folder not in known:
            found.append(_Part(generation, named, stretch, at, None))
    return found


def read_served(
    history: ServedHistory, *, first: int = 0, columns: NamedColumns | None = None
) -> ServedOverTime | None:
    """Return a reader of what a dataset served up to the newest commit of the history; None if it
    serves nothing.

    Commits before the number `first` are left out. So are those from before entries were spread
    over other partitions, or had another key or columns of other types.
    """
    newest = history.newest.version
    if newest is None:
        return None
    known = _list_known(history, newest, first)
    store = history.log.lake.store
    return ServedOverTime(store, history.log.name, known.served, first=known.first, columns=columns)


class _KnownCommits(NamedTuple):
    """What was served after commits, in the order of time, and the number of the first one; 0 if
    nothing was served before.
    """

    served: list[Served]
    first: int


def _list_known(history: ServedHistory, newest: SealedVersion, first: int) -> _KnownCommits:
    """Return the newest commits, from the number `first` on, without those up to the last one whose
    entries can't be read any more together with the newest.
    """
    numbers = [number for number in history.candidates() if number >= first]
    backwards: list[Served] = []
    for one in _read_backwards(history, numbers):
        if one is None or not _is_readable_as(history, one.version, newest):
            first = backwards[-1].number  # the newest commit itself is readable
            break
        backwards.append(one)
    return _KnownCommits(backwards[::-1], first)


def _read_backwards(history: ServedHistory, numbers: Sequence[int]) -> Iterator[Served | None]:
    """Yield what was served after each of these commits, the last one first; None where that is no
    longer known.
    """
    for end in range(len(numbers), 0, -_READ_AT_ONCE):
        part = numbers[max(0, end - _READ_AT_ONCE) : end]
        yield from reversed(map_in_threads(partial(_read_commit, history), part))


def _read_commit(history: ServedHistory, number: int) -> Served | None:
    """Return what was served after a commit; None if that is no longer known."""
    try:
        return history.at(number)
    except VersionDiscardedError:
        return None


def _is_readable_as(
    history: ServedHistory, version: SealedVersion | None, newest: SealedVersion
) -> bool:
    """Whether the files of a version are retained, and can be read as one table with those of the
    newest; True for None, which has no files.
    """
    if version is None:
        return True
    if not history.is_retained(version):
        return False
    if _form_of(version) != _form_of(newest):
        return False
    now = newest.columns.types
    for field in version.named_as(newest.named_columns).columns.fields:
        if field.name in now and not is_widening(field.type, now[field.name]):
            return False
    return True


def _form_of(version: SealedVersion) -> tuple[object, ...]:
    """Return what must be equal for the files of two versions to be read as one table."""
    keys = version.columns.select(version.key).types
    spread = (version.partitions, version.partition_by, version.key, keys)
    return (*spread, version.positioned, version.positions.type, version.history is None)
