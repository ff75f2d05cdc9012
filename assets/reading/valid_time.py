"""Reads a dataset over time: all entries with the interval in which each was valid, or those of one
moment.

This is *valid time*, which entries or versions state. What was committed and served at a time is
another question, which `open_dataset(…, as_of=…)` answers.

Each version of a bounded dataset is valid from the time that it states until the next one; of
several with the same time, the one sealed last counts. Their files are read as one bucketed table
with a generation for each version, which gives the interval. A key that a version lacks has no row
while that version is valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from dagster_adjunct.assets.reading import version_reader
from dagster_adjunct.assets.reading.interval_ids import INTERVAL_ID, interval_id_sql, interval_ids
from dagster_adjunct.assets.reading.key_lookup import FileCache
from dagster_adjunct.assets.reading.superseded import (
    key_codes,
    number_values,
    read_stored_rows,
    sortable_positions,
)
from dagster_adjunct.assets.reading.version_reader import Validity, VersionReader
from dagster_adjunct.assets.versions.version import (
    POSITION,
    TOMBSTONE,
    SealedVersion,
    datetime_from_micros,
)
from dagster_adjunct.resources.bucketing.files import (
    GENERATION_COLUMN,
    IS_FIRST,
    KEYS,
    VALID_FROM,
    VALID_TO,
    bucketed_frame,
)
from dagster_adjunct.resources.errors import ConfigurationError, DatasetError
from dagster_adjunct.resources.lazy_modules import F, np, pa, pc
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.schemas.equality import comparable_sql, differing_values
from dagster_adjunct.resources.schemas.evolution import is_widening
from dagster_adjunct.resources.schemas.paths import read_path
from dagster_adjunct.resources.schemas.schema import Schema, named_columns, quote_name
from dagster_adjunct.resources.schemas.types import arrow_type
from dagster_adjunct.resources.spark.in_process import resolve_session
from dagster_adjunct.resources.spark.tasks import translate_spark_errors
from dagster_adjunct.resources.times import fits_utc, to_microseconds
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class Span:
    """A version and the interval [start, end) in which it is valid; the newest one has no end."""

    version: SealedVersion
    start: datetime
    end: datetime | None


class VersionsOverTime:
    """Reads versions of one bounded dataset over time. Raises DatasetError where they can't be read
    as one table.

    `sealed` are the versions, in any order. Entries have the columns of the version that was sealed
    last, with null where an earlier version lacks one.
    """

    def __init__(self, store: ObjectStore, dataset: str, sealed: Sequence[SealedVersion]) -> None:
        self.store = store
        self.dataset = dataset
        spans = version_spans(sealed)
        self._cache = FileCache()
        if not spans:
            raise _no_times_error(dataset)
        newest = max([span.version for span in spans], key=attrgetter("number"))
        columns = newest.named_columns
        for span in spans:
            _require_readable_as(dataset, span.version.named_as(columns), newest)
        self.spans = tuple(replace(span, version=span.version.read_as(columns)) for span in spans)
        # The version that was sealed last, whose columns, key and buckets are used.
        self.sealed = newest
        self.version = newest.id
        self.schema = newest.columns
        self.layout = replace(newest.layout, projected=True)
        self.versions = tuple(span.version.id for span in self.spans)
        """The ids of the versions, ordered by the start of their validity."""
        self.edge = to_microseconds(self.spans[0].start)
        """The start of the oldest version's validity, in microseconds since the epoch; before it
        nothing is known.
        """
        generations = []
        for number, span in enumerate(self.spans, 1):
            generations.append(replace(span.version.generations[0], id=number))
        self.generations = tuple(generations)
        """The generation of each version, numbered from 1 in time order."""

    def __repr__(self) -> str:
        return f"VersionsOverTime({self.dataset!r}, {len(self.spans)} versions)"

    def at(self, moment: datetime) -> VersionReader | None:
        """Return a reader of the version that was valid at a moment; None before the oldest one."""
        valid = next((span for span in reversed(self.spans) if span.start <= moment), None)
        if valid is None:
            return None
        return VersionReader(self.store, self.dataset, valid.version)

    def history_of(self, key: object) -> list[Validity]:
        """Return the entries of a key over time, oldest first; `entry` is None where a version
        lacks the key.

        Adjacent intervals with equal entries are merged. Raises what `VersionReader.get` raises.
        """
        parts: list[Validity] = []
        for span in self.spans:
            held = VersionReader(self.store, self.dataset, span.version, self._cache).get(key)
            if held is not None or parts:
                parts.append(Validity(span.start, span.end, held))
        return list(version_reader.merge_equal_neighbours(parts, self.sealed))

    @translate_spark_errors()
    def history_frame(self, spark: SparkSession | Callable[[], SparkSession]) -> DataFrame:
        """Return the rows of all versions, each with the interval in which its version is valid.

        One bucketed scan, with the columns of `schema`, `__valid_from`, `__valid_to` (null: open),
        `__first` (of the oldest version) and `__tombstone` (false). Raises ManifestMismatchError as
        `VersionReader.frame` does.
        """
        what = f"dataset {self.dataset!r}, all versions"
        session = resolve_session(spark)
        rows = bucketed_frame(session, self.store, what, self.layout, self.generations)
        starts = []
        ends = []
        for span in self.spans:
            starts.append(F.lit(to_microseconds(span.start)))
            end = None
            if span.end is not None:
                end = to_microseconds(span.end)
            ends.append(F.lit(end).cast("bigint"))
        number = F.col(GENERATION_COLUMN)
        return rows.select(
            *named_columns(self.schema.names),
            F.timestamp_micros(F.element_at(F.array(*starts), number)).alias(VALID_FROM),
            F.timestamp_micros(F.element_at(F.array(*ends), number)).alias(VALID_TO),
            (number == 1).alias(IS_FIRST),
            F.lit(False).alias(TOMBSTONE),
        )


def _no_times_error(dataset: str) -> DatasetError:
    """Return the error for a dataset of which no sealed version states since when it is valid."""
    return DatasetError(
        f"dataset {dataset!r} has no sealed version that states since when it is valid.",
        'Declare valid_from="name", "marker" or a pattern, unless that is done: it applies to'
        f" versions sealed from then on. Then {give_times(dataset)}. Why versions were rejected:"
        f" adjunct dataset versions {dataset}.",
        dataset=dataset,
    )


def give_times(dataset: str) -> str:
    """Return what to do about versions that were sealed before `valid_from` was declared."""
    return (
        f"deliver another version; or delete the dataset (adjunct dataset delete {dataset}"
        " --reason …) and advance it, which builds all versions again that its input still has"
    )


def version_spans(sealed: Iterable[SealedVersion]) -> tuple[Span, ...]:
    """Return the versions that state a time, sorted by it; of several with the same time, the
    one sealed last.
    """
    by_time: dict[datetime, SealedVersion] = {}
    for version in sorted(sealed, key=attrgetter("number")):
        if version.valid_from is not None:
            by_time[version.valid_from] = version
    found = []
    for start, end in pairwise([*sorted(by_time), None]):
        if start is not None:  # always: only the last end is None
            found.append(Span(by_time[start], start, end))
    return tuple(found)


def _require_readable_as(dataset: str, old: SealedVersion, newest: SealedVersion) -> None:
    """Raise DatasetError if `old` has other partitions, another key or an incompatible column
    than `newest`.
    """
    what = (
        f"dataset {dataset!r}: version {old.id} can't be read over time with {newest.id}, which was"
        " sealed last: "
    )
    if old.partitions != newest.partitions:
        counts = " and ".join(str(version.partitions or "one copy") for version in (old, newest))
        raise DatasetError(
            f"{what}they have different partitions ({counts}).",
            f"Repartition all to one number: adjunct dataset repartition {dataset} --partitions N"
            " --reason ….",
            dataset=dataset,
            version=old.id,
        )
    old_key_types = old.columns.select(old.key).types
    newest_key_types = newest.columns.select(newest.key).types
    old_key = (old.key, old.partition_by, old_key_types)
    if old_key != (newest.key, newest.partition_by, newest_key_types):
        raise DatasetError(
            f"{what}they have different keys.",
            f"{_discard_older(dataset)}, or declare the dataset under a new name.",
            dataset=dataset,
            version=old.id,
        )
    newest_types = newest.columns.types
    for field in old.columns.fields:
        if field.name in newest_types and not is_widening(field.type, newest_types[field.name]):
            raise DatasetError(
                f"{what}its column {field.name!r} is {field.type}, and"
                f" {newest_types[field.name]} there.",
                f"{_discard_older(dataset)}, or give the column a new name.",
                dataset=dataset,
                version=old.id,
            )


def _discard_older(dataset: str) -> str:
    """Return how to discard all versions but the one that is served, which the declared policy may
    keep.
    """
    command = f"adjunct dataset expire {dataset} --keep 1 --grace 0s"
    return f"Discard the older versions ({command}; --dry-run lists them)"


Reader = VersionReader | VersionsOverTime
BEGIN = "__interval_from"
"""The column with the begin of the interval that a row over time is in."""


@translate_spark_errors()
def frame_over_time(
    reader: Reader, spark: SparkSession | Callable[[], SparkSession], *, with_ids: bool = False
) -> DataFrame:
    """Return all rows over time, deletions included, as a frame.

    They have the columns of entries, `__valid_from`, `__valid_to` (null: open), `__first` (nothing
    is known of the key before it) and `__tombstone`. `with_ids` adds `interval_id`, unless entries
    have a column of this name. Raises what `history_frame` raises.
    """
    rows = reader.history_frame(spark)
    if with_ids and INTERVAL_ID not in reader.schema:
        rows = _add_interval_ids(reader, rows)
    pruned = _pruned(reader)
    if pruned is None:
        return rows
    # Rows that end by then are anchors, which only tell since when the interval of the next row has
    # lasted. Of a key with a row that began by then, nothing is known before that row.
    pruned_to = F.timestamp_micros(F.lit(pruned))
    is_first = F.col(IS_FIRST) | (F.col(VALID_FROM) <= pruned_to)
    is_no_anchor = F.col(VALID_TO).isNull() | (F.col(VALID_TO) > pruned_to)
    return rows.where(is_no_anchor).withColumn(IS_FIRST, is_first)


def _add_interval_ids(reader: Reader, rows: DataFrame) -> DataFrame:
    """Return all rows over time, each with the id of its interval."""
    if not reader.sealed.partition_by:
        rows = rows.coalesce(1)
    identity = interval_id_sql(reader.schema, reader.sealed.key, BEGIN, quote_name)
    names = ", ".join(map(quote_name, rows.columns))

    def query(view: str) -> str:
        runs = _runs_sql(reader, view, quote_name, comparable_sql)
        return f"WITH {runs} SELECT {names}, {identity} AS {INTERVAL_ID} FROM runs"

    return _query_rows(rows, query)


def read_rows_over_time(reader: Reader, *, with_ids: bool = False) -> pa.Table:
    """Return all rows over time, deletions included, as an Arrow table; the rows of a key are
    adjacent and sorted by time.

    Columns are those of `frame_over_time`. Raises DatasetError for a version without history, and
    ManifestMismatchError for damaged files.
    """
    rows = _read_all_rows(reader)
    if with_ids and INTERVAL_ID not in reader.schema:
        ids = interval_ids(rows, reader.sealed.key, _interval_begins(reader, rows))
        rows = rows.append_column(INTERVAL_ID, ids)
    pruned = _pruned(reader)
    if pruned is None:
        return rows
    # As in `frame_over_time`.
    ends = rows.column(VALID_TO)
    is_no_anchor = pc.or_kleene(pc.is_null(ends), pc.greater(ends.cast("int64"), pruned))
    has_begun = pc.less_equal(rows.column(VALID_FROM).cast("int64"), pruned)
    index = rows.schema.get_field_index(IS_FIRST)
    rows = rows.set_column(index, IS_FIRST, pc.or_(rows.column(IS_FIRST), has_begun))
    return rows.filter(is_no_anchor)


def _pruned(reader: Reader) -> int | None:
    """Return the time up to which rows were pruned, in microseconds; None if none were."""
    if not isinstance(reader, VersionReader) or reader.sealed.history is None:
        return None
    return reader.sealed.history.pruned


def _interval_begins(reader: Reader, rows: pa.Table) -> Any:
    """Return when the interval of each row begins, in microseconds (numpy); the rows of a key are
    adjacent.
    """
    begins = _micros(rows, VALID_FROM)
    ends = pc.fill_null(rows.column(VALID_TO).cast("int64"), -1).to_numpy()
    deleted = rows.column(TOMBSTONE).to_numpy()
    # Whether a row and the next one are in the same interval.
    continues = _same_as_next(_key_numbers(rows, reader.sealed.key))[:-1]
    continues &= ends[:-1] == begins[1:]
    continues &= ~deleted[:-1] & ~deleted[1:]
    for path in reader.sealed.compared:
        values = read_path(rows, path.steps).combine_chunks()
        continues &= ~differing_values(values[:-1], values[1:])
    is_start = np.append([True], ~continues)
    starts = np.where(is_start, np.arange(len(begins)), 0)
    return begins[np.maximum.accumulate(starts)]


def _read_all_rows(reader: Reader) -> pa.Table:
    """Return all rows over time, anchors included; those of a key are adjacent and sorted by
    time.
    """
    if not isinstance(reader, VersionReader):
        rows = pa.concat_tables([_rows_of_span(reader, span) for span in reader.spans])
        numbers = _key_numbers(rows, reader.sealed.key)
        return rows.take(np.lexsort((_micros(rows, VALID_FROM), numbers)))
    if reader.sealed.history is None:
        raise version_reader.no_history_error(reader.dataset)
    rows, generations = read_stored_rows(reader.store, reader.dataset, reader.sealed)
    numbers = _key_numbers(rows, reader.sealed.key)
    begins = _micros(rows, VALID_FROM)
    positions = sortable_positions(rows.column(POSITION))
    order = np.lexsort((generations, positions, begins, numbers))  # the last one counts most
    numbers = numbers[order]
    begins = begins[order]
    newest = ~_same_as_next(numbers, begins)  # of the rows of a key and time
    rows = rows.take(order[newest])
    numbers = numbers[newest]
    begins = begins[newest]
    # A row ends where the next one of its key begins.
    has_next = _same_as_next(numbers)
    ends = pa.array(np.roll(begins, -1), pa.int64(), mask=~has_next)
    has_previous = np.roll(has_next, 1)  # the last row has no next one, so the first gets False
    entries = rows.select([*reader.schema.names, VALID_FROM, TOMBSTONE])
    entries = entries.append_column(VALID_TO, ends.cast(arrow_type("timestamp")))
    return entries.append_column(IS_FIRST, pa.array(~has_previous))


def _rows_of_span(reader: VersionsOverTime, span: Span) -> pa.Table:
    """Return the entries of a span's version with the reader's columns, and the span."""
    rows = read_stored_rows(reader.store, reader.dataset, span.version).rows
    values = {
        VALID_FROM: pa.scalar(span.start, arrow_type("timestamp")),
        TOMBSTONE: pa.scalar(False),
        VALID_TO: pa.scalar(span.end, arrow_type("timestamp")),
        IS_FIRST: pa.scalar(span is reader.spans[0]),
    }
    for name, value in values.items():
        rows = rows.append_column(name, pa.repeat(value, rows.num_rows))
    return rows


def _key_numbers(rows: pa.Table, key: tuple[str, ...]) -> Any:
    """Return a number for each row, equal where the keys are (numpy)."""
    return number_values(key_codes(rows.select(key).columns)).numbers


def _same_as_next(*columns: Any) -> Any:
    """Return for each row whether the next one has the same values (numpy); the last row has no
    next one.
    """
    same = np.zeros(len(columns[0]), np.bool_)
    same[:-1] = np.logical_and.reduce([column[1:] == column[:-1] for column in columns])
    return same


def _micros(rows: pa.Table, name: str) -> Any:
    """Return the times in a column, in microseconds (numpy)."""
    return rows.column(name).cast("int64").to_numpy()


@dataclass(frozen=True, slots=True)
class _Entries:
    """Entries of a dataset with history. `reader` reads the version that has it, or the versions
    that make it up.
    """

    reader: Reader

    def __post_init__(self) -> None:
        if isinstance(self.reader, VersionReader) and self.reader.sealed.history is None:
            raise version_reader.no_history_error(self.reader.dataset)

    @property
    def dataset(self) -> str:
        """The dataset's name."""
        return self.reader.dataset

    @property
    def store(self) -> ObjectStore:
        """The store of the files."""
        return self.reader.store

    @property
    def read(self) -> Reader:
        """The version or versions whose files are read."""
        return self.reader

    @property
    def version(self) -> str:
        """The id of the version that is read; of several, the id of the one sealed last."""
        return self.read.version

    @property
    def schema(self) -> Schema:
        """The columns of the entries. The time columns that the frame may have after these are
        not among them.
        """
        return self.read.schema


