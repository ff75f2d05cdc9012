"""How this process reads, changes, joins and writes the records of a batch, as Arrow tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from typing import Any

from dagster_adjunct.assets.reading.interval_ids import add_interval_id
from dagster_adjunct.assets.reading.keyed_entries import KeyedEntries, TimedEntries
from dagster_adjunct.assets.reading.version_reader import VersionReader, look_up_entries
from dagster_adjunct.orchestration.operators.batch import SAMPLE_SIZE, Checked
from dagster_adjunct.orchestration.operators.calls import RecordCall
from dagster_adjunct.orchestration.operators.columns import (
    ORDINAL,
    ORIGIN,
    first_duplicate,
    keep_present,
    ordinal_text,
    tie_breakers,
)
from dagster_adjunct.orchestration.operators.functions import call_in_process, no_elements_error
from dagster_adjunct.orchestration.operators.lookups import (
    BEFORE_HISTORY,
    ENTRY,
    MATCHED,
    NO_TIME,
    EntryLookup,
    How,
    TableLookup,
)
from dagster_adjunct.orchestration.operators.stream_facts import ColumnFacts, Columns
from dagster_adjunct.orchestration.operators.updates import Pairs, Update
from dagster_adjunct.orchestration.step import lookups
from dagster_adjunct.orchestration.step.batch_outputs import (
    TIME_COUNTS,
    Append,
    BatchCounts,
    epochs_of_partitions,
    with_positions,
)
from dagster_adjunct.orchestration.step.event_times import ranges_to_read
from dagster_adjunct.orchestration.step.kept_entries import EntryCache, count_stored_rows
from dagster_adjunct.orchestration.step.planned_batch import (
    PlannedBatch,
    find_history,
    schema_of_dataset,
)
from dagster_adjunct.resources.lazy_modules import np, pa, pc
from dagster_adjunct.resources.schemas.paths import column_of, read_values
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.types import arrow_type, type_from_arrow
from dagster_adjunct.resources.schemas.values import python_rows
from dagster_adjunct.resources.sql import arrow_kernels
from dagster_adjunct.resources.sql.arrow_expressions import compile_expression
from dagster_adjunct.resources.sql.arrow_kernels import NeedsSpark
from dagster_adjunct.resources.sql.expression import parse_expression
from dagster_adjunct.resources.sql.result_types import type_of_elements
from dagster_adjunct.resources.streams.checked_reads import read_table
from dagster_adjunct.resources.streams.system import EPOCH, OFFSET, PARTITION, AppendResult, Sources
from dagster_adjunct.resources.tables.arrow import DEFAULT, PARTS, UPDATE, to_struct_array
from dagster_adjunct.resources.tables.spark import TableWrite, WriteResult, write_rows


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What the rehearsal of a batch has read and made: the records of input streams, and the
    results of functions by their operator.
    """

    records: dict[str, pa.Table] = field(default_factory=dict)
    results: dict[str, pa.Table] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ArrowFrames:
    """Arrow tables as the records of a batch: `Records` of operators, and `Frames` of outputs.

    Methods raise NeedsSpark for values for which Spark's result might differ.
    """

    planned: PlannedBatch
    counts: BatchCounts
    rehearsed: Rehearsed = field(default_factory=Rehearsed)
    _diverted: dict[str, pa.Table] = field(default_factory=dict)

    @property
    def session(self) -> None:
        """None: frames of this process have no Spark session."""
        return None

    def read(self, stream: str) -> pa.Table:
        """Return the batch's records of an input stream, which are read once, also if they are
        rehearsed.
        """
        known = self.rehearsed.records
        if stream not in known:
            known[stream] = self._read(stream)
        return known[stream]

    def _read(self, stream: str) -> pa.Table:
        """Return the records of a stream in the batch's ranges, with the batch's epochs added."""
        system = self.planned.system_of(stream)
        asked = ranges_to_read(system, stream, self.planned.inputs.intent)
        records = self.planned.inputs.arrived.get(stream)
        if records is None:
            records = read_table(system, asked.ranges)
        if not asked.epochs:
            return records
        added = epochs_of_partitions(asked.epochs, records.column(PARTITION))
        return set_column(records, EPOCH, pc.add(records.column(EPOCH), added).cast(pa.int32()))

    def of_table(self, table: pa.Table) -> pa.Table:
        return table

    def to_rows(self, frame: pa.Table) -> Sequence[dict[str, Any]]:
        return python_rows(frame)

    # -- columns

    def names(self, frame: pa.Table) -> Sequence[str]:
        names: Sequence[str] = frame.column_names
        return names

    def columns(self, frame: pa.Table) -> Columns:
        """Return the records' columns with their types, without hidden ones."""
        facts = {name: ColumnFacts(kind) for name, kind in self.types(frame).items()}
        return Columns({name: facts[name] for name in _own_names(frame)})

    def types(self, frame: pa.Table) -> dict[str, str]:
        return {column.name: type_from_arrow(column) for column in frame.schema}

    def schema(self, frame: pa.Table) -> Schema:
        """Return the columns of records as an output stream gets them."""
        return Schema.from_arrow(frame.select(_own_names(frame)).schema)

    def sent_types(self, frame: pa.Table) -> dict[str, str | None]:
        """Return the types of the columns that a table gets, also of those in UPDATE and DEFAULT by
        "struct.column".
        """
        types: dict[str, str | None] = {}
        for name in _own_names(frame):
            column = frame.schema.field(name)
            types[name] = type_from_arrow(column)
            if name in (UPDATE, DEFAULT):
                inside = _struct_types(column.type, is_update=name == UPDATE)
                for inner, kind in inside.items():
                    types[f"{name}.{inner}"] = kind
        return types

    # -- changed records

    def filter(self, frame: pa.Table, condition: str) -> pa.Table:
        return frame.filter(_evaluate(frame, self.types(frame), condition))

    def select(self, frame: pa.Table, expressions: Sequence[str]) -> pa.Table:
        """Return the records with the columns that these Spark SQL expressions give."""
        types = self.types(frame)
        columns: list[tuple[str, Any]] = []
        for text in expressions:
            read = parse_expression(text)
            if not read.star:
                columns.append((str(read.name), _evaluate(frame, types, text)))
                continue
            excepted = {name.lower() for name in read.excepted}
            for name in frame.column_names:
                if name.lower() not in excepted:
                    columns.append((name, frame.column(name)))
        double = first_duplicate([name for name, _ in columns])
        if double:  # the records have more columns than planned
            raise NeedsSpark(f"two columns {double}")
        return pa.table(dict(columns))

    def select_update(self, frame: pa.Table, names: Sequence[str], update: Update) -> pa.Table:
        """Return the records with these columns, and with UPDATE and DEFAULT of a partial
        update.
        """
        parts = {name: self._struct(frame, pairs) for name, pairs in update.parts.items()}
        selected = self.select(frame, names).append_column(UPDATE, _struct_of(parts, frame))
        if update.if_missing is None:
            return selected
        return selected.append_column(DEFAULT, self._struct(frame, update.if_missing))

    def _struct(self, frame: pa.Table, pairs: Pairs) -> pa.Array:
        """Return a struct for each record; `pairs` are its fields, each a name and a Spark SQL
        expression.
        """
        types = self.types(frame)
        return _struct_of({name: _evaluate(frame, types, text) for name, text in pairs}, frame)

    def with_columns(self, frame: pa.Table, columns: Sequence[tuple[str, str]]) -> pa.Table:
        """Return the records with these columns, pairs of a name and a Spark SQL expression, added
        or replaced.

        All expressions read the records as they were before.
        """
        types = self.types(frame)
        made = [(name, _evaluate(frame, types, text)) for name, text in columns]
        for name, values in made:
            by_lower_name = {column.lower(): column for column in frame.column_names}
            frame = set_column(frame, name, values, by_lower_name.get(name.lower()))
        return frame

    def explode(
        self, operator: str, frame: pa.Table, expression: str, name: str, *, keep_empty: bool
    ) -> pa.Table:
        """Return a record for each element of the array or map that an expression gives, with the
        element as column `name` and its number in ORDINAL.
        """
        values = _evaluate(frame, self.types(frame), expression)
        kind = type_from_arrow(pa.field(name, values.type))
        element = type_of_elements(kind)
        if element is None:
            raise no_elements_error(operator, expression, kind)
        elements = arrow_kernels.explode(values, arrow_type(element), keep_empty=keep_empty)
        made = frame.take(elements.rows)
        numbers = elements.numbers.to_pylist()
        outer: list[str | None]  # the ordinals of the records that had the arrays
        if ORDINAL in made.column_names:
            outer = made.column(ORDINAL).to_pylist()
            made = made.drop_columns([ORDINAL])
        else:
            outer = [None] * len(numbers)
        by_lower_name = {column.lower(): column for column in made.column_names}
        made = set_column(made, name, elements.values, by_lower_name.get(name.lower()))
        ordinals = list(map(ordinal_text, outer, numbers))
        return made.append_column(ORDINAL, pa.array(ordinals, pa.string()))

    def merge(self, operator: str, frames: Sequence[pa.Table]) -> pa.Table:
        """Return the records of all inputs; a column that one of them lacks is null there."""
        try:
            return pa.concat_tables(frames, promote_options="default")
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            raise NeedsSpark("inputs with columns of different types") from None

    def repartition(self, frame: pa.Table, partitions: int, by: Sequence[str]) -> pa.Table:
        return frame  # all records are in one place

    def call(self, frame: pa.Table, call: RecordCall, kept: Sequence[str]) -> pa.Table:
        """Return what a user's function returns for each record. Results of a rehearsal are used
        again, so that the function is not called twice.
        """
        streams = set(self.planned.origins[call.operator].streams.values())
        if not streams <= self.planned.app.inputs.keys():
            # After an output, records have positions that the rehearsal did not know.
            return call_in_process(frame, call, kept)
        known = self.rehearsed.results
        if call.operator not in known:
            known[call.operator] = call_in_process(frame, call, kept)
        return known[call.operator]

    # -- computed records

    def materialize(self, operator: str, frame: pa.Table) -> pa.Table:
        return frame  # it is computed already

    def first(self, frame: pa.Table, flags: Sequence[str]) -> Mapping[str, Any] | None:
        """Return the first record, by position, in which one of these boolean columns is true; None
        if there is none.
        """
        is_flagged = reduce(pc.or_, [frame.column(name) for name in flags])
        flagged = _sort_by_position(frame.filter(is_flagged))
        if not flagged.num_rows:
            return None
        (first,) = python_rows(flagged.slice(0, 1))
        return first

    def divert(self, operator: str, frame: pa.Table) -> None:
        """Add records to those that the operator has diverted."""
        if operator in self._diverted:
            frame = pa.concat_tables([self._diverted[operator], frame])
        self._diverted[operator] = frame

    def diverted(self, operator: str) -> pa.Table:
        """Return the records that the operator before this one has diverted."""
        return self._diverted[self.planned.operator_before(operator)]

    def count_failed(self, operator: str, frame: pa.Table, checked: Checked) -> pa.Table:
        """Return all records; counts them and those that fail the check, and describes a sample of
        the failed ones: the first for each remainder of the offset by SAMPLE_SIZE.
        """
        failed = _sort_by_position(frame.filter(frame.column(checked.flag)))
        self.counts.count(operator, {"rows": frame.num_rows, "failed": failed.num_rows})
        groups = failed.column(OFFSET).to_numpy() % SAMPLE_SIZE
        _, first_places = np.unique(groups, return_index=True)
        sample = failed.take(np.sort(first_places))
        described = sample.select(keep_present((PARTITION, OFFSET, ORIGIN), sample.column_names))
        for name in checked.shown:
            described = set_column(described, name, read_values(sample, name))
        self.counts.sample(operator, [checked.describe(row) for row in python_rows(described)])
        return frame

    def count(self, frame: pa.Table) -> int:
        count: int = frame.num_rows
        return count

    def keep_matches(self, operator: str, frame: pa.Table, how: How) -> pa.Table:
        """Return joined records without the columns that mark matches, and count them; an inner
        join drops those without an entry.
        """
        matched = frame.column(MATCHED)
        counts = {"rows": frame.num_rows, "unmatched": matched.null_count}
        hidden = [MATCHED]
        for flag, name in TIME_COUNTS.items():
            if flag in frame.column_names:
                counts[name] = pc.sum(frame.column(flag)).as_py() or 0
                hidden.append(flag)
        self.counts.count(operator, counts)
        if how == "inner":
            frame = frame.filter(matched)
        return frame.drop_columns(hidden)

    # -- lookups in remote tables

    def tasks_at(self, operator: str) -> int:
        """Return how many tasks may work for an operator: this process does alone."""
        return 1

    def distinct_keys(
        self, operator: str, frame: pa.Table, lookup: TableLookup, *, sensitive: bool
    ) -> pa.Table:
        """Return the distinct keys of the records; keys with a null are left out."""
        keys = _select_keys(frame, lookup).drop_null()
        return lookups.distinct_keys(operator, keys, lookup, sensitive=sensitive)

    def add_answers(
        self, operator: str, frame: pa.Table, lookup: TableLookup, answers: pa.Table
    ) -> pa.Table:
        """Return all records with the answers for their keys, and MATCHED."""
        keys = _select_keys(frame, lookup)
        found = KeyedEntries.of(answers, tuple(keys.column_names))
        places = found.find(keys.columns)
        first_answer = len(lookup.keys) + 1  # after the key and FOUND
        for number, answer in enumerate(lookup.answers, start=first_answer):
            frame = frame.append_column(answer.name, found.entries.column(number).take(places))
        has_record = found.entries.column(lookups.FOUND).take(places)
        return frame.append_column(MATCHED, _true_or_null(pc.fill_null(has_record, False)))

    def add_unknown_answers(self, operator: str, frame: pa.Table, lookup: TableLookup) -> pa.Table:
        """Return the records with the columns that `add_answers` adds, all null."""
        for answer in lookup.answers:
            unknown = pa.nulls(frame.num_rows, arrow_type(answer.value.type))
            frame = frame.append_column(answer.name, unknown)
        return frame.append_column(MATCHED, pa.nulls(frame.num_rows, pa.bool_()))


