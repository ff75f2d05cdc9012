"""How Spark reads, changes and counts the records of a batch, and how its tasks write them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain
from operator import or_
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from dagster_adjunct.orchestration.batch_log.batch_log import Counters
from dagster_adjunct.orchestration.operators.batch import SAMPLE_SIZE, Checked
from dagster_adjunct.orchestration.operators.calls import RecordCall
from dagster_adjunct.orchestration.operators.columns import (
    BRANCH,
    ORDINAL,
    ORIGIN,
    TASK,
    DataFrameFunction,
    keep_present,
    list_batch_columns,
    list_copies,
    ordinal_column,
    tie_breakers,
)
from dagster_adjunct.orchestration.operators.functions import call_in_tasks, no_elements_error
from dagster_adjunct.orchestration.operators.lookups import MATCHED, How, TableLookup
from dagster_adjunct.orchestration.operators.stream_facts import Columns
from dagster_adjunct.orchestration.operators.updates import Update
from dagster_adjunct.orchestration.step import lookups
from dagster_adjunct.orchestration.step.batch_outputs import (
    TIME_COUNTS,
    Append,
    add_positions,
    with_positions,
)
from dagster_adjunct.orchestration.step.event_times import BatchTimes
from dagster_adjunct.orchestration.step.failures import call_frame_function
from dagster_adjunct.orchestration.step.planned_batch import PlannedBatch
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.schemas.paths import column_of, split_path
from dagster_adjunct.resources.schemas.records import frame_from_arrow
from dagster_adjunct.resources.schemas.schema import Schema, copy_name, named_column, value_column
from dagster_adjunct.resources.schemas.types import type_from_spark, types_from_spark
from dagster_adjunct.resources.spark.tasks import fetch_small, small_frame
from dagster_adjunct.resources.spark.tuning import PersistedFrames
from dagster_adjunct.resources.streams.checked_reads import read_frame, read_options
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION, AppendResult, Sources
from dagster_adjunct.resources.tables.arrow import DEFAULT, PARTS, UPDATE
from dagster_adjunct.resources.tables.spark import TableWrite, WriteResult, write_table

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, Observation, SparkSession

_NUMBER = "__number"
_ELEMENT = "__element"
_SAMPLE = "sample"  # begins the names of observed samples
_SHOWN = "__shown"  # begins the names of the values that they show
# By this, records that fail a check are ordered.
_PLACE = (PARTITION, OFFSET, TASK, BRANCH, ORDINAL, ORIGIN)


@dataclass(frozen=True, slots=True)
class _CheckedRecords:
    """An operator's check of records, and what Spark observes of it."""

    operator: str
    checked: Checked
    observation: Observation