@validated
@dataclass(frozen=True, slots=True)
class EntriesOverTime(_Entries):
    """All entries of a dataset over time (slowly changing dimension, type 2): one row for each
    interval of a key.

    Rows have the entry's columns, `valid_from`, `valid_to` (excluded; null: valid now) and
    `is_current`. Deletions are gaps, and adjacent intervals of a key with equal entries are merged;
    with `history_columns` those with equal values of these, and the other columns have the values
    of the interval's end. Intervals that ended before the history begins are left out. With
    `interval_id`, rows have the id of their interval in a column of this name.
    """

    interval_id: bool = False

    @property
    def id_column(self) -> str:
        """The name of the column with the id of the interval."""
        names = time_column_names(self.reader, interval_id=True)
        if names.valid_to.startswith("__"):
            return f"__{INTERVAL_ID}"
        return INTERVAL_ID

    @translate_spark_errors()
    def frame(self, spark: SparkSession | Callable[[], SparkSession]) -> DataFrame:
        """Return the rows as a DataFrame in which each bucket is sorted by key and time.

        For a partitioned dataset it needs no exchange.
        """
        rows = self.reader.history_frame(resolve_session(spark))
        if not self.reader.sealed.partition_by:
            rows = rows.coalesce(1)
        edge = f"timestamp_micros({history_edge(self.reader)})"

        def query(view: str) -> str:
            return intervals_sql(self, view, quote_name, edge, comparable_sql)

        return _query_rows(rows, query)