def _evaluate(frame: pa.Table, types: dict[str, str], text: str) -> Any:
    """Return the values of a Spark SQL expression; `types` are those of the records' columns."""
    compiled = compile_expression(text, types)
    if isinstance(compiled, str):
        raise NeedsSpark(compiled)
    return compiled.evaluate(frame)


def _sort_by_position(frame: pa.Table) -> pa.Table:
    """Return the records in the order of their positions."""
    order = (PARTITION, OFFSET, *tie_breakers(frame.column_names))
    return frame.sort_by([(name, "ascending") for name in order])


def _own_names(frame: pa.Table) -> list[str]:
    """Return the names of the columns that are not hidden."""
    return [name for name in frame.column_names if not name.startswith("__")]


def _struct_types(kind: pa.DataType, *, is_update: bool) -> dict[str, str]:
    """Return the types of the set and added columns of a partial update, or of the columns of a
    default record; {} if `kind` is no struct.
    """
    if not pa.types.is_struct(kind):
        return {}
    columns = list(kind)
    parts = [column.type for column in columns if column.name in PARTS]
    has_parts_only = len(parts) == len(columns) and all(pa.types.is_struct(part) for part in parts)
    if is_update and has_parts_only:  # the columns are those in the parts
        columns = list(chain.from_iterable(parts))
    return {column.name: type_from_arrow(column) for column in columns}