@dataclass(frozen=True, slots=True)
class SparkFrames:
    """DataFrames as the records of a batch: `SparkRecords` of operators, and `Frames` of outputs.

    `on_kept` gets each operator's records that were just cached, as a dry run inspects them.
    """

    planned: PlannedBatch
    times: BatchTimes
    kept: PersistedFrames
    on_kept: Callable[[str, DataFrame], None] = lambda operator, frame: None
    _observed: list[tuple[str, Observation]] = field(default_factory=list)
    _checked: list[_CheckedRecords] = field(default_factory=list)
    _diverted: dict[str, DataFrame] = field(default_factory=dict)

    @property
    def session(self) -> SparkSession:
        return self.planned.context.spark()

    def read(self, stream: str) -> DataFrame:
        return self.times.read(stream)

    def of_table(self, table: pa.Table) -> DataFrame:
        return small_frame(self.session, table)

    def to_rows(self, frame: DataFrame) -> Sequence[dict[str, Any]]:
        return [row.asDict(recursive=True) for row in frame.collect()]

    # -- columns

    def names(self, frame: DataFrame) -> Sequence[str]:
        return frame.columns

    def columns(self, frame: DataFrame) -> Columns:
        return Columns.of_frame(frame)

    def types(self, frame: DataFrame) -> dict[str, str]:
        return types_from_spark(frame.schema)

    def schema(self, frame: DataFrame) -> Schema:
        """Return the columns of records as an output stream gets them."""
        own = [named_column(name) for name in frame.columns if not name.startswith("__")]
        return Schema.from_spark(frame.select(*own).schema)

    def sent_types(self, frame: DataFrame) -> dict[str, str | None]:
        """Return the types of the columns that a table gets, also of those in UPDATE and DEFAULT by
        "struct.column".
        """
        types: dict[str, str | None] = {}
        for column in frame.schema.fields:
            if column.name.startswith("__"):
                continue
            types[column.name] = type_from_spark(column.dataType)
            if column.name in (UPDATE, DEFAULT):
                inside = _struct_types(column.dataType, is_update=column.name == UPDATE)
                types |= {f"{column.name}.{name}": kind for name, kind in inside.items()}
        return types

    # -- changed records

    def filter(self, frame: DataFrame, condition: str) -> DataFrame:
        return frame.filter(condition)

    def select(self, frame: DataFrame, expressions: Sequence[str]) -> DataFrame:
        return frame.selectExpr(*expressions)

    def select_update(self, frame: DataFrame, names: Sequence[str], update: Update) -> DataFrame:
        """Return the records with these columns, and with UPDATE and DEFAULT of a partial
        update.
        """
        return frame.selectExpr(*names, *_with_lists(frame, update).expressions())

    def with_columns(self, frame: DataFrame, columns: Sequence[tuple[str, str]]) -> DataFrame:
        return frame.withColumns({name: F.expr(expression) for name, expression in columns})

    def explode(
        self, operator: str, frame: DataFrame, expression: str, name: str, *, keep_empty: bool
    ) -> DataFrame:
        """Return a record for each element of the array or map that an expression gives, with the
        element as column `name` and its number in ORDINAL.
        """
        from pyspark.sql.types import ArrayType, MapType

        values = F.expr(expression)
        kind = frame.select(values).schema.fields[0].dataType
        if not isinstance(kind, ArrayType | MapType):
            raise no_elements_error(operator, expression, type_from_spark(kind))
        if isinstance(kind, MapType):
            values = F.map_entries(values)
        explode = F.posexplode_outer if keep_empty else F.posexplode
        made = frame.select("*", explode(values).alias(_NUMBER, _ELEMENT))
        number = F.coalesce(F.col(_NUMBER), F.lit(0))
        columns = {column.lower(): named_column(column) for column in frame.columns}
        columns.pop(ORDINAL, None)
        columns[name.lower()] = F.col(_ELEMENT).alias(name)
        return made.select(*columns.values(), ordinal_column(frame, number).alias(ORDINAL))

    def merge(self, operator: str, frames: Sequence[DataFrame]) -> DataFrame:
        """Return the records of all inputs, partitioned as the plan requires after the operator."""
        by = self.planned.required_partitioning(operator)
        copies_of = [set(list_copies(frame.columns)) for frame in frames]
        in_all = set.intersection(*copies_of)  # other copies are dropped
        parts = []
        for frame, copies in zip(frames, copies_of, strict=True):
            parts.append(frame.drop(*(copies - in_all)))
        first, *others = parts
        if by:
            # If all inputs are partitioned alike, Spark unions partition by partition. To find out,
            # it compares the names that the columns have in files; an alias with metadata makes it
            # compare the current names.
            renamed = {}
            for path in by:
                name = _read_column(path, first.columns)
                renamed[name] = named_column(name).alias(name, metadata={"merged": 1})
            first = first.withColumns(renamed)
        merged = first
        for other in others:
            merged = merged.unionByName(other, allowMissingColumns=True)
        if not by:
            return merged
        partitions = self.planned.partitions_at(operator)
        if partitions == 1:
            return merged.coalesce(1)
        # Spark omits this exchange if it knows that the records are partitioned so.
        return merged.repartition(partitions, *[value_column(merged.columns, name) for name in by])

    def repartition(self, frame: DataFrame, partitions: int, by: Sequence[str]) -> DataFrame:
        """Return the records in partitions by these columns; unmoved if all are in one
        partition.
        """
        if self.planned.gathered:
            return frame
        # From here on Spark knows the values themselves, also in functions of users.
        moved = frame.drop(*list_copies(frame.columns))
        columns = [value_column(moved.columns, name) for name in by]
        return self.gather_small(moved).repartition(partitions, *columns)

    def gather_small(self, frame: DataFrame) -> DataFrame:
        """Return the records, in one task if the batch is small; used before they are
        repartitioned.
        """
        if self.planned.gathered or not self.planned.inputs.few:
            return frame
        # Without the barrier Spark drops a coalesce right before an exchange.
        return _add_barrier(frame.coalesce(1))

    def call_frame(self, operator: str, function: DataFrameFunction, frame: DataFrame) -> DataFrame:
        """Return the result of a user's DataFrame function, which must keep the hidden columns.

        With keeps_partitioning=True, computing the result fails if the function changed a nested
        value by which records are partitioned, which its copy (`copy_name`) tells. Plain columns
        are not checked.
        """
        # Without the barrier Spark pushes later filters below the function, and calls its UDFs
        # twice for a record.
        made = _add_barrier(call_frame_function(operator, function, frame))
        partitioned_by = self.planned.required_partitioning(operator)
        nested = [path for path in partitioned_by if copy_name(path) in made.columns]
        return _check_copies(operator, made, nested)

    def call(self, frame: DataFrame, call: RecordCall, kept: Sequence[str]) -> DataFrame:
        """Return what a user's function returns for each record, called in tasks."""
        return call_in_tasks(frame, call, kept)

    # -- computed records

    def materialize(self, operator: str, frame: DataFrame) -> DataFrame:
        """Return the same records, cached for the batch."""
        kept = self.kept.keep(frame)
        self.on_kept(operator, kept)
        return kept

    def first(self, frame: DataFrame, flags: Sequence[str]) -> Mapping[str, Any] | None:
        """Return the first record, by position, in which one of these boolean columns is true; None
        if there is none, and in a dry run.
        """
        if self.planned.is_dry_run:
            return None
        flagged = frame.where(reduce(or_, [F.col(name) for name in flags]))
        row = flagged.orderBy(PARTITION, OFFSET, *tie_breakers(frame.columns)).first()
        if row is None:
            return None
        return row.asDict(recursive=True)

    def divert(self, operator: str, frame: DataFrame) -> None:
        """Add records to those that the operator has diverted."""
        if operator in self._diverted:
            frame = self._diverted[operator].unionByName(frame)
        self._diverted[operator] = frame

    def diverted(self, operator: str) -> DataFrame:
        """Return the records that the operator before this one has diverted."""
        return self._diverted[self.planned.operator_before(operator)]

    def count(self, frame: DataFrame) -> int:
        return frame.count()

    def count_failed(self, operator: str, frame: DataFrame, checked: Checked) -> DataFrame:
        """Return all records; once they are computed, `observed` has the number that fail the
        check, and `sampled` describes some of these: the first for each remainder of the offset by
        SAMPLE_SIZE.
        """
        from pyspark.sql import Observation

        failed = F.col(checked.flag)
        shown = [value_column(frame.columns, name) for name in checked.shown]
        places = keep_present(_PLACE, frame.columns)
        described = F.struct(
            *map(named_column, places),
            *[value.alias(f"{_SHOWN}{number}") for number, value in enumerate(shown)],
        )
        sample = []
        for number in range(SAMPLE_SIZE):
            is_in_group = failed & (F.pmod(F.col(OFFSET), F.lit(SAMPLE_SIZE)) == number)
            sample.append(F.min(F.when(is_in_group, described)).alias(f"{_SAMPLE}{number}"))
        observation = Observation(f"{operator}-{uuid4().hex}")
        self._observed.append((operator, observation))
        self._checked.append(_CheckedRecords(operator, checked, observation))
        counts = [F.count(F.lit(1)).alias("rows"), F.count_if(failed).alias("failed")]
        return frame.observe(observation, *counts, *sample)

    def count_records(
        self, operator: str, frame: DataFrame, conditions: Mapping[str, Column]
    ) -> DataFrame:
        """Return the records; once they are computed, `observed` has how many match each
        condition.
        """
        from pyspark.sql import Observation

        observation = Observation(f"{operator}-{uuid4().hex}")
        self._observed.append((operator, observation))
        counts = [F.count_if(is_met).alias(name) for name, is_met in conditions.items()]
        return frame.observe(observation, *counts)

    def keep_matches(self, operator: str, frame: DataFrame, how: How) -> DataFrame:
        """Return joined records without the columns that mark matches, and count them; an inner
        join drops those without an entry.
        """
        # An inner join is a left join whose unmatched records are counted and then dropped.
        conditions = {"rows": F.lit(True), "unmatched": F.col(MATCHED).isNull()}
        for flag, name in TIME_COUNTS.items():
            if flag in frame.columns:
                conditions[name] = F.col(flag)
        counted = self.count_records(operator, frame, conditions)
        kept = counted.filter(MATCHED) if how == "inner" else counted
        return kept.drop(MATCHED, *TIME_COUNTS)

    def observed(self) -> Counters:
        """Return what `count_records` and `count_failed` have counted, by operator, once the
        records are computed.
        """
        counters: Counters = {}
        for operator, observation in self._observed:
            of_operator = counters.setdefault(operator, {})
            for name, count in _read_observation(observation).items():
                if not name.startswith(_SAMPLE):
                    of_operator[name] = of_operator.get(name, 0) + int(count)
        return counters

    def sampled(self) -> dict[str, list[str]]:
        """Return the descriptions of the records that `count_failed` has sampled, by operator, once
        the records are computed.
        """
        samples: dict[str, list[str]] = {}
        for each in self._checked:
            rows = []
            for name, row in _read_observation(each.observation).items():
                if name.startswith(_SAMPLE) and row is not None:
                    rows.append(row)
            rows.sort(key=lambda row: (row[PARTITION], row[OFFSET]))
            for row in rows:
                record = row.asDict(recursive=True)
                for number, name in enumerate(each.checked.shown):
                    record[name] = record.pop(f"{_SHOWN}{number}")
                described = each.checked.describe(record)
                samples.setdefault(each.operator, []).append(described)
        return samples

    # -- lookups in remote tables

    def tasks_at(self, operator: str) -> int:
        return self.planned.partitions_at(operator)

    def distinct_keys(
        self, operator: str, frame: DataFrame, lookup: TableLookup, *, sensitive: bool
    ) -> pa.Table:
        """Return the distinct keys of the records, collected to this process; keys with a null are
        left out.
        """
        # Under names that need no quotes, which dropna() would not accept.
        keys = []
        for name, key in zip(lookup.keys, lookups.key_columns(lookup), strict=True):
            keys.append(value_column(frame.columns, name).alias(key))
        # Collected with duplicates: a shuffle would cost more than the few extra bytes.
        collected = frame.select(*keys).dropna().toArrow()
        return lookups.distinct_keys(operator, collected, lookup, sensitive=sensitive)

    def add_answers(
        self, operator: str, frame: DataFrame, lookup: TableLookup, answers: pa.Table
    ) -> DataFrame:
        """Return all records with the answers for their keys, and MATCHED."""
        names = [answer.name for answer in lookup.answers]
        named = answers.rename_columns([*lookups.key_columns(lookup), lookups.FOUND, *names])
        answered = frame_from_arrow(self.session, named)
        return lookups.join_answers(operator, frame, lookup, answered)

    def add_unknown_answers(
        self, operator: str, frame: DataFrame, lookup: TableLookup
    ) -> DataFrame:
        """Return the records with the columns that `add_answers` adds, all null and of the same
        types, for a dry run.
        """
        return lookups.add_unknown_answers(self.materialize(operator, frame), lookup)


