"""Training sets: records with the entries that were valid at their times, in one call.

Records are an Arrow table, a pandas or Polars frame, or a Spark frame. All of them stay, in their
order (Spark has none), each with the columns of at most one entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from dagster_adjunct.assets.reading.interval_ids import INTERVAL_ID, add_interval_id
from dagster_adjunct.assets.reading.keyed_entries import TimedEntries
from dagster_adjunct.assets.reading.served_over_time import ServedOverTime
from dagster_adjunct.assets.reading.valid_time import (
    Reader,
    choose_time_bins,
    frame_over_time,
    history_edge,
    read_rows_over_time,
)
from dagster_adjunct.assets.reading.version_reader import VersionReader, no_history_error
from dagster_adjunct.assets.versions.version import TOMBSTONE, datetime_from_micros
from dagster_adjunct.resources.bucketing.files import IS_FIRST, VALID_FROM, VALID_TO
from dagster_adjunct.resources.errors import ConfigurationError, DatasetError, SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import F, np, pa, pc
from dagster_adjunct.resources.schemas.evolution import is_widening
from dagster_adjunct.resources.schemas.paths import (
    NamedPath,
    find_path,
    read_named_path,
    read_path,
    read_values,
    steps_among,
)
from dagster_adjunct.resources.schemas.records import fit_to_schema, to_arrow_table
from dagster_adjunct.resources.schemas.schema import Field, Schema, named_column
from dagster_adjunct.resources.schemas.types import INTEGER_BITS, arrow_type, types_from_spark

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

BeforeHistory = Literal["null", "error"]
Known = Literal["now", "known-then"]
"""Whether entries are those that are known now, or those that were served at the record's time."""
_TIMES = ("timestamp", "date")
_BIN = "__bin"