def _query_rows(rows: DataFrame, query: Callable[[str], str]) -> DataFrame:
    """Return the result of a query, which gets the name of a view of the rows."""
    view = f"__rows_{uuid4().hex}"
    rows.createTempView(view)
    try:
        return rows.sparkSession.sql(query(view))
    finally:
        rows.sparkSession.catalog.dropTempView(view)


def intervals_sql(
    entries: EntriesOverTime,
    rows: str,
    quote: Callable[[str], str],
    edge: str,
    comparable: Callable[[str, str], str] | None = None,
) -> str:
    """Return the query of all entries over time, in which adjacent equal ones of a key are merged:
    for Spark with `comparable`, else for DuckDB.

    `rows` is the name of a table or view of all rows with their intervals; `quote` quotes a column.
    `comparable` returns the SQL of what is compared of a value, given its SQL and its type.
    `edge` is the result of `history_edge` as a literal: intervals that ended before it are left
    out, also if no compaction has dropped them yet. Each interval is one row, that with which it
    begins; its end, and the columns that have the values of its end, are those of its last row.
    """
    reader = entries.reader
    key = ", ".join(map(quote, reader.sealed.key))
    rest_of_interval = (
        f"(PARTITION BY {key}, __run ORDER BY {VALID_FROM} ROWS BETWEEN CURRENT ROW AND UNBOUNDED"
        " FOLLOWING)"
    )
    latest = set(reader.sealed.latest_columns)
    end_columns = [f"last_value({VALID_TO}) OVER {rest_of_interval} AS __until"]
    columns = []
    for index, name in enumerate(reader.schema.names):
        if name in latest:
            end_columns.append(
                f"last_value({quote(name)}) OVER {rest_of_interval} AS __latest_{index}"
            )
            columns.append(f"__latest_{index} AS {quote(name)}")
        else:
            columns.append(quote(name))
    within_history = ""
    if history_edge(reader) is not None:
        within_history = f" AND (__until IS NULL OR __until > {edge})"
    names = time_column_names(reader, interval_id=entries.interval_id)
    if names.valid_from is not None:
        columns.append(f"{VALID_FROM} AS {names.valid_from}")
    columns.append(f"__until AS {names.valid_to}")
    columns.append(f"__until IS NULL AS {names.is_current}")
    if entries.interval_id:
        identity = interval_id_sql(
            reader.schema, reader.sealed.key, VALID_FROM, quote, duckdb=comparable is None
        )
        columns.append(f"{identity} AS {entries.id_column}")
    runs = _runs_sql(reader, rows, quote, comparable or _compare_as_it_is)
    return (
        f"WITH {runs}, ended AS (SELECT *, {', '.join(end_columns)} FROM runs) SELECT"
        f" {', '.join(columns)} FROM ended WHERE __starts AND NOT {TOMBSTONE}{within_history}"
    )