def _read_observation(observation: Observation) -> Mapping[str, Any]:
    """Return what was observed, once the query that has the observation is done; nothing if Spark
    has optimized its records away.
    """
    # `getRow` waits for the query; its row is empty if the records are optimized away. With Spark
    # Connect there is nothing to wait for.
    observed_in_jvm = getattr(observation, "_jo", None)
    if observed_in_jvm is not None and not observed_in_jvm.getRow().length():
        return {}
    observed: Mapping[str, Any] = observation.get
    return observed


def _struct_types(kind: Any, *, is_update: bool) -> dict[str, str]:
    """Return the types of the set, added and appended columns of a partial update, or of the
    columns of a default record; {} if `kind` is no struct.
    """
    from pyspark.sql.types import StructType

    if not isinstance(kind, StructType):
        return {}
    columns = list(kind.fields)
    parts = [column.dataType for column in columns if column.name in PARTS]
    is_typed = is_update and len(parts) == len(columns)
    if is_typed and all(isinstance(part, StructType) for part in parts):
        columns = list(chain.from_iterable(parts))  # type: ignore[arg-type]
    return {column.name: type_from_spark(column.dataType) for column in columns}


def _with_lists(frame: DataFrame, update: Update) -> Update:
    """Return the update with lists to append: a single value becomes a list of it, null appends
    nothing.
    """
    if not update.append:
        return update
    appended = frame.selectExpr(*[expression for _, expression in update.append])
    lists: list[tuple[str, str]] = []
    for (name, text), column in zip(update.append, appended.schema.fields, strict=True):
        if column.dataType.typeName() != "array":
            listed = f"case when ({text}) is not null then array({text}) end"
        else:
            listed = text
        lists.append((name, listed))
    return replace(update, append=tuple(lists))