@dataclass(frozen=True, slots=True)
class PointInTime:
    """How records are joined with a dataset over time.

    `on` has pairs (record column or path, key column) in the order of the key. `chosen` are the
    columns of entries to add. An entry that is older than `max_age` at the record's time counts as
    none. With before_history="error", a record from before what is known of its key is an error, as
    it is in an as-of join (`TimedEntries.find`).
    """

    reader: Reader | ServedOverTime
    on: tuple[tuple[str, str], ...]
    as_of: str
    chosen: tuple[NamedPath, ...]
    max_age: timedelta | None
    before_history: BeforeHistory

    @classmethod
    def of(
        cls,
        reader: Reader | ServedOverTime,
        on: str | Sequence[str] | Mapping[str, str],
        as_of: str,
        select: Sequence[str] | None,
        max_age: timedelta | None,
        before_history: BeforeHistory,
    ) -> PointInTime:
        """Return the join with these arguments. `select` None adds all columns but the key.

        Raises ConfigurationError for arguments that contradict the dataset or each other,
        SchemaMismatchError for a column that it does not have, and DatasetError for one without
        history.
        """
        if isinstance(reader, VersionReader) and reader.sealed.history is None:
            raise no_history_error(reader.dataset)
        if max_age is not None and max_age <= timedelta(0):
            raise ConfigurationError(
                f"dataset {reader.dataset!r}: max_age is {max_age}: expected a time above 0.",
                "Leave it out if entries never get too old.",
                argument="max_age",
                dataset=reader.dataset,
            )
        names = reader.schema.names
        key = reader.sealed.key
        if select is None:
            select = [name for name in names if name not in key]
        chosen = tuple(read_named_path(text, names) for text in select)
        known = reader.schema
        if not isinstance(reader, ServedOverTime):
            known = add_interval_id(known)
        elif any(column.steps == (INTERVAL_ID,) for column in chosen) and INTERVAL_ID not in names:
            raise ConfigurationError(
                f"dataset {reader.dataset!r}: select has {INTERVAL_ID!r}, and versions is"
                " 'known-then': what was served has no intervals.",
                f'Leave {INTERVAL_ID!r} out, or join what is known now: versions="now".',
                argument="select",
                dataset=reader.dataset,
            )
        for column in chosen:
            known.field(column.steps[0], f"dataset {reader.dataset!r}")
        return cls(
            reader, _pair_key(reader.dataset, key, on), as_of, chosen, max_age, before_history
        )

    @property
    def _with_ids(self) -> bool:
        """Whether `interval_id` is among the columns to add: the id of an entry's interval, unless
        entries have a column of that name.
        """
        return any(column.steps == (INTERVAL_ID,) for column in self.chosen)

    @property
    def _what(self) -> str:
        return f"records to be joined with dataset {self.reader.dataset!r}"

    @property
    def _max_age(self) -> int | None:
        """The most microseconds since an entry became valid."""
        if self.max_age is None:
            return None
        return self.max_age // timedelta(microseconds=1)

    def _check(self, types: Mapping[str, str]) -> None:
        """Raise SchemaMismatchError unless records with columns of these types can be joined: the
        key fits, the time is one, and no added column has the name of another.
        """
        for name, entry in self.on:
            type_ = self._require(types, name, "on")
            kind = self.reader.schema.field(entry).type
            if not is_widening(type_, _compared_type(kind)):
                raise SchemaMismatchError(
                    f"{self._what}: column {name!r} is {type_}, and the key {entry!r} is {kind}.",
                    "Cast the column to the type of the key.",
                    column=name,
                )
        type_ = self._require(types, self.as_of, "as_of")
        if type_ not in _TIMES:
            raise SchemaMismatchError(
                f"{self._what}: column {self.as_of!r} is {type_}: expected a timestamp with a time"
                " zone, or a date.",
                "Convert it, as in pandas df[name].dt.tz_localize('UTC').",
                column=self.as_of,
            )
        names_taken = {name.lower() for name in types}
        for column in self.chosen:
            if column.name.lower() in names_taken:
                raise SchemaMismatchError(
                    f"{self._what} have a column {column.name!r} already, or two would get this"
                    " name.",
                    f'Give one another name: select=["{column.name} as other_name"].',
                    column=column.name,
                )
            names_taken.add(column.name.lower())

    def _require(self, types: Mapping[str, str], name: str, argument: str) -> str:
        """Return the type of a column of the records, or of the value that a path leads to. Raises
        SchemaMismatchError, which names the `argument`, if there is none.
        """
        if name in types:
            return types[name]
        path = find_path(name, types)
        if path is None:
            raise SchemaMismatchError(
                f"{self._what}: {argument} names {name!r}, and they have {', '.join(types)}.",
                "Correct the name, or the path of a value in a struct (customer.id).",
                column=name,
                argument=argument,
            )
        return path.type

    @property
    def _edge(self) -> int | None:
        """The time before which it is not known what was valid, or served, in microseconds; None
        if nothing was dropped.
        """
        if isinstance(self.reader, ServedOverTime):
            return self.reader.known_from
        if isinstance(self.reader, VersionReader) and self.reader.sealed.history is not None:
            return self.reader.sealed.history.pruned
        return history_edge(self.reader)

    # -- in this process

    def join_table(self, records: pa.Table) -> pa.Table:
        """Return the records with the columns of their entries, in the same order."""
        self._check(Schema.from_arrow(records.schema).types)
        schema = self.reader.schema
        if isinstance(self.reader, ServedOverTime):
            rows = self.reader.rows()
        else:
            rows = read_rows_over_time(self.reader, with_ids=self._with_ids)
            if self._with_ids:
                schema = add_interval_id(schema)
        fields = []
        for name, entry in self.on:
            kind = _compared_type(self.reader.schema.field(entry).type)
            fields.append(Field(name, kind))
            index = rows.schema.get_field_index(entry)
            rows = rows.set_column(index, entry, rows.column(entry).cast(arrow_type(kind)))
        key_values = {name: read_values(records, name) for name, _ in self.on}
        keys = fit_to_schema(pa.table(key_values), Schema(tuple(fields)), self._what)
        times = read_values(records, self.as_of).cast(arrow_type("timestamp")).cast(pa.int64())
        names = tuple(entry for _, entry in self.on)
        timed = TimedEntries.of(rows, schema, names, self._edge)
        found = timed.find(keys.columns, times.to_pylist(), oldest=False)
        if self.before_history == "error":
            self._require_no_early(times.filter(found.is_early))
        entry_rows = self._without_old(found.rows, times, timed.begins)
        for column in self.chosen:
            entries = timed.entries.select([column.steps[0]]).take(entry_rows)
            records = records.append_column(column.name, read_path(entries, column.steps))
        return records

    def _without_old(
        self, entry_rows: pa.Array, times: pa.ChunkedArray, begins: Sequence[int]
    ) -> pa.Array:
        """Return the row of each record's entry, null where it became valid too long before the
        record's time. `begins` are the times since when rows are valid.
        """
        if self._max_age is None:
            return entry_rows
        began = pa.array(np.asarray(begins, np.int64)).take(entry_rows)
        is_old = pc.greater(pc.subtract(times.combine_chunks(), began), self._max_age)
        return pc.if_else(pc.fill_null(is_old, False), pa.scalar(None, pa.int64()), entry_rows)

    def _require_no_early(self, times: pa.ChunkedArray) -> None:
        """Raise DatasetError if there are times from before the history."""
        if len(times):
            raise self._early_error(f" at {datetime_from_micros(times[0].as_py())}")

    def _early_error(self, at: str) -> DatasetError:
        """Return the error for a record from before the history; `at` is its time, in words."""
        since = ""
        if self._edge is not None:
            since = f", known from {datetime_from_micros(self._edge)} on"
        return DatasetError(
            f"dataset {self.reader.dataset!r}: a record{at} is from before the history of its"
            f" key{since}.",
            'Leave such records out, or accept them without an entry: before_history="null".',
            dataset=self.reader.dataset,
        )

    # -- with Spark

    def join_frame(self, records: DataFrame) -> DataFrame:
        """Return the records with the columns of their entries."""
        self._check(types_from_spark(records.schema))
        if isinstance(self.reader, ServedOverTime):
            rows = self.reader.frame(records.sparkSession)
        else:
            rows = frame_over_time(self.reader, records.sparkSession, with_ids=self._with_ids)
        if self.before_history == "null":  # else deletions tell that the key is known
            rows = rows.where(~F.col(TOMBSTONE))
        side = self._select_side(rows)
        bins = None if isinstance(self.reader, ServedOverTime) else choose_time_bins(self.reader)
        if bins is not None:
            # The first row of a key is also matched with records from before it.
            begins = F.when(F.col(IS_FIRST), F.col(VALID_FROM))
            numbers = bins.overlapping(F.col(VALID_FROM), F.col(VALID_TO), begins)
            side = side.withColumn(_BIN, F.explode(numbers))
        at = _value_in(records, self.as_of).cast("timestamp")
        is_valid = (at >= side[VALID_FROM]) & (side[VALID_TO].isNull() | (at < side[VALID_TO]))
        if self._max_age is not None:
            age = F.unix_micros(at) - F.unix_micros(side[VALID_FROM])
            is_valid = is_valid & (age <= F.lit(self._max_age))
        if self.before_history == "error":
            is_valid = is_valid | (side[IS_FIRST] & (at < side[VALID_FROM]))
        for number, (name, _) in enumerate(self.on):
            is_valid = is_valid & (_value_in(records, name) == side[f"__key_{number}"])
        if bins is not None:
            is_valid = is_valid & (bins.number_of(at) == side[_BIN])
        joined = records.join(side, is_valid, "left")
        found = {column.name: side[_quoted(column.name)] for column in self.chosen}
        if self.before_history == "error":
            joined = joined.where(self._fail_if_early(records, side, at))
            for name, value in found.items():
                found[name] = F.when(~side[TOMBSTONE], value)
        return joined.select(
            *[records[_quoted(name)] for name in records.columns],
            *[value.alias(name) for name, value in found.items()],
        )

    def _select_side(self, rows: DataFrame) -> DataFrame:
        """Return the columns of the dataset's rows that the join needs."""
        columns = []
        for number, (_, entry) in enumerate(self.on):
            columns.append(named_column(entry).alias(f"__key_{number}"))
        for column in self.chosen:
            value = named_column(column.steps[0])
            for step in column.steps[1:]:
                value = value.getField(step)
            columns.append(value.alias(column.name))
        return rows.select(*columns, VALID_FROM, VALID_TO, IS_FIRST, TOMBSTONE)

    def _fail_if_early(self, records: DataFrame, side: DataFrame, at: Column) -> Column:
        """Return a condition that is true, and fails at records from before the history."""
        is_early = F.coalesce(at < side[VALID_FROM], F.lit(False))
        if self._edge is not None:
            is_unknown = at < F.timestamp_micros(F.lit(self._edge))
            for name, _ in self.on:
                is_unknown = is_unknown & _value_in(records, name).isNotNull()
            is_early = is_early | (side[TOMBSTONE].isNull() & F.coalesce(is_unknown, F.lit(False)))
        error = F.raise_error(F.lit(str(self._early_error("")))).cast("boolean")
        return F.when(is_early, error).otherwise(True)