def _compare_as_it_is(value: str, kind: str) -> str:
    """Return the SQL of a value: DuckDB compares all types."""
    return value


def _runs_sql(
    reader: Reader, rows: str, quote: Callable[[str], str], comparable: Callable[[str, str], str]
) -> str:
    """Return the beginning of a query, `runs`: the rows over time, each with whether its interval
    begins with it (`__starts`), the number of the interval among those of its key (`__run`), and
    its begin.
    """
    key = ", ".join(map(quote, reader.sealed.key))
    in_time = f"(PARTITION BY {key} ORDER BY {VALID_FROM})"
    same = [f"coalesce(lag({VALID_TO}) OVER {in_time} = {VALID_FROM}, false)"]
    same += [f"NOT {TOMBSTONE}", f"NOT lag({TOMBSTONE}, 1, true) OVER {in_time}"]
    for path in reader.sealed.compared:
        value = comparable(".".join(map(quote, path.steps)), path.type)
        same.append(f"lag({value}) OVER {in_time} IS NOT DISTINCT FROM {value}")
    begin = f"max(CASE WHEN __starts THEN {VALID_FROM} END) OVER {in_time}"
    return (
        f"marked AS (SELECT *, NOT ({' AND '.join(same)}) AS __starts FROM {rows}), runs AS (SELECT"
        f" *, sum(CAST(__starts AS INT)) OVER {in_time} AS __run, {begin} AS {BEGIN} FROM marked)"
    )