def _check_copies(operator: str, frame: DataFrame, paths: Sequence[str]) -> DataFrame:
    """Return the records that a function has made with keeps_partitioning=True. `paths` are those
    by which they are partitioned and of which they have copies.

    Computing the records fails if the function has changed the value at a path, so that it differs
    from its copy.
    """
    for path in paths:
        column, *steps = split_path(path)
        value = named_column(column)
        for step in steps:
            value = value.getField(step)
        problem = f"{operator} has keeps_partitioning=True, and changes {path}"
        failed = F.raise_error(F.lit(problem)).cast("boolean")
        same = named_column(copy_name(path)).eqNullSafe(value)
        frame = frame.where(F.when(same, F.lit(True)).otherwise(failed))
    return frame


def _add_barrier(frame: DataFrame) -> DataFrame:
    """Return the same records with a metric that nobody reads: Spark's optimizer moves nothing
    past it.
    """
    return frame.observe(f"here-{uuid4().hex}", F.count(F.lit(1)))


def _read_column(name: str, names: Collection[str]) -> str:
    """Return the column that `value_column` reads of records with the columns `names`."""
    if copy_name(name) in names:
        return copy_name(name)
    return column_of(name, names)


def rename_copies(frame: DataFrame, before: Sequence[str], after: Sequence[str]) -> DataFrame:
    """Return the records that leave an operator with their copied values under new paths: what
    they were partitioned by, `before`, has the names `after` now. Other copies are dropped, since
    the operator may have changed their columns.
    """
    renamed: dict[str, str] = {}
    if len(before) == len(after):  # else the operator has lost the partitioning
        for old, new in zip(before, after, strict=True):
            renamed[copy_name(old)] = copy_name(new)
    outdated = [name for name in list_copies(frame.columns) if name not in renamed]
    return frame.drop(*outdated).withColumnsRenamed(renamed)


