"""`Join`, which adds the columns of a dataset's entries, and `JoinFunction`, which calls a
function with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeAlias

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.sources.entries import derive_stored_schema
from dagster_adjunct.orchestration.operators.batch import Batch, Frame
from dagster_adjunct.orchestration.operators.calls import RecordCall, RecordFunction
from dagster_adjunct.orchestration.operators.columns import (
    check_added_names,
    first_duplicate,
    function_label,
    plain_column,
    require_columns,
    split_alias,
    validate_column_names,
)
from dagster_adjunct.orchestration.operators.declared import DeclaredApplication
from dagster_adjunct.orchestration.operators.lookups import (
    ENTRY,
    AsOf,
    EntryLookup,
    How,
    Pairs,
    SelectedColumn,
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
    LineageNode,
)
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError, SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import Schema

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


def check_match_rate(operator: str, rate: float | None) -> None:
    """Raise ConfigurationError for an invalid `min_match_rate=`."""
    if rate is not None and not 0 <= rate <= 1:
        found = f"{operator} has min_match_rate={rate!r}"
        raise argument_error(
            found, "0 to 1, such as 0.95 for 95 %", argument="min_match_rate", operator=operator
        )


def parse_on(operator: str, on: On) -> Pairs:
    """Return pairs (stream column, column of the other side) in the order in which the user gave
    them.
    """
    if isinstance(on, Mapping):
        return tuple((str(stream), str(entry)) for stream, entry in on.items())
    return tuple((column, column) for column in validate_column_names(f"{operator}: on=", on))


def pair_key_columns(
    operator: str, kind: Literal["dataset", "table"], name: str, key: Sequence[str], on: On
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
                "Join on the key; for other names on the stream write on={stream column:"
                f" {key[0]!r}}}."
            )
            raise PlanningError(problem, step, dataset=dataset, operator=operator)
        by_column[entry] = stream
    missing = ", ".join(repr(part) for part in key if part not in by_column)
    if missing:
        problem = (
            f"{operator}: on= lacks {missing} of {shown}, so a record could match several entries."
        )
        raise PlanningError(
            problem, "Name every column of the key in on=.", dataset=dataset, operator=operator
        )
    validate_column_names(f"{operator}: on=", list(by_column.values()))
    return tuple((by_column[part], part) for part in key)


def require_keys(operator: str, on: Pairs, stream: Columns, other: str, key: Sequence[str]) -> None:
    """Raise PlanningError if the stream certainly lacks a column of `on`; `key` is that of the
    other side.
    """
    step = (
        f"Correct on=, or join before the column is dropped; the key of {other} is"
        f" {', '.join(key)}."
    )
    require_columns(operator, "the stream", tuple(name for name, _ in on), stream.names, step)


def describe_on(on: Pairs) -> str:
    """Return the compared columns for plans: "shop, visitor = id"."""
    return ", ".join(stream if stream == other else f"{stream} = {other}" for stream, other in on)


def select_columns(
    select: tuple[SelectedColumn, ...] | None, on: Pairs, prefix: str, columns: Iterable[str]
) -> tuple[SelectedColumn, ...]:
    """Return the columns to add: those of `select`, by default all `columns` of the other side
    except its key.
    """
    keys = {other for _, other in on}
    if select is not None:
        return select
    return tuple(SelectedColumn(name, prefix + name) for name in columns if name not in keys)


def parse_selection(
    operator: str, select: Sequence[str] | None, prefix: str
) -> tuple[SelectedColumn, ...] | None:
    """Return the columns that the user selected: "year as plane_year" gets that name, a plain
    name gets `prefix`.
    """
    if select is None:
        return None
    chosen = []
    for item in select:
        what, alias = split_alias(str(item))
        name = plain_column(what)
        if name is None:
            problem = f"{operator}: select names {item!r}: expected a column, or 'column as name'."
            step = "Compute other values with map() after the join."
            raise ConfigurationError(problem, step, argument="select", operator=operator)
        chosen.append(SelectedColumn(name, alias or prefix + name))
    double = first_duplicate([item.name for item in chosen])
    if double:
        problem = f"{operator}: select gives two columns the name {double!r}."
        raise PlanningError(problem, f"Rename one: '{double} as other_name'.", operator=operator)
    return tuple(chosen)


@dataclass(frozen=True, slots=True)
class Join(PassThroughSpec):
    """Records joined with the columns of their entry in a dataset.

    `on` has pairs (stream column, dataset column) in the order of the dataset's key. `select` None
    means all columns of the dataset except its key, with `prefix` before their names.
    `min_match_rate` is the fraction of records that must have an entry, or None.
    """

    kind: ClassVar[str] = "join"
    dataset: str
    on: tuple[tuple[str, str], ...]
    how: How
    select: tuple[SelectedColumn, ...] | None
    prefix: str = ""
    min_match_rate: float | None = None

    def selection(self, dataset_columns: Iterable[str]) -> tuple[SelectedColumn, ...]:
        """Return the columns to add, for a dataset with these columns."""
        return select_columns(self.select, self.on, self.prefix, dataset_columns)

    @property
    def match(self) -> Match:
        return Match(self.dataset, self.min_match_rate)

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
        dataset = context.app.dataset(self.dataset)
        records = source_schema(dataset, context.catalog)
        try:
            entries = Columns.of_schema(
                None if records is None else derive_stored_schema(dataset, records)
            )
        except SchemaMismatchError as error:
            step = error.next_step
            if error.argument is None:
                step = "Correct key=, columns= or the extractor of the dataset."
            raise PlanningError(error.problem, step, dataset=dataset.name) from error
        if records is None and dataset.columns is not None:
            entries = Columns(dict.fromkeys(dataset.columns, ColumnFacts()), typed=False)
        context.compared.extend(self._compare(arriving[0], entries))
        return self._join_columns(context.operator, arriving[0], entries, dataset)

    def _compare(self, stream: Columns, entries: Columns) -> list[ComparedColumn]:
        own = stream.types or {}
        others = entries.types or {}
        name = f"of dataset {self.dataset}"
        return [
            ComparedColumn(one, own.get(one), f"{other!r} {name}", others.get(other))
            for one, other in self.on
        ]

    def _join_columns(
        self, operator: str, stream: Columns, entries: Columns, dataset: AdjunctDataset
    ) -> Columns:
        """Return the columns of joined records.

        Raises PlanningError for missing and duplicate columns, and for keys of different types.
        """
        require_keys(operator, self.on, stream, f"dataset {dataset.name}", dataset.key)
        side = f"dataset {dataset.name} (input {dataset.input})"
        require_columns(
            operator,
            side,
            tuple(name for _, name in self.on),
            entries.names,
            "Correct the dataset's key=.",
        )
        chosen = self.selection(entries.known)
        require_columns(
            operator, side, tuple(item.column for item in chosen), entries.names, "Correct select=."
        )
        if self.select is None and not entries.complete:
            return replace(stream, complete=False)
        added = [item.name for item in chosen]
        check_added_names(
            operator,
            stream.names,
            added,
            f"dataset {self.dataset}",
            self.dataset,
            dataset=self.dataset,
        )
        check_equal_types(operator, self._compare(stream, entries), dataset=self.dataset)
        node = LineageNode("dataset", self.dataset)
        kinds = entries.types or {}
        more = {
            item.name: ColumnFacts(kinds.get(item.column), ((node, item.column),))
            for item in chosen
        }
        return stream.add(more, typed=entries.types is not None)

    def compile(self, operator: str, frames: Sequence[Frame], batch: Batch[Frame]) -> Frame:
        (frame,) = frames
        matched = self._match(operator, frame, batch)
        return batch.records.keep_matches(operator, matched, self.how)

    def _match(
        self, operator: str, frame: Frame, batch: Batch[Frame], as_of: AsOf | None = None
    ) -> Frame:
        """Return the records with their entries, and MATCHED.

        Raises PlanningError as planning does, now that the types of the version that the batch
        joins are known.
        """
        schema = batch.datasets.schema_of(self.dataset, over_time=as_of is not None)
        declared = batch.planned.app.dataset(self.dataset)
        arriving = batch.records.columns(frame)
        self._join_columns(operator, arriving, Columns.of_schema(schema), declared)
        lookup = EntryLookup(self.dataset, self.on, self._added(schema), as_of)
        return batch.datasets.match(operator, frame, lookup)

    def _added(self, schema: Schema) -> tuple[SelectedColumn, ...] | None:
        """Return the columns to take of entries with this schema; None for whole entries."""
        return self.selection(schema.names)

    def spark_need(self, context: PlanContext, arriving: Sequence[Columns]) -> str:
        if context.app.dataset(self.dataset).is_local:
            return f"local table {self.dataset}"
        if not context.app.dataset(self.dataset).persistent:
            return f"dataset {self.dataset}, a table of one run"
        kinds = {name: (arriving[0].types or {}).get(name) or "unknown" for name, _ in self.on}
        other = next(
            (name for name, kind in kinds.items() if kind.partition("(")[0] not in _EXACT), None
        )
        return "" if other is None else f"the key {other}, whose type is {kinds[other]}"


def build_join(
    kind: type[Join],
    operator: str,
    dataset: AdjunctDataset,
    on: On,
    how: How,
    select: Sequence[str] | None,
    prefix: str,
    min_match_rate: float | None,
    **more: Any,
) -> Join:
    """Return the join for a user's arguments; `operator` is its id, `more` has the fields that
    only `kind` has.
    """
    check_match_rate(operator, min_match_rate)
    pairs = pair_key_columns(operator, "dataset", dataset.name, dataset.key, on)
    return kind(
        dataset.name,
        pairs,
        how,
        parse_selection(operator, select, prefix),
        prefix,
        min_match_rate,
        **more,
    )


def source_schema(dataset: AdjunctDataset, catalog: Catalog) -> Schema | None:
    """Return the schema of a dataset's source records, None if it is unknown."""
    if not isinstance(dataset.input, str):
        return dataset.input.schema
    facts = catalog.get(dataset.input)
    return facts.schema if facts else None


@dataclass(frozen=True, slots=True)
class JoinFunction(Join):
    """Records with the columns that `function(record, entry)` returns added; if it returns None,
    the record is dropped.

    An inner join calls it for records with an entry only, a left join for all records: a missing
    entry is None.
    """

    kind: ClassVar[str] = "join"
    function: RecordFunction = field(kw_only=True)
    schema: Schema = field(kw_only=True)

    def summary(self) -> str:
        return f"{Join.summary(self)}, by {function_label(self.function)}"

    def _join_columns(
        self, operator: str, stream: Columns, entries: Columns, dataset: AdjunctDataset
    ) -> Columns:
        columns = Join._join_columns(self, operator, stream, entries, dataset)
        there = {name.lower() for name in columns.names or ()}
        taken = next((name for name in self.schema.names if name.lower() in there), None)
        if taken is not None:
            problem = (
                f"{operator}: the stream and {function_label(self.function)} both have a column"
                f" {taken!r}; the stream's columns there are {', '.join(columns.names or ())}."
            )
            step = (
                "Use another name in schema=, and replace the stream's column with select() after"
                " the join."
            )
            raise PlanningError(problem, step, operator=operator, column=taken)
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
        return None
