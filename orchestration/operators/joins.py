"""`Join`, which adds the columns of a dataset's entries, and `JoinFunction`, which calls a
function with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.sources.entries import derive_stored_schema
from dagster_adjunct.orchestration.operators.batch import Batch, Frame
from dagster_adjunct.orchestration.operators.calls import RecordCall, RecordFunction
from dagster_adjunct.orchestration.operators.columns import (
    EVENT_TIME,
    first_duplicate,
    function_label,
    plain_column,
    plain_path,
    split_alias,
    validate_column_names,
)
from dagster_adjunct.orchestration.operators.lookups import (
    EARLY,
    ENTRY,
    AsOf,
    EntryLookup,
    How,
    Pairs,
    Restate,
    SelectedColumn,
    Wait,
)
from dagster_adjunct.orchestration.operators.operator import (
    ComparedColumn,
    Match,
    PassThroughSpec,
    PlanContext,
    Requirement,
    check_equal_types,
)
from dagster_adjunct.orchestration.operators.stream_facts import (
    Catalog,
    ColumnFacts,
    Columns,
    DeclaredApplication,
    LineageNode,
)
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError, SchemaMismatchError
from dagster_adjunct.resources.schemas.paths import column_of
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.times import to_microseconds

# Types of keys whose values are equal in Arrow exactly if they are equal in Spark.
_EXACT = frozenset(
    {
        "string",
        "tinyint",
        "smallint",
        "int",
        "bigint",
        "boolean",
        "date",
        "timestamp",
        "decimal",
        "binary",
    }
)

On: TypeAlias = str | Sequence[str] | Mapping[str, str]
"""Columns that both sides have, or {stream column: column of the other side}."""
Source: TypeAlias = Literal["dataset", "table"]


def parse_on(operator: str, on: On) -> Pairs:
    """Return pairs (stream column, column of the other side) in the order in which the user gave
    them.
    """
    if isinstance(on, Mapping):
        return tuple((str(stream), str(entry)) for stream, entry in on.items())
    return tuple((column, column) for column in validate_column_names(f"{operator}: on=", on))


def pair_key_columns(
    operator: str, kind: Source, name: str, key: Sequence[str], on: On
) -> tuple[tuple[str, str], ...]:
    """Return pairs (stream column, key column) in the order of the dataset's or table's key.

    Raises PlanningError unless `on` compares each column of the key with one column of the stream.
    """
    dataset = name if kind == "dataset" else None
    shown = f"the key of {kind} {name!r} ({', '.join(key)})"
    by_column: dict[str, str] = {}
    for stream, entry in parse_on(operator, on):
        if entry in by_column:
            problem = f"{operator}: on= compares {kind} column {entry!r} twice."
            step = "Compare each key column with one column of the stream."
            raise PlanningError(problem, step, column=entry, operator=operator)
        if entry not in key:
            problem = f"{operator}: on= names {entry!r}, which is not in {shown}."
            step = (
                "Name columns of the key; for other names on the stream write on={stream"
                f" column: {key[0]!r}}}."
            )
            raise PlanningError(problem, step, dataset=dataset, operator=operator)
        by_column[entry] = stream
    missing = [column for column in key if column not in by_column]
    if missing:
        problem = (
            f"{operator}: on= lacks {', '.join(map(repr, missing))} of {shown}, so a record could"
            " match several entries."
        )
        raise PlanningError(
            problem, "Name every column of the key in on=.", dataset=dataset, operator=operator
        )
    validate_column_names(f"{operator}: on=", list(by_column.values()))
    return tuple((by_column[column], column) for column in key)


def require_keys(operator: str, on: Pairs, stream: Columns, other: str, key: Sequence[str]) -> None:
    """Raise PlanningError if the stream certainly lacks a column of `on`, or has it with a type
    that is not simple; `key` is that of the other side.
    """
    step = (
        f"Correct on=, or join before the column is dropped; the key of {other} is"
        f" {', '.join(key)}."
    )
    stream.require(operator, dict(on), step)
    stream.require_simple(operator, dict(on), "to look up")


def describe_on(on: Pairs) -> str:
    """Return the compared columns for plans: "shop, visitor = id"."""
    compared = []
    for stream, other in on:
        compared.append(stream if stream == other else f"{stream} = {other}")
    return ", ".join(compared)


def select_columns(
    select: tuple[SelectedColumn, ...] | None, on: Pairs, prefix: str, columns: Iterable[str]
) -> tuple[SelectedColumn, ...]:
    """Return the columns to add: those of `select`, by default all `columns` of the other side
    except its key.
    """
    if select is not None:
        return select
    chosen = dict.fromkeys(columns)
    for _, other in on:
        chosen.pop(other, None)
    return tuple(SelectedColumn(name, prefix + name) for name in chosen)


def parse_selection(
    operator: str, select: Sequence[str] | Mapping[str, str] | None, prefix: str
) -> tuple[SelectedColumn, ...] | None:
    """Return the columns that the user selected; None if the user selected none, which means all.

    "year as plane_year" gets that name; a plain name, and the last step of a path, get `prefix`. A
    mapping gives their types. Raises PlanningError for two columns of one name.
    """
    if select is None:
        return None
    chosen = []
    for item in select:
        kind = select[item] if isinstance(select, Mapping) else None
        chosen.append(_parse_selected(operator, str(item), prefix, kind))
    double = first_duplicate([item.name for item in chosen])
    if double:
        problem = f"{operator}: select gives two columns the name {double!r}."
        raise PlanningError(problem, f"Rename one: '{double} as other_name'.", operator=operator)
    return tuple(chosen)


def _parse_selected(operator: str, item: str, prefix: str, kind: str | None) -> SelectedColumn:
    """Return the column that an item of select= names, with the type `kind` that the user gave it,
    if any. Raises ConfigurationError for another expression, and for the type of a value in a
    column.
    """
    expression, alias = split_alias(item)
    column = plain_column(expression)
    steps = plain_path(expression) if column is None else (column,)
    if not steps:
        problem = (
            f"{operator}: select names {item!r}: expected a column, the path of a value in one,"
            " or either 'as name'."
        )
        step = "Compute other values with map() after the join."
        raise ConfigurationError(problem, step, argument="select", operator=operator)
    last_step = steps[-1]
    if kind is not None:
        kind = Field(last_step, kind).type
        if column is None:
            problem = f"{operator}: select gives a type to {item!r}, a value within a column."
            step = (
                f'Give the type of its column, {{"{steps[0]}": "struct<…>"}}, and make columns'
                " of its parts after the join; or declare the table's columns."
            )
            raise ConfigurationError(problem, step, argument="select", operator=operator)
    return SelectedColumn(column or expression, alias or f"{prefix}{last_step}", kind)


@dataclass(frozen=True, slots=True)
class Join(PassThroughSpec):
    """Records joined with the columns of their entry in a dataset.

    `on` has pairs (stream column, dataset column) in the order of the dataset's key. `select` None
    means all columns of the dataset except its key, with `prefix` before their names.
    `min_match_rate` is the fraction of records that must have an entry, or None. `wait` says how
    long records wait for the dataset, and `restate` which results follow later changes of its
    entries; None if they don't.
    """

    kind: ClassVar[str] = "join"
    source: ClassVar[Source] = "dataset"
    dataset: str
    on: tuple[tuple[str, str], ...]
    how: How
    select: tuple[SelectedColumn, ...] | None
    prefix: str = ""
    min_match_rate: float | None = None
    wait: Wait | None = field(default=None, kw_only=True)
    restate: Restate | None = field(default=None, kw_only=True)

    @property
    def keeps_each(self) -> bool:
        return self.how == "left"

    def selection(self, dataset_columns: Iterable[str]) -> tuple[SelectedColumn, ...]:
        """Return the columns to add, for a dataset with these columns."""
        return select_columns(self.select, self.on, self.prefix, dataset_columns)

    @property
    def match(self) -> Match:
        return Match(
            self.dataset, self.min_match_rate, wait=self.wait, restate=self.restate, on=self.on
        )

    def summary(self) -> str:
        return f"{self.how} join {self.dataset} on {describe_on(self.on)}"

    def requirements(self, app: DeclaredApplication) -> Sequence[Requirement | None]:
        dataset = app.dataset(self.dataset)
        if dataset.partitions is None:  # every task reads all of it
            return ()
        stream_columns = {entry: stream for stream, entry in self.on}
        columns = tuple(stream_columns[name] for name in dataset.partition_by)
        return (Requirement(dataset.name, dataset.partitions, columns),)

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (stream,) = arriving
        dataset = context.app.dataset(self.dataset)
        records = source_schema(dataset, context.catalog)
        entries = _stored_columns(dataset, records)
        context.compared.extend(self._compare(stream, entries))
        return self._join_columns(context.operator, stream, entries, dataset)

    def _compare(self, stream: Columns, entries: Columns) -> list[ComparedColumn]:
        """Return the pairs of key columns, with their types."""
        return compare_columns(self.on, stream, entries, f"dataset {self.dataset}")

    def _join_columns(
        self, operator: str, stream: Columns, entries: Columns, dataset: AdjunctDataset
    ) -> Columns:
        """Return the columns of joined records, with the `mark` of `wait`, if any; not all of them
        if the dataset's columns are unknown and all are added.

        Raises PlanningError for missing and duplicate columns, and for keys of different types.
        """
        require_keys(operator, self.on, stream, f"dataset {dataset.name}", dataset.key)
        name = self.dataset
        side = f"dataset {name} (input {dataset.input})"
        entries.require(operator, dataset.key, "Correct the dataset's key=.", side=side)
        chosen = self.selection(entries.known)
        columns = [item.column for item in chosen]
        entries.require(operator, columns, "Correct select=.", side=side)
        if self.select is None and not entries.complete:
            return replace(stream, complete=False)
        node = LineageNode("dataset", name)
        added = {}
        for item in chosen:
            kind = entries.type_of(item.column)
            column = column_of(item.column, entries.known)
            added[item.name] = ColumnFacts(kind, ((node, column),))
        stream.check_added(operator, added, f"dataset {name}", name, dataset=name)
        check_equal_types(operator, self._compare(stream, entries), dataset=name)
        joined = stream.add(added, typed=entries.types is not None)
        if self.wait is None or self.wait.mark is None:
            return joined
        mark = self.wait.mark
        joined.check_not_taken(operator, (mark,), "wait", "Choose another name: Wait(mark=…).")
        return joined.add({mark: ColumnFacts("boolean")})

    def compile(self, operator: str, frames: Sequence[Frame], batch: Batch[Frame]) -> Frame:
        (frame,) = frames
        matched = self._match(operator, frame, batch)
        return batch.records.keep_matches(operator, matched, self.how)

    def _match(
        self, operator: str, frame: Frame, batch: Batch[Frame], as_of: AsOf | None = None
    ) -> Frame:
        """Return the records with their entries, the current ones or those `as_of` a time, and
        MATCHED; in a join that waits, also with EARLY and the `mark`, if any.

        Raises PlanningError as planning does, now that the types of the version that the batch
        joins are known.
        """
        over_time = as_of is not None and not as_of.known_then
        schema = batch.datasets.schema_of(self.dataset, over_time=over_time)
        declared = batch.planned.app.dataset(self.dataset)
        arriving = batch.records.columns(frame)
        self._join_columns(operator, arriving, Columns.of_schema(schema), declared)  # may raise
        lookup = EntryLookup(self.dataset, self.on, self._added(schema), as_of)
        matched = batch.datasets.match(operator, frame, lookup)
        if self.wait is None:
            return matched
        is_early = "false"  # as SQL: no watermark has passed the record's event time
        if batch.planned.may_be_early(operator):
            is_early = f"{EVENT_TIME} is not null"
            known_until = batch.planned.known_until(operator)
            if known_until is not None:
                known_micros = to_microseconds(known_until)
                is_early += f" and {EVENT_TIME} >= timestamp_micros({known_micros})"
        matched = batch.records.with_columns(matched, [(EARLY, is_early)])
        if self.wait.mark is None:
            return matched
        return batch.records.with_columns(matched, [(self.wait.mark, EARLY)])

    def _added(self, schema: Schema) -> tuple[SelectedColumn, ...] | None:
        """Return the columns to take of entries with this schema; None for whole entries."""
        return self.selection(schema.names)

    def spark_need(self, context: PlanContext, arriving: Sequence[Columns]) -> str:
        dataset = context.app.dataset(self.dataset)
        if dataset.is_local:
            return f"local table {self.dataset}"
        if not dataset.persistent:
            return f"dataset {self.dataset}, a table of one run"
        (columns,) = arriving
        for name, _ in self.on:
            kind = columns.type_of(name) or "unknown"
            type_name, _, _ = kind.partition("(")
            if type_name not in _EXACT:
                return f"the key {name}, whose type is {kind}"
        return ""


def compare_columns(on: Pairs, stream: Columns, others: Columns, side: str) -> list[ComparedColumn]:
    """Return the compared columns of a stream and of the other `side`, with their types."""
    compared = []
    for own, other in on:
        shown = f"{other!r} of {side}"
        compared.append(ComparedColumn(own, stream.type_of(own), shown, others.type_of(other)))
    return compared


def _stored_columns(dataset: AdjunctDataset, records: Schema | None) -> Columns:
    """Return the columns of the entries of a dataset whose source `records` have this schema; None
    for an unknown one, of which only declared columns are known. Raises PlanningError if the
    dataset can't be made of such records.
    """
    if records is None:
        if dataset.columns.names is None:
            return Columns.of_schema(None)
        return Columns(dict.fromkeys(dataset.columns.names, ColumnFacts()), typed=False)
    try:
        return Columns.of_schema(derive_stored_schema(dataset, records))
    except SchemaMismatchError as error:
        step = error.next_step or "Correct key=, columns= or the extractor of the dataset."
        raise PlanningError(
            error.problem, step, dataset=dataset.name, column=error.column
        ) from error


def source_schema(dataset: AdjunctDataset, catalog: Catalog) -> Schema | None:
    """Return the schema of a dataset's source records, None if it is unknown."""
    if not isinstance(dataset.input, str):
        return dataset.input.schema
    facts = catalog.get(dataset.input)
    if facts is None:
        return None
    return facts.schema