@dataclass(frozen=True, slots=True)
class TaskWrites:
    """Spark tasks write the records: `Writes` of outputs."""

    frames: SparkFrames

    @property
    def _planned(self) -> PlannedBatch:
        return self.frames.planned

    def append(self, operator: str, frame: DataFrame, append: Append) -> AppendResult:
        """Append records to a stream, in tasks."""
        options = replace(
            append.options,
            order_by=(PARTITION, OFFSET, *tie_breakers(frame.columns)),
            partitioned=self._planned.is_partitioned(operator),
            one_task=self._planned.inputs.few,
        )
        sent = add_positions(frame, options.sources)
        return append.send(sent.drop(*list_batch_columns(sent.columns)), options)

    def read(self, append: Append, **ranges: Any) -> DataFrame:
        """Return records that were appended, read by Spark."""
        options = read_options(append.system)
        return read_frame(append.system, self.frames.session, **options, **ranges)

    def fetch(self, operator: str, frame: DataFrame, sources: Sources | None) -> pa.Table:
        """Return the records as an output table gets them, collected to this process."""
        rows = fetch_small(frame, sys.maxsize)
        assert rows is not None, "no row is too large"
        return with_positions(rows, sources)

    def write(self, operator: str, frame: DataFrame, write: TableWrite) -> WriteResult:
        """Write records to a remote table, in tasks."""
        moves = operator in self._planned.exchanges and not self._planned.inputs.few
        gathered = self.frames.gather_small(frame)
        return write_table(gathered, write, exchange=moves, what=operator)