@validated
@dataclass(frozen=True, slots=True)
class EntriesAt(_Entries):
    """The entries of a dataset that were valid at a moment; raises DatasetError for one before
    its history begins.
    """

    moment: datetime

    def __post_init__(self) -> None:
        _Entries.__post_init__(self)
        validate_moment(self.reader, self.moment)

    @property
    def read(self) -> VersionReader:
        """The version whose files are read."""
        if isinstance(self.reader, VersionReader):
            return self.reader
        valid = self.reader.at(self.moment)
        assert valid is not None, "the moment was checked"
        return valid

    @translate_spark_errors()
    def frame(self, spark: SparkSession | Callable[[], SparkSession]) -> DataFrame:
        """Return the entries as a DataFrame with the columns of `schema`: a bucketed scan, as
        `Dataset.frame` is.
        """
        if isinstance(self.reader, VersionsOverTime):
            return self.read.frame(spark)
        return self.reader.frame_at(spark, F.timestamp_micros(F.lit(to_microseconds(self.moment))))


def validate_moment(reader: Reader, moment: datetime) -> None:
    """Raise DatasetError for a time before the history begins.

    Raises ConfigurationError for a value that is no time with a zone, or not of the years 1 to 9999
    in UTC.
    """
    has_zone = isinstance(moment, datetime) and moment.tzinfo is not None
    if not has_zone or not fits_utc(moment):
        raise ConfigurationError(
            f"dataset {reader.dataset!r}: argument 'moment' is {moment!r}, expected a time with its"
            " zone, of the years 1 to 9999 in UTC.",
            "Give a datetime with its zone, such as tzinfo=UTC.",
            argument="moment",
            dataset=reader.dataset,
        )
    edge = history_edge(reader)
    asked = to_microseconds(moment)
    if edge is not None and asked < edge:
        since = datetime_from_micros(edge)
        raise DatasetError(
            f"dataset {reader.dataset!r}: it is not known what was valid at"
            f" {moment.astimezone(UTC)}, before its history begins at {since.astimezone(UTC)}.",
            "Declare a longer history to keep more: history=…, or discard=DiscardPolicy(keep=…) for"
            " versions.",
            dataset=reader.dataset,
        )


