"""`LookupJoin`, which adds columns of a remote table, asked once for each key of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.orchestration.operators.batch_context import (
    BatchContext,
    LookupColumn,
    TableLookup,
    check_lookup,
    check_lookup_key_types,
    declared_column_types,
    lookup_column_types,
)
from dagster_adjunct.orchestration.operators.columns import Columns, Types, append_columns, require_columns
from dagster_adjunct.orchestration.operators.joins import (
    How,
    On,
    SelectedColumn,
    check_join_options,
    describe_on,
    pair_key_columns,
    parse_selection,
    select_columns,
)
from dagster_adjunct.orchestration.operators.operator import (
    ComparedColumn,
    Declarations,
    ExternalCall,
    Flow,
    KeyedTable,
    Match,
    PlanContext,
    Spec,
)
from dagster_adjunct.orchestration.operators.stream_facts import ColumnSources, LineageContext, LineageNode
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.schemas.schema import Field

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class LookupJoin(Spec):
    """Records with the columns of their key's record in a remote table; records do not move.

    `on` has pairs (stream column, table column) in the order of the table's key. `select` None means all declared
    columns of the table except its key, with `prefix` before their names. `types_given` has the types of columns that
    the table does not declare.
    """

    kind: ClassVar[str] = "join"
    table: str
    on: tuple[tuple[str, str], ...]
    how: How
    select: tuple[SelectedColumn, ...] | None
    types_given: tuple[tuple[str, str], ...] = ()
    prefix: str = ""
    args: tuple[object, ...] = ()
    min_match_rate: float | None = None

    @property
    def match(self) -> Match:
        return Match(None, self.min_match_rate, self.table)

    def summary(self) -> str:
        return f"{self.how} lookup in table {self.table} on {describe_on(self.on)}"

    def call(self, app: Declarations) -> ExternalCall:
        cached = "" if getattr(app.tables[self.table], "cache", None) is None else ", unless the table's cache has it"
        guarantee = f"each key once a batch{cached}; a repeated batch has the same answers"
        return ExternalCall("lookup", self.table, guarantee, recorded=True)

    def lookup(self, operator: str, table: KeyedTable) -> TableLookup:
        """Return the lookup, with the types of its columns.

        Raises PlanningError for a column that the table does not have, or whose type is unknown.
        """
        declared = declared_column_types(table)
        if self.select is None and declared is None:
            raise PlanningError(
                f"{operator}: table {table.name} declares no columns, and the join names none.",
                'Name those to add, with their types: select={"seats": "int"}; or declare the columns of the '
                "table's function.",
                operator=operator,
            )
        chosen = select_columns(self.select, self.on, self.prefix, declared or ())
        types = lookup_column_types(operator, table, tuple(item.column for item in chosen), dict(self.types_given))
        answers = tuple(LookupColumn(item.column, item.name, types[item.column]) for item in chosen)
        return TableLookup(self.table, tuple(stream for stream, _ in self.on), answers, self.args)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        table = context.app.tables[self.table]
        check_lookup(context.operator, table, self.args)
        lookup = self.lookup(context.operator, table)
        require_columns(
            context.operator, "the stream", lookup.keys, flow.columns,
            f"Correct on=, or join before the column is dropped; the key of table {self.table} is "
            f"{', '.join(table.key)}.",
        )  # fmt: skip
        return replace(flow, columns=self._columns(context.operator, lookup, flow.columns))

    def _columns(self, operator: str, lookup: TableLookup, stream: Columns) -> Columns:
        added = [answer.name for answer in lookup.answers]
        return append_columns(operator, stream, added, f"table {self.table}", self.table)

    def declared_types(self, context: PlanContext, arriving: Sequence[Types]) -> Sequence[ComparedColumn]:
        declared = declared_column_types(context.app.tables[self.table]) or {}
        return [
            ComparedColumn(stream, (arriving[0] or {}).get(stream), f"table {self.table}", declared[entry])
            for stream, entry in self.on
            if entry in declared
        ]

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        (types,) = arriving
        table = context.app.tables[self.table]
        check_lookup_key_types(context.operator, table, self.on, types)
        answers = self.lookup(context.operator, table).answers
        return None if types is None else types | {answer.name: answer.type for answer in answers}

    def column_sources(self, context: LineageContext, arriving: Sequence[ColumnSources]) -> ColumnSources:
        node = LineageNode("table", self.table)
        answers = self.lookup(self.kind, context.app.tables[self.table]).answers
        return arriving[0] | {answer.name: ((node, answer.column),) for answer in answers}

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        (frame,) = frames
        table = batch.app.tables[self.table]
        types: Types = dict(frame.dtypes)
        columns = tuple(name for name in frame.columns if not name.startswith("__"))
        lookup = self.lookup(operator, table)
        require_columns(operator, "the stream", lookup.keys, columns, "Correct on=, or add the column with map().")
        self._columns(operator, lookup, columns)
        check_lookup_key_types(operator, table, self.on, types)
        joined = batch.look_up(operator, frame, lookup)
        kept = joined.filter("__matched") if self.how == "inner" else joined
        return kept.drop("__matched")


def build_lookup_join(
    operator: str,
    table: str,
    key: Sequence[str],
    on: On,
    how: How,
    select: Sequence[str] | Mapping[str, str] | None,
    prefix: str,
    args: Sequence[object],
    min_match_rate: float | None,
) -> LookupJoin:
    """Return the lookup for a user's arguments; `operator` is its id."""
    check_join_options(operator, how, min_match_rate)
    pairs = pair_key_columns(operator, "table", table, key, on)
    chosen = parse_selection(operator, list(select) if isinstance(select, Mapping) else select, prefix)
    types: dict[str, str] = {}
    if isinstance(select, Mapping):
        for item, kind in zip(chosen or (), select.values(), strict=True):
            types[item.column] = Field(item.column, kind).type
    return LookupJoin(table, pairs, how, chosen, tuple(types.items()), prefix, tuple(args), min_match_rate)