def _struct_of(columns: dict[str, Any], frame: pa.Table) -> pa.Array:
    """Return a struct with these fields for each record; true without fields, as Spark has no
    struct without any.
    """
    if not columns:
        return pa.repeat(pa.scalar(True), frame.num_rows)
    return to_struct_array(columns, frame.num_rows)


def _select_keys(frame: pa.Table, lookup: TableLookup) -> pa.Table:
    """Return the lookup's keys of all records, in columns of their own names."""
    keys = [read_values(frame, name) for name in lookup.keys]
    return pa.table(keys, lookups.key_columns(lookup))


def _true_or_null(flags: pa.Array) -> pa.Array:
    """Return true where the flag is true, else null."""
    return pc.if_else(flags, True, pa.scalar(None, pa.bool_()))


def set_column(records: pa.Table, name: str, values: Any, replaced: str | None = None) -> pa.Table:
    """Return the records with a column, instead of the one called `replaced` (default: `name`) if
    there is one.
    """
    if replaced is None:
        replaced = name
    place = records.schema.get_field_index(replaced)
    if place < 0:
        return records.append_column(name, values)
    return records.set_column(place, name, values)


_LOOKUP_COST = 20
"""How many entries are read in the time in which one is looked up."""


@dataclass(frozen=True, slots=True)
class ArrowDatasets:
    """The datasets that this process joins: `Datasets` of operators."""

    planned: PlannedBatch
    cache: EntryCache

    def schema_of(self, dataset: str, *, over_time: bool = False) -> Schema:
        """Return the columns of a dataset's entries, or of its rows over time."""
        return schema_of_dataset(self.planned, dataset, over_time=over_time)

    def match(self, operator: str, frame: pa.Table, lookup: EntryLookup) -> pa.Table:
        """Return all records with what the lookup takes of their entries, and MATCHED; as of a time
        also with BEFORE_HISTORY and NO_TIME.
        """
        key = tuple(entry for _, entry in lookup.on)
        columns = [read_values(frame, stream) for stream, _ in lookup.on]
        if lookup.as_of is None:
            found = self._entries_for(lookup.dataset, key, columns)
            return _take_columns(frame, found.entries, found.find(columns), lookup)
        if lookup.as_of.known_then:
            timed = self._served_entries(lookup.dataset, key)
        else:
            timed = self._timed_entries(lookup.dataset, key, with_ids=lookup.with_ids)
        times = read_values(frame, lookup.as_of.column).cast(arrow_type("timestamp"))
        oldest = lookup.as_of.before_history == "oldest"
        places, early = timed.find(columns, times.cast("int64").to_pylist(), oldest=oldest)
        joined = _take_columns(frame, timed.entries, places, lookup)
        return joined.append_column(BEFORE_HISTORY, early).append_column(NO_TIME, times.is_null())

    def _entries_for(
        self, dataset: str, key: tuple[str, ...], columns: Sequence[pa.ChunkedArray]
    ) -> KeyedEntries:
        """Return the entries of a dataset, at least those of these keys.

        A restatement has few records, and its dataset has changed since it was read last: keys are
        looked up, unless they are so many that reading all entries is cheaper.
        """
        view = self.planned.inputs.views[dataset]
        if self.planned.inputs.places and isinstance(view, VersionReader):
            keys = pa.table(columns, key).drop_null().group_by(key).aggregate([]).select(key)
            if keys.num_rows * _LOOKUP_COST <= count_stored_rows(view):
                return KeyedEntries.of(look_up_entries(view, keys), key)
        return self.entries(dataset, key)

    def entries(self, dataset: str, key: tuple[str, ...]) -> KeyedEntries:
        """Return the entries of a dataset by its key; none in a dry run, and for a dataset without
        a version.
        """
        view = self.planned.inputs.views[dataset]
        if isinstance(view, VersionReader) and not self.planned.is_dry_run:
            return self.cache.get(view, key)
        return KeyedEntries.of(self.schema_of(dataset).to_arrow().empty_table(), key)

    def _served_entries(self, dataset: str, key: tuple[str, ...]) -> TimedEntries:
        """Return the rows that a dataset has served, by their key; none in a dry run, and if it has
        served nothing yet.
        """
        reader = self.planned.inputs.served.get(dataset)
        if reader is None or self.planned.is_dry_run:
            return TimedEntries.empty(self.schema_of(dataset), key)
        return self.cache.get_served(reader, key)

    def _timed_entries(self, dataset: str, key: tuple[str, ...], *, with_ids: bool) -> TimedEntries:
        """Return a dataset's rows over time, by their key; none in a dry run, and for a dataset
        without a version.
        """
        history = find_history(self.planned, dataset)
        if history.reader is None or self.planned.is_dry_run:
            schema = self.schema_of(dataset)
            if with_ids:
                schema = add_interval_id(schema)
            return TimedEntries.empty(schema, key)
        return self.cache.get_over_time(history.reader, key, history.known_from, with_ids=with_ids)