def history_edge(reader: Reader) -> int | None:
    """Return the time from which the history is complete, its *edge*, in microseconds since the
    epoch; None: always.
    """
    if isinstance(reader, VersionsOverTime):
        return reader.edge
    return reader.sealed.edge


@dataclass(frozen=True, slots=True)
class TimeBins:
    """Intervals of time of equal length, to find rows of keys that have many: `count` intervals
    of `width` from `start` on, in microseconds. What is before and after is in the first and the
    last one.
    """

    start: int
    width: int
    count: int

    def number_of(self, time: Column) -> Column:
        """Return the number of the interval of a time; numbers are in the order of times."""
        passed = F.floor((F.unix_micros(time) - F.lit(self.start)) / F.lit(self.width))
        return F.greatest(F.lit(0), F.least(F.lit(self.count), passed)).cast("int")

    def overlapping(self, start: Column, end: Column, begins: Column | None = None) -> Column:
        """Return an array with the numbers of all intervals from `start` up to `end` (null: open).
        Where `begins` is not null, it goes from the first interval on instead.
        """
        first = self.number_of(start)
        if begins is not None:
            first = F.when(begins.isNull(), first).otherwise(0)
        last = F.when(end.isNull(), self.count).otherwise(self.number_of(end))
        return F.sequence(first, last)