def _compared_type(kind: str) -> str:
    """Return the type as which keys of this type are compared: integers by their values."""
    if kind in INTEGER_BITS:
        return "bigint"
    return kind


def _value_in(records: DataFrame, name: str) -> Column:
    """Return the column of this name, or the value that the name is the path of."""
    first, *steps = steps_among(name, records.columns)
    value = records[_quoted(first)]
    for step in steps:
        value = value.getField(step)
    return value


def _quoted(name: str) -> str:
    """Return a column's name as Spark takes it, with dots that are no steps of a path."""
    return f"`{name.replace('`', '``')}`"


def _pair_key(
    dataset: str, key: tuple[str, ...], on: str | Sequence[str] | Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """Return pairs (record column, key column), in the order of the key. Raises ConfigurationError
    unless `on` names each key column once.
    """
    if isinstance(on, str):
        on = (on,)
    if not isinstance(on, Mapping):
        on = {name: name for name in on}
    columns = {entry: name for name, entry in on.items()}
    if set(columns) != set(key) or len(columns) < len(on):
        raise ConfigurationError(
            f"dataset {dataset!r}: on={on!r} does not name each column of its key"
            f" ({', '.join(key)}) once.",
            "Write on={record column: key column}.",
            argument="on",
            dataset=dataset,
        )
    return tuple((columns[entry], entry) for entry in key)


def join_records(join: PointInTime, records: Any) -> Any:
    """Return the joined records: a Spark, pandas or Polars frame for one, else an Arrow table."""
    if hasattr(records, "mapInArrow"):  # a frame of Spark, classic or Connect
        return join.join_frame(records)
    table = to_arrow_table(records, join._what)
    if not table.num_columns:
        raise SchemaMismatchError(
            f"{join._what} have no columns: there are no rows that would have some.",
            "Give a table or frame, which has its columns also without rows.",
            argument="records",
        )
    joined = join.join_table(table)
    library = type(records).__module__.partition(".")[0]
    if library == "pandas":
        return joined.to_pandas()
    if library == "polars":
        import polars as pl

        return pl.from_arrow(joined)
    return joined