def _take_columns(
    frame: pa.Table, entries: pa.Table, places: pa.Array, lookup: EntryLookup
) -> pa.Table:
    """Return the records with what the lookup takes of the entries at these places, and MATCHED."""
    if lookup.added is None:
        whole = entries.to_struct_array().combine_chunks()
        frame = frame.append_column(ENTRY, whole.take(places))
    for item in lookup.added or ():
        taken = entries.select([column_of(item.column, entries.column_names)]).take(places)
        frame = frame.append_column(item.name, read_values(taken, item.column))
    return frame.append_column(MATCHED, _true_or_null(pc.is_valid(places)))


@dataclass(frozen=True, slots=True)
class ProcessWrites:
    """This process writes the records: `Writes` of outputs."""

    def append(self, operator: str, frame: pa.Table, append: Append) -> AppendResult:
        """Append records to a stream, from this process."""
        return append.send_rows(frame)

    def read(self, append: Append, **ranges: Any) -> pa.Table:
        return read_table(append.system, **ranges)

    def fetch(self, operator: str, frame: pa.Table, sources: Sources | None) -> pa.Table:
        """Return the records as an output table gets them."""
        return with_positions(frame, sources)

    def write(self, operator: str, frame: pa.Table, write: TableWrite) -> WriteResult:
        """Write records to a remote table, from this process."""
        return write_rows(frame, write, what=operator)