def choose_time_bins(reader: Reader) -> TimeBins | None:
    """Return as many intervals as a key has rows on average, so that rows of a key are spread over
    them; None where keys have few rows, or it is not known how many.

    All rows together overlap at most four times as many intervals as there are rows.
    """
    if isinstance(reader, VersionsOverTime):  # a key has a row for each version
        starts = [to_microseconds(span.start) for span in reader.spans]
        return _time_bins(len(starts), starts[0], starts[-1])
    rows = 0
    keys = 0
    ranges: list[int] = []
    for generation in reader.sealed.generations:
        for file in generation.files:
            rows += file.rows
            keys += file.stats.get(KEYS, file.rows)
            ranges += file.stats.get("range", ())
    if not keys or not ranges:
        return None
    return _time_bins(rows // keys, min(ranges), max(ranges))


_MANY_ROWS = 64
"""How many rows a key has at least where intervals of time are worth their cost."""


def _time_bins(rows: int, start: int, end: int) -> TimeBins | None:
    """Return as many intervals as a key has rows, from `start` to `end`; None if these are few."""
    if rows < _MANY_ROWS:
        return None
    return TimeBins(start, (end - start) // rows + 1, rows)


class TimeColumnNames(NamedTuple):
    """The names of the columns with the start and the end of an interval, and whether it is the
    current one. `valid_from` is None where entries have such a column themselves.
    """

    valid_from: str | None
    valid_to: str
    is_current: str


def time_column_names(reader: Reader, *, interval_id: bool = False) -> TimeColumnNames:
    """Return the names of the time columns of entries over time.

    Where entries have another column with one of these names, or `interval_id` where that is shown,
    too, all of them begin with `__`.
    """
    if _valid_from_column(reader) == "valid_from":
        names = TimeColumnNames(None, "valid_to", "is_current")
    else:
        names = TimeColumnNames("valid_from", "valid_to", "is_current")
    shown = {*names}
    if interval_id:
        shown.add(INTERVAL_ID)
    if any(name.lower() in shown for name in reader.schema.names):
        return TimeColumnNames("__valid_from", "__valid_to", "__is_current")
    return names


def _valid_from_column(reader: Reader) -> str | None:
    """Return the entries' column with the start of their validity; None where their record or
    version states it.
    """
    if not isinstance(reader, VersionReader) or reader.sealed.history is None:
        return None
    return reader.sealed.history.valid_from
