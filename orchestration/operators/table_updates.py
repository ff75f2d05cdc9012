"""`SendToTable`, which sends records or updates to a remote table, and users' arguments for
updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

from dagster_adjunct.orchestration.operators.batch import Batch, Frame
from dagster_adjunct.orchestration.operators.columns import (
    Types,
    first_duplicate,
    list_hidden_columns,
    validate_column_names,
)
from dagster_adjunct.orchestration.operators.joins import describe_on
from dagster_adjunct.orchestration.operators.lookup_join import raise_first_problem
from dagster_adjunct.orchestration.operators.lookups import Pairs
from dagster_adjunct.orchestration.operators.operator import (
    Exchange,
    Flow,
    PassThroughSpec,
    PlanContext,
    expressions_need,
)
from dagster_adjunct.orchestration.operators.sends import exchange_before_table
from dagster_adjunct.orchestration.operators.stream_facts import (
    ColumnFacts,
    Columns,
    ColumnSources,
    DeclaredApplication,
    LineageNode,
    add_sources,
    sources_from_sql,
)
from dagster_adjunct.orchestration.operators.table_keys import (
    KeySources,
    check_key_free,
    check_key_unchanged,
    key_expressions,
    require_key,
)
from dagster_adjunct.orchestration.operators.table_sinks import (
    TableSink,
    check_sink_columns,
    compare_sink_types,
    find_sink_problems,
    find_summed_columns,
)
from dagster_adjunct.orchestration.operators.updates import (
    EVERY_COLUMN,
    ChangedColumns,
    TableSend,
    Update,
    default_expression,
    struct_expression,
)
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.schemas.paths import (
    NamedPath,
    path_expression,
    read_named_path,
    write_path,
)
from dagster_adjunct.resources.schemas.schema import quote_name
from dagster_adjunct.resources.sql.checking import check_expression
from dagster_adjunct.resources.sql.expression import parse_expression
from dagster_adjunct.resources.tables.arrow import UPDATE
from dagster_adjunct.resources.validation import validated

Expressions: TypeAlias = Mapping[str, str] | Sequence[str]
"""{table column: Spark SQL expression}, or columns that keep their names."""


def parse_pairs(call: str, argument: str, columns: Expressions, *, empty: bool = False) -> Pairs:
    """Return pairs (column, expression), given as a mapping or as a list of columns that keep their
    names.

    In a list, the path of a value gets the name of its last step, or that after "as". `call`
    ("update of planes after join-2") and `argument` ("set") are named in errors. No columns are an
    error unless `empty`.
    """
    what = f"{call}: {argument}="
    if not columns and not empty:
        raise argument_error(f"{what} names no column", "at least one", argument=argument)
    if isinstance(columns, Mapping):
        pairs = tuple(columns.items())
    else:
        pairs = _pairs_of_paths(what, columns)
    validate_column_names(what, [name for name, _ in pairs])
    for name, text in pairs:
        found = f"{what} gives {name!r} the value {text!r}"
        if not text.strip():
            expected = "Spark SQL as a string, a text in quotes of its own: \"'north'\""
            raise argument_error(found, expected, argument=argument)
        alias = parse_expression(text).alias
        if alias is not None:
            expected = f"the expression without 'as {alias}'"
            raise argument_error(found, expected, argument=argument, column=name)
    return pairs


def _pairs_of_paths(what: str, columns: Sequence[str]) -> Pairs:
    """Return pairs (column, expression) for a list of columns and paths; raise ConfigurationError
    if two of them have the same name. `what` names call and argument in that error.
    """
    pairs = []
    for path in map(read_named_path, columns):
        pairs.append((path.name, path_expression(path.steps)))
    double = first_duplicate([name for name, _ in pairs])
    if double is not None:
        problem = f"{what} names column {double!r} twice."
        step = "Name it once, or give a path another name: 'home.city as home_city'."
        raise ConfigurationError(problem, step, column=double)
    return tuple(pairs)


def build_update(
    call: str,
    key: KeySources,
    set: Expressions | None,
    add: Expressions | None,
    append: Expressions | None,
    remove: Sequence[str],
    if_missing: Expressions | None,
) -> Update:
    """Return the update for a user's arguments.

    `call` names the operator in errors: "update of planes after join-2". `key` has the columns of
    the table's key, which the update must not change.
    """
    parts = {}
    for name, columns in {"set": set, "add": add, "append": append}.items():
        parts[name] = parse_pairs(call, name, columns or (), empty=True)
    removed = validate_column_names(f"{call}: remove=", remove)
    default = None
    if if_missing is not None:
        default = parse_pairs(call, "if_missing", if_missing, empty=True)
        check_key_unchanged(call, "if_missing", default, key, key_argument="on")
    update = Update(remove=removed, if_missing=default, **parts)
    if not update.columns:
        step = "Give set=, add=, append= or remove=."
        raise ConfigurationError(f"{call} changes nothing.", step, argument="set")
    double = first_duplicate(update.columns)
    if double is not None:
        step = "Name a column in one of set, add, append and remove."
        raise ConfigurationError(f"{call} changes column {double!r} twice.", step, column=double)
    for name in update.columns:
        if name in key:
            problem = f"{call} changes {name!r}, which is in the table's key ({', '.join(key)})."
            step = "Leave it out: a record with another key is another record."
            raise ConfigurationError(problem, step, argument="set")
    return update


@validated
def update_message(
    *, key: str | Sequence[str], update: Expressions, default: Expressions | None = None
) -> tuple[str, ...]:
    """Return what `map` takes to turn records into (key, UpdateMessage(update, default)).

    `key` names the table's key columns, which the records must have, or gives paths of their
    values, as "customer.id" (the column `id`) or "customer.id as customer". `update` is what each
    message sets: {table column: Spark SQL expression}, or a list of columns and paths, which get
    names likewise. `default` is the record inserted where none exists, before the update is
    applied; it includes the key automatically. `default=[]` is a plain upsert: the first record is
    what the update sets.

        stream.map(*update_message(key="tailnum", update={"last_dest": "dest"}, default=["model",
        "seats"]))
             .send_to(aircraft, UpdateContract.UPDATE_WITH_DEFAULTS)
    """
    key_columns = (key,) if isinstance(key, str) else key
    key_paths = list(map(read_named_path, key_columns))
    validate_column_names("update_message: key=", [path.name for path in key_paths])
    if not key_paths:
        step = "Pass the table's key columns as key=."
        raise ConfigurationError("update_message() has no key.", step, argument="key")
    call = "update_message"
    pairs = parse_pairs(call, "update", update)
    keys = {path.name: write_path(path.steps) for path in key_paths}
    check_key_unchanged(call, "update", pairs, keys, key_argument="key")
    default_pairs = None
    if default is not None:
        default_pairs = parse_pairs(call, "default", default, empty=True)
        check_key_unchanged(call, "default", default_pairs, keys, key_argument="key")
    update_struct = f"{struct_expression(pairs)} as {UPDATE}"
    keys_selected = map(_select_expression, key_paths)
    return (*keys_selected, update_struct, *default_expression(default_pairs))


def _select_expression(path: NamedPath) -> str:
    """Return the Spark SQL expression of a column that is made of a path."""
    expression = path_expression(path.steps)
    if not path.renames:
        return expression
    return f"{expression} as {quote_name(path.name)}"


@dataclass(frozen=True, slots=True)
class SendToTable(PassThroughSpec):
    """Records, or updates made of them, sent to a remote table as `send` describes; the records
    continue.
    """

    kind: ClassVar[str] = "send-to-table"
    send: TableSend

    @property
    def writes(self) -> str:
        return self.send.table

    @property
    def sql(self) -> Sequence[str]:
        return [written.expression for written in self.send.expressions.written]

    def target(self, app: DeclaredApplication) -> LineageNode:
        return LineageNode("table", self.send.table)

    def summary(self) -> str:
        table = f"table {self.send.table}"
        if self.send.on:
            table += f" on {describe_on(self.send.on)}"
        if self.send.contract is not None:
            table += f" ({self.send.contract.value})"
        words = [table]
        update = self.send.expressions
        for part, pairs in update.parts.items():
            words.append(f"{part} {', '.join(dict(pairs))}")
        if update.remove:
            words.append(f"remove {', '.join(update.remove)}")
        return ", ".join(words)

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (columns,) = arriving
        operator = context.operator
        table = self.send.table
        types = columns.types
        key = context.app.table_key(table)
        sink = self._sink(context.app, types)
        require_key(operator, self.send, key, columns)
        raise_first_problem(operator, sink.table, find_sink_problems(sink))
        for written in self.send.expressions.written:
            step = f"Correct {written.argument}= for column {written.column!r} of table {table}."
            check_expression(operator, written.expression, columns.names, types, next_step=step)
        if self._takes_updates:
            step = (
                f"With a contract table {table} takes updates: give records their form with"
                " .map(*update_message(…)), or write stream.update(table, set={…}); or leave the"
                " contract out."
            )
            columns.require_columns(operator, (UPDATE,), step)
        context.declared.extend(compare_sink_types(sink))
        check_sink_columns(operator, sink, types, sink.columns)
        return columns

    @property
    def _takes_updates(self) -> bool:
        """Whether the records are update messages."""
        return self.send.contract is not None and self.send.update is None

    def changed(self, app: DeclaredApplication, arriving: Columns) -> ChangedColumns:
        update = self.send.update
        if update is None:
            return EVERY_COLUMN
        summed = find_summed_columns(self._sink(app, arriving.types))
        default = frozenset(dict(update.if_missing or ()))
        return ChangedColumns(
            set=frozenset((*dict(update.set), *update.remove)),
            summed=summed,
            appended=frozenset(dict(update.append)),
            merged=frozenset(dict(update.add)) - summed,
            begun=default.difference(app.table_key(self.send.table)),
        )

    def spark_need(self, context: PlanContext, arriving: Sequence[Columns]) -> str:
        if self._takes_updates:
            return "updates in records"
        if self.send.expressions.append:
            return "append="
        (columns,) = arriving
        computed = [*key_expressions(self.send, tuple(columns.known)), *self.sql]
        if not computed:
            return ""
        return expressions_need(computed, columns)

    def _sink(self, app: DeclaredApplication, types: Types) -> TableSink:
        """Return the table and this send to it, for records with columns of these types."""
        return TableSink(app.tables[self.send.table], self.send, types)

    def exchange_before(self, context: PlanContext, flow: Flow, partitions: int) -> Exchange | None:
        table = self.send.table
        sources = self.send.key_sources(context.app.table_key(table))
        return exchange_before_table(context.operator, table, sources, flow, partitions)

    def written(self, arriving: Columns) -> Columns:
        written: ColumnSources = {}
        if self.send.update is not None:
            for value in self.send.update.written:
                sources = sources_from_sql(value.expression, arriving.sources)
                add_sources(written, value.column, sources)
        else:
            for name, column in self._records_written(arriving).items():
                fields = column.fields or {name: column}
                for field, part in fields.items():
                    add_sources(written, field, part.sources)
        columns = {name: ColumnFacts(None, sources) for name, sources in written.items()}
        return Columns(columns, typed=False)

    def _records_written(self, arriving: Columns) -> dict[str, ColumnFacts]:
        """Return the columns of whole records as they are written: the key's have the table's
        names.
        """
        moved_to_key = dict(self.send.on)
        written = {}
        for name, column in arriving.known.items():
            if name not in moved_to_key:
                written[name] = column
        for source, name in self.send.on:
            written[name] = arriving.find(source) or ColumnFacts()
        return written

    def compile(self, operator: str, frames: Sequence[Frame], batch: Batch[Frame]) -> Frame:
        """Write the records to the table, and return them unchanged for the operators after it.

        If there are any, the records are computed once for all of them.
        """
        (frame,) = frames
        records = batch.records
        sensitive = batch.planned.sensitive(operator, records.names(frame))
        if batch.planned.has_consumers(operator):
            frame = records.materialize(operator, frame)
        written = self._select_written(operator, frame, batch)
        # The written rows have the key columns under the table's names: on= is applied.
        send = replace(self.send, on=())
        batch.outputs.write(operator, written, send, sensitive=bool(sensitive))
        return frame

    def _select_written(self, operator: str, frame: Frame, batch: Batch[Frame]) -> Frame:
        """Return the records or updates as they are written, with the columns of the key."""
        records = batch.records
        names = tuple(records.names(frame))
        key = batch.planned.app.table_key(self.send.table)
        keys = key_expressions(self.send, names)
        if self.send.update is not None:
            hidden = map(quote_name, list_hidden_columns(names))
            keys = keys or list(map(quote_name, key))
            return records.select_update(frame, [*hidden, *keys], self.send.update)
        if not keys:
            return frame
        check_key_free(operator, self.send, names)
        sources = self.send.key_sources(key)
        others = [quote_name(name) for name in names if name not in sources]
        return records.select(frame, [*others, *keys])