@dataclass(frozen=True, slots=True)
class JoinFunction(Join):
    """Records with the columns that `function(record, entry)` returns added; if it returns None,
    the record is dropped.

    An inner join calls it for records with an entry only, a left join for all records: a missing
    entry is None.
    """

    kind: ClassVar[str] = "join"
    keeps_each: ClassVar[bool] = False
    function: RecordFunction = field(kw_only=True)
    schema: Schema = field(kw_only=True)

    def summary(self) -> str:
        return f"{Join.summary(self)}, by {function_label(self.function)}"

    def _join_columns(
        self, operator: str, stream: Columns, entries: Columns, dataset: AdjunctDataset
    ) -> Columns:
        """Return the columns of joined records, with those that the function returns."""
        columns = Join._join_columns(self, operator, stream, entries, dataset)
        step = (
            "Use another name in schema=, and replace the stream's column with select() after"
            " the join."
        )
        columns.check_not_taken(operator, self.schema.names, function_label(self.function), step)
        return columns.add(Columns.of_schema(self.schema).known)

    def compile(self, operator: str, frames: Sequence[Frame], batch: Batch[Frame]) -> Frame:
        (frame,) = frames
        names = batch.records.names(frame)
        call = RecordCall(
            operator,
            self.function,
            self.schema,
            entry=ENTRY,
            stream=batch.planned.stream_of(operator),
            sensitive=batch.planned.sensitive(operator, names),
        )
        joined = Join.compile(self, operator, frames, batch)
        return batch.records.call(joined, call, names)

    def _added(self, schema: Schema) -> None:
        """Take whole entries, which the function gets."""
        return None
