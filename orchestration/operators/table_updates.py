"""What a remote table can't be asked, found when an application is planned: pure, of what table and records declare."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from dagster_adjunct.orchestration.operators.batch_context import BatchContext, ChangedColumns, TableSend
from dagster_adjunct.orchestration.operators.columns import (
    Types,
    first_duplicate,
    list_hidden_columns,
    require_columns,
    validate_column_names,
)
from dagster_adjunct.orchestration.operators.operator import (
    ComparedColumn,
    Declarations,
    Exchange,
    Flow,
    KeyedTable,
    PassThroughSpec,
    PlanContext,
    Requirement,
)
from dagster_adjunct.orchestration.operators.sends import exchange_before_stream, exchange_before_table
from dagster_adjunct.orchestration.operators.stream_facts import (
    ColumnSources,
    LineageNode,
    StreamFacts,
    add_sources,
    require_facts,
    sources_from_sql,
)
from dagster_adjunct.resources.backends.columns import Column, Kind, parse_column
from dagster_adjunct.resources.common import split_stream_name
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.schemas.column_sql import quote_name
from dagster_adjunct.resources.sql.checking import check_expression
from dagster_adjunct.resources.sql.parser import parse_expression
from dagster_adjunct.resources.sql.syntax_checks import did_you_mean
from dagster_adjunct.resources.sql.types import expression_type
from dagster_adjunct.resources.tables.arrow import DEFAULT, UPDATE
from dagster_adjunct.resources.tables.layers import Capabilities
from dagster_adjunct.resources.tables.operation import UpdateContract

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


Columns: TypeAlias = Mapping[str, str] | Sequence[str]
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Update:
    """The expressions of an update: pairs of a table's column and what it is set to, or what is added or appended.

    `remove` names columns that lose their value. `if_missing` is the record to begin with, None where there is none.
    """

    set: Pairs = ()
    add: Pairs = ()
    append: Pairs = ()
    remove: tuple[str, ...] = ()
    if_missing: Pairs | None = None

    @property
    def parts(self) -> dict[str, Pairs]:
        """What is done to columns, by the names that `Changes` has for it."""
        return {name: pairs for name in ("set", "add", "append") if (pairs := getattr(self, name))}

    @property
    def columns(self) -> tuple[str, ...]:
        """The table's columns that an update changes."""
        return (*(name for pairs in self.parts.values() for name, _ in pairs), *self.remove)

    @property
    def written(self) -> tuple[tuple[str, str, str], ...]:
        """Every expression, as (part, the table's column, expression); the default record's part is "if_missing"."""
        parts = {**self.parts, "if_missing": self.if_missing or ()}
        return tuple((part, name, expression) for part, pairs in parts.items() for name, expression in pairs)

    def expressions(self) -> tuple[str, ...]:
        """Return the structs, as `map` takes them."""
        structs = [f"'{name}', {struct_expression(pairs)}" for name, pairs in self.parts.items()]
        # Spark has no struct without fields: a boolean stands for one, where an update only removes columns.
        update = f"named_struct({', '.join(structs)})" if structs else "true"
        return (f"{update} as {UPDATE}", *default_expression(self.if_missing))


def wrap_appended_values(update: Update, frame: DataFrame) -> Update:
    """Return the update where what is appended are lists: a single value is a list of it, null appends nothing."""
    if not update.append:
        return update
    kinds = frame.selectExpr(*[expression for _, expression in update.append]).schema.fields
    return replace(
        update,
        append=tuple(
            (name, expression if field.dataType.typeName() == "array" else _as_list(expression))
            for (name, expression), field in zip(update.append, kinds, strict=True)
        ),
    )


def _as_list(expression: str) -> str:
    return f"case when ({expression}) is not null then array({expression}) end"


def default_expression(pairs: Pairs | None) -> tuple[str, ...]:
    """Return the expression of a default record, for `map`; none where there is no default."""
    if pairs is None:
        return ()
    # Spark has no struct without fields: a boolean says that the default has none.
    return (f"{struct_expression(pairs) if pairs else '(true)'} as {DEFAULT}",)


def struct_expression(pairs: Pairs) -> str:
    """Return the struct of these columns in Spark SQL."""
    return f"named_struct({', '.join(f'{_sql_string(name)}, {expression}' for name, expression in pairs)})"


def parse_pairs(what: str, columns: Columns, *, empty: bool = False) -> Pairs:
    """Return columns and their expressions, given as a mapping or as a list of columns that keep their names."""
    if isinstance(columns, str):
        raise ConfigurationError(
            f"{what} is the one string {columns!r}: expected names, or {{table column: Spark SQL expression}}.",
            f"Write [{columns!r}].",
            argument=what.rpartition(" ")[2].rstrip("="),
        )
    pairs = dict(columns) if isinstance(columns, Mapping) else {name: quote_name(name) for name in columns}
    names = validate_column_names(what, list(pairs))
    for name in names:
        if not isinstance(pairs[name], str) or not pairs[name].strip():
            raise ConfigurationError(
                f"{what} gives {name!r} the expression {pairs[name]!r}: expected Spark SQL.",
                "Write it as a string, a text within quotes of its own: \"'north'\".",
                argument=what.rpartition(" ")[2].rstrip("="),
            )
    if not names and not empty:
        raise ConfigurationError(
            f"{what} names no column.", "Name at least one.", argument=what.rpartition(" ")[2].rstrip("=")
        )
    return tuple((name, pairs[name]) for name in names)


def build_update(
    what: str,
    key: Sequence[str],
    set: Columns | None,
    add: Columns | None,
    append: Columns | None,
    remove: Sequence[str],
    if_missing: Columns | None,
) -> Update:
    """Return the update that a user's arguments ask for; `what` says in errors where."""
    given = {"set": set, "add": add, "append": append}
    parts = {name: parse_pairs(f"{what}: {name}=", columns, empty=True) for name, columns in given.items() if columns}
    gone = validate_column_names(f"{what}: remove=", remove)
    default = None if if_missing is None else parse_pairs(f"{what}: if_missing=", if_missing, empty=True)
    update = Update(remove=gone, if_missing=default, **parts)
    if not update.columns:
        raise ConfigurationError(f"{what} changes nothing.", "Give set=, add=, append= or remove=.", argument="set")
    double = first_duplicate(update.columns)
    if double is not None:
        raise ConfigurationError(
            f"{what} changes column {double!r} twice.",
            "Name a column in one of set, add, append and remove.",
            column=double,
        )
    keyed = [name for name in update.columns if name in key]
    if keyed:
        raise ConfigurationError(
            f"{what} changes {keyed[0]!r}, which is in the table's key ({', '.join(key)}).",
            "Leave it out: the records of another key are other records.",
            argument="set",
        )
    check_key_unchanged(f"{what}: if_missing=", key, default or ())
    return update


def check_key_unchanged(what: str, key: Sequence[str], pairs: Pairs) -> None:
    """Refuse columns of a record that give it another key than that of the record that they are made of."""
    for name, expression in pairs:
        if name in key and (parse_expression(expression).column or "").lower() != name.lower():
            raise ConfigurationError(
                f"{what} gives {name!r}, which is in the table's key ({', '.join(key)}), the expression "
                f"{expression!r}: a record has the key by which it is looked up.",
                f"Leave {name!r} out, the key is part of the record by itself; where it belongs to another, compute "
                "that before.",
                argument=what.rpartition(" ")[2].rstrip("="),
                column=name,
            )


def _sql_string(name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


_WIDENS_TO = {Kind.INTEGER: (Kind.FLOAT, Kind.DECIMAL)}
_NUMBERS = (Kind.INTEGER, Kind.FLOAT, Kind.DECIMAL)
_ADDABLE = (*_NUMBERS, Kind.JSON, Kind.OTHER)
_UNORDERED = (Kind.BOOLEAN, Kind.LIST, Kind.JSON)
# Of the types that Spark has and columns don't, these may become one of theirs; a struct is an object in JSON.
_MAY_BE_ANY = re.compile(r"void$|null$|string collate ")
_NEVER_IN_JSON = re.compile(
    r"(?:^|[<:,])(?:map<|(?:interval|date|timestamp|timestamp_ntz|time|decimal|binary|variant)\b(?!\s*:))"
)
_APPENDABLE = (Kind.LIST, Kind.OTHER)


@dataclass(frozen=True, slots=True)
class TableSink:
    """A table and what is sent to it; facts that a table of another kind does not tell are taken for granted."""

    table: KeyedTable
    send: TableSend

    @property
    def update(self) -> Update | None:
        return self.send.update

    @property
    def function(self) -> Any:
        return getattr(self.table, "write_function", None)

    @property
    def columns(self) -> dict[str, str] | None:
        """The table's columns and their types, where they are declared."""
        tell = getattr(self.function, "column_types", None)
        declared: dict[str, str] | None = None if tell is None else tell()
        return declared

    @property
    def newest_by(self) -> str | None:
        return getattr(self.table, "newest_by", None)

    @property
    def idempotent(self) -> bool:
        return bool(getattr(self.table, "idempotent", False))

    @property
    def begins_records(self) -> bool:
        """Whether updates may come with defaults."""
        return self.send.contract is UpdateContract.UPDATE_WITH_DEFAULTS

    @property
    def changes(self) -> frozenset[str]:
        """What updates do to columns, by the names of `Changes`."""
        if self.update is None:
            return frozenset({"set"})
        return frozenset(self.update.parts) | ({"remove"} if self.update.remove else frozenset())


def check_sink(operator: str, sink: TableSink) -> None:
    """Raise PlanningError for the first thing that the table can't do, whatever the records hold."""
    for problem, step in _sink_problems(sink):
        raise PlanningError(f"{operator}: {problem}", step, operator=operator)


def _sink_problems(sink: TableSink) -> Iterator[tuple[str, str]]:
    table, function = f"table {sink.table.name}", sink.function
    if hasattr(sink.table, "write_function") and function is None:
        yield f"{table} has no write function, and records are sent to it.", "Declare it with write_function=…."
    if function is None:
        return
    name, key = type(function).__name__, getattr(function, "key", None)
    stored = () if key is None else (key,) if isinstance(key, str) else tuple(key)
    if stored and sorted(stored) != sorted(sink.table.key):
        yield (
            f"{table} has the key ({', '.join(sink.table.key)}), and its {name} ({', '.join(stored)}).",
            "Declare both with the same columns.",
        )
    can = getattr(function, "capabilities", None)
    if can is None:
        return
    if sink.send.args and not can.takes_args:
        yield (
            f"{table} gets {len(sink.send.args)} extra argument(s), and {name} has no use for any.",
            "Leave args= out, or give the table a function of your own that takes them.",
        )
    for condition in ("newest_by", "idempotent"):
        if getattr(sink, condition) and not getattr(can, condition):
            yield (
                f"{table} is declared with {condition}, and {name} can't hold a write to a condition.",
                "Leave it out, or choose a store that can: PostgreSQL, SQLite, DynamoDB or Redis.",
            )
    if sink.send.contract is not None:
        yield from _update_problems(sink, table, name, can)


def _update_problems(sink: TableSink, table: str, name: str, can: Capabilities) -> Iterator[tuple[str, str]]:
    if getattr(sink.table, "cache", None) is not None:
        yield (
            f"{table} has a cache, and updates would leave it with records that are no more.",
            "Declare another RemoteTable without cache= for the updates.",
        )
    if getattr(getattr(sink.table, "batches", None), "compact", False):
        yield (
            f"{table} has a batch that compacts, which keeps one update of a key, and all of them have to be applied.",
            "Declare it with a complete batch.",
        )
    if not can.updates:
        yield (
            f"{table} is sent updates, and {name} has none: it puts whole records.",
            "Send whole records without a contract, or override update() in the function.",
        )
    lacking = sorted(sink.changes - can.changes) if can.changes else []
    if lacking:
        yield (
            f"{table}: {name} can't {' or '.join(lacking)} columns; it can {', '.join(sorted(can.changes))}.",
            "Set what it should be, or choose a store that can.",
        )
    if sink.begins_records and not (
        can.puts_if_absent or can.updates_with_defaults or getattr(sink.table, "defaults_may_overwrite", False)
    ):
        yield (
            f"{table}: {name} can't put a record only where there is none, so a default could replace one that "
            "another writer began in the same moment.",
            "Give the function put_if_absent(), or accept that with RemoteTable(…, defaults_may_overwrite=True), or "
            "use UPDATE_ONLY.",
        )
    if sink.newest_by is not None and not sink.idempotent and sink.changes & {"add", "append"}:
        yield (
            f"{table} keeps what is newest by {sink.newest_by!r}, and an update of the same time is applied again: "
            "what it adds or appends would be there twice after a crash.",
            "Declare the table with idempotent=True, too.",
        )


def check_sink_columns(operator: str, sink: TableSink, types: Types, stored: dict[str, str] | None = None) -> None:
    """Raise PlanningError for columns that the table does not have, or has with other types, as far as known.

    `types` are those of the records; the columns within their structs have names like "update.seats". `stored` are the
    table's columns where they are known better than they are declared.
    """
    for problem, step in _column_problems(sink, types, stored):
        raise PlanningError(f"{operator}: table {sink.table.name}{problem}", step, operator=operator)


def compare_sink_types(sink: TableSink, types: Types) -> list[ComparedColumn]:
    """Return what is written to the table's columns, by their names there, with the types on both sides."""
    columns, known = sink.columns or {}, types or {}
    if sink.update is not None:
        written = [(name, known.get(name)) for name in sink.table.key]
        for pairs in (sink.update.set, sink.update.add, sink.update.append):
            written += [(name, _type(text, types)) for name, text in pairs]
    else:
        unknown = dict.fromkeys(columns) if sink.send.contract is None else {}
        written = list((_sent_types(sink, types) or unknown).items())
    written += [] if sink.send.contract is None else _default_types(sink, types).items()
    return [
        ComparedColumn(name, kind, f"table {sink.table.name}", columns[name])
        for name, kind in written
        if name in columns and parse_column(name, columns[name]).kind not in (Kind.OTHER, Kind.JSON)
    ]


def find_summed_columns(sink: TableSink, types: Types) -> frozenset[str]:
    """Return the columns to which updates add what is a number, by the table's declared columns or by its own type."""
    columns = sink.columns or {}

    def number(name: str, text: str) -> bool:
        known = (columns.get(name), _type(text, types))
        return any(kind is not None and parse_column(name, kind).kind in _NUMBERS for kind in known)

    return frozenset(name for name, text in (() if sink.update is None else sink.update.add) if number(name, text))


def _column_problems(sink: TableSink, types: Types, stored: dict[str, str] | None) -> Iterator[tuple[str, str]]:
    sent = _sent_types(sink, types)
    if sent is None:
        return
    if sink.send.contract is None and any(name.startswith(f"{UPDATE}.") for name in types or ()):
        yield (
            " is sent updates without a contract, as whole records.",
            "May updates begin records? send_to(table, UpdateContract.UPDATE_ONLY), or UPDATE_WITH_DEFAULTS.",
        )
    newest_by = sink.newest_by
    if newest_by is not None and newest_by not in sent:
        yield (
            f" keeps what is newest by {newest_by!r}, which is not among what is sent: {', '.join(sent)}.",
            f"Send it with each record: {'set=' if sink.update else ''}{{'{newest_by}': …}}."
            if sink.send.contract is not None
            else "Keep the column.",
        )
    columns = sink.columns if stored is None else stored
    yield from _newest_by_problems(sink, sent, columns)
    if columns is None:
        return
    defaults = {} if sink.send.contract is None else _default_types(sink, types)
    update = sink.update
    added = dict(() if update is None else update.add)
    texts = added if update is None else dict((*update.set, *update.add))
    for name, kind in (*sent.items(), *defaults.items()):
        if name not in columns:
            step = f"{did_you_mean(name, columns)}Correct the name, or add the column to it."
            yield f" has no column {name!r}; it has {', '.join(columns)}.", step
        elif not _fits(kind, columns[name]) and (
            name not in added or parse_column(name, columns[name]).kind in _ADDABLE
        ):
            yield (
                f" has the column {name!r} as {columns[name]}, and {kind} is sent.",
                _suggest_cast(texts.get(name, name), kind, columns[name]),
            )
    yield from _member_problems(sink, types, columns)
    yield from _element_problems(sink, types, columns)
    appended = (*_APPENDABLE, Kind.JSON) if getattr(sink.function, "appends_to_json", True) else _APPENDABLE
    steps = (("add", _ADDABLE, "Add to a number, or members to JSON."), ("append", appended, "Append to an array."))
    for part, kinds, step in steps:
        for name, _ in () if sink.update is None else getattr(sink.update, part):
            if parse_column(name, columns[name]).kind not in kinds:
                yield f" has the column {name!r} as {columns[name]}, and an update would {part} to it.", step


def _member_problems(sink: TableSink, types: Types, columns: dict[str, str]) -> Iterator[tuple[str, str]]:
    """What is added to JSON: a struct, whose members go into the object there."""
    for name, text in () if sink.update is None else sink.update.add:
        kind = (types or {}).get(f"{UPDATE}.{name}") or _type(text, types)
        if kind is None or parse_column(name, columns[name]).kind is not Kind.JSON:
            continue
        if not kind.startswith("struct<") and _MAY_BE_ANY.match(kind) is None:
            yield (
                f" has the column {name!r} as {columns[name]}, and {kind} is added to it.",
                f"Add members to it: named_struct('…', {text}).",
            )


def _element_problems(sink: TableSink, types: Types, columns: dict[str, str]) -> Iterator[tuple[str, str]]:
    """What is appended: one element, or an array of them."""
    for name, text in () if sink.update is None else sink.update.append:
        kind, column = (types or {}).get(f"{UPDATE}.{name}") or _type(text, types), parse_column(name, columns[name])
        if kind is None:
            continue
        appended, element = parse_column("sent", kind), column.element or column
        if not _fits_column(appended.element or appended, element):
            yield (
                f" has the column {name!r} as {columns[name]}, and {kind} is appended to it.",
                _suggest_cast(text, kind, f"{element.type}{element.size}"),
            )


def _newest_by_problems(
    sink: TableSink, sent: dict[str, str | None], columns: dict[str, str] | None
) -> Iterator[tuple[str, str]]:
    """What newest_by can't go by: a column that updates do not set, and values that have no order."""
    name = sink.newest_by
    if name is None or name not in sent:
        return
    if sink.update is not None and name not in {column for column, _ in sink.update.set}:
        yield (
            f" keeps what is newest by {name!r}, and updates do not set it: what is added or removed is no time.",
            f"Set it with each update: set={{'{name}': …}}.",
        )
    told = sent[name] or (columns or {}).get(name)
    if told is not None and parse_column(name, told).kind in _UNORDERED:
        yield (
            f" keeps what is newest by {name!r}, which is {told}: expected a time, a date, a number or a text.",
            "Name a column whose values grow with time.",
        )


def _sent_types(sink: TableSink, types: Types) -> dict[str, str | None] | None:
    """Return what is sent as the table's columns, None where that is not known."""
    if sink.update is not None:
        known = types or {}
        keys: dict[str, str | None] = {name: known.get(name) for name in sink.table.key}
        pairs = {name: known.get(f"{UPDATE}.{name}") or _type(text, types) for name, text in sink.update.set}
        added = {name: known.get(f"{UPDATE}.{name}") or _type(text, types) for name, text in sink.update.add}
        return keys | pairs | added | {name: None for name in sink.update.columns if name not in {**pairs, **added}}
    if types is None:
        return None
    if sink.send.contract is None:
        return {name: kind for name, kind in types.items() if "." not in name}
    inside = {name: kind for name, kind in types.items() if name.startswith(f"{UPDATE}.")}
    if not inside:
        return None
    keys = {name: types.get(name) for name in sink.table.key}
    return keys | {name.partition(".")[2]: kind for name, kind in inside.items()}


def _default_types(sink: TableSink, types: Types) -> dict[str, str | None]:
    if sink.update is not None:
        pairs, known = sink.update.if_missing or (), types or {}
        return {name: known.get(f"{DEFAULT}.{name}") or _type(text, types) for name, text in pairs}
    inside = {name: kind for name, kind in (types or {}).items() if name.startswith(f"{DEFAULT}.")}
    return {name.partition(".")[2]: kind for name, kind in inside.items()}


def _type(expression: str, types: Types) -> str | None:
    return expression_type(parse_expression(expression), types or {})


def _fits(sent: str | None, declared: str) -> bool:
    """Whether values of a type can go into a column; what is not known of either may."""
    return sent is None or _fits_column(parse_column("sent", sent), parse_column("declared", declared))


def _fits_column(sent: Column, declared: Column) -> bool:
    ours, theirs = sent.kind, declared.kind
    if theirs is Kind.OTHER or ours is Kind.JSON:
        return True
    if theirs is Kind.JSON:
        return _NEVER_IN_JSON.search(sent.type) is None
    if sent.type.startswith("array<…"):  # of what is not known
        return theirs is Kind.LIST
    if sent.element is not None and declared.element is not None:
        return _fits_column(sent.element, declared.element)
    if ours is Kind.OTHER:
        return _MAY_BE_ANY.match(sent.type) is not None
    return ours is theirs or theirs in _WIDENS_TO.get(ours, ())


def _suggest_cast(name: str, sent: str | None, declared: str) -> str:
    """What makes a value of the type of `sent` one that the column takes."""
    kind = parse_column("declared", declared).kind
    if kind is Kind.JSON:
        if (sent or "").startswith("map<"):
            return "Give its members names: named_struct(…)."
        if (sent or "").startswith(("struct<", "array<")):
            return "Cast what is in it and no text, number or boolean: to string, say."
        return f"Cast it: cast({name} as string)."
    if kind is Kind.STRING and (sent or "").startswith(("map<", "struct<", "array<")):
        return f"Make a text of it: to_json({name})."
    return f"Cast it: cast({name} as {declared})."


@dataclass(frozen=True, slots=True)
class SendToTable(PassThroughSpec):
    """Records written to a remote table, as `send` says."""

    kind: ClassVar[str] = "send-to-table"
    send: TableSend

    @property
    def writes(self) -> str:
        return self.send.table

    @property
    def sql(self) -> Sequence[str]:
        return tuple(expression for _, _, expression in self._written)

    @property
    def _written(self) -> Sequence[tuple[str, str, str]]:
        return () if self.send.update is None else self.send.update.written

    @property
    def adds(self) -> bool:
        update = self.send.update
        return update is not None and bool(update.add or update.append)

    def target(self, app: Declarations) -> LineageNode:
        return LineageNode("table", self.send.table)

    def summary(self) -> str:
        contract = f" ({self.send.contract.value})" if self.send.contract is not None else ""
        update, parts = self.send.update, ""
        if update is not None:
            parts = "".join(f", {part} {', '.join(name for name, _ in pairs)}" for part, pairs in update.parts.items())
            parts += f", remove {', '.join(update.remove)}" if update.remove else ""
        return f"table {self.send.table}{contract}{parts}"

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        table = self.send.table
        key = context.app.table_key(table)
        require_columns(context.operator, "the stream", key, flow.columns, f"They are the key of table {table}.")
        check_sink(context.operator, self._sink(context.app))
        for part, name, expression in self._written:
            where = f"Correct {part}= for column {name!r} of table {table}."
            check_expression(context.operator, expression, flow.columns, next_step=where)
        if self.send.contract is not None and self.send.update is None:
            require_columns(
                context.operator, "the stream", (UPDATE,), flow.columns,
                f"With a contract table {table} takes updates: give records their form with "
                ".map(*update_message(…)), or write stream.update(table, set={…}); or leave the contract out.",
            )  # fmt: skip
        return flow

    def declared_types(self, context: PlanContext, arriving: Sequence[Types]) -> Sequence[ComparedColumn]:
        (types,) = arriving
        return compare_sink_types(self._sink(context.app), types)

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        (types,) = arriving
        for expression in () if types is None else self.sql:
            check_expression(context.operator, expression, tuple(types or ()), types)
        check_sink_columns(context.operator, self._sink(context.app), types)
        return types

    def changed(self, app: Declarations, arriving: Types) -> ChangedColumns | None:
        update = self.send.update
        if update is None:
            return None
        summed = find_summed_columns(self._sink(app), arriving)
        return ChangedColumns(
            frozenset(name for name, _ in update.set) | frozenset(update.remove),
            summed,
            frozenset(name for name, _ in update.append),
            frozenset(name for name, _ in update.add) - summed,
            frozenset(name for name, _ in update.if_missing or ()) - frozenset(app.table_key(self.send.table)),
        )

    def _sink(self, app: Declarations) -> TableSink:
        return TableSink(app.tables[self.send.table], self.send)

    def exchange_before(self, context: PlanContext, flow: Flow, partitions: int) -> Exchange | None:
        table = self.send.table
        return exchange_before_table(context.operator, table, context.app.table_key(table), flow, partitions)

    def written_columns(self, arriving: ColumnSources) -> ColumnSources:
        """Of update messages, a table's columns are those of the update and of the default record."""
        written: ColumnSources = {}
        if self.send.update is not None:
            for _, name, expression in self._written:
                add_sources(written, name, sources_from_sql(expression, arriving))
            return written
        for name, sources in arriving.items():
            add_sources(
                written, name.partition(".")[2] if name.startswith((f"{UPDATE}.", f"{DEFAULT}.")) else name, sources
            )
        return written

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        """Write the records; what goes on are the records as they came, computed once."""
        (frame,) = frames
        if batch.has_consumers(operator):
            frame = batch.materialize(operator, frame)
        written = frame
        if self.send.update is not None:
            key = [quote_name(name) for name in batch.app.table_key(self.send.table)]
            update = wrap_appended_values(self.send.update, frame)
            hidden = [quote_name(name) for name in list_hidden_columns(frame)]
            written = frame.selectExpr(*hidden, *key, *update.expressions())
        batch.write(operator, written, self.send)
        return frame


@dataclass(frozen=True, slots=True)
class SendToDataset(PassThroughSpec):
    """Records written to the stream that feeds a dataset."""

    kind: ClassVar[str] = "send-to-table"
    table: str

    @property
    def writes(self) -> str:
        return self.table

    @property
    def feeds(self) -> str:
        return self.table

    def target(self, app: Declarations) -> LineageNode:
        return LineageNode("stream", self._fed(app))

    def _fed(self, app: Declarations) -> str:
        stream = app.dataset(self.table).stream
        assert stream is not None  # MessageStream.send_to refuses others
        return stream

    def summary(self) -> str:
        return f"dataset {self.table}"

    def requirements(self, app: Declarations) -> Sequence[Requirement | None]:
        dataset = app.dataset(self.table)
        if dataset.partitions is None:
            return ()
        return (Requirement(dataset.name, dataset.partitions, None, feeds=True),)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        key = context.app.dataset(self.table).key
        require_columns(context.operator, "the stream", key, flow.columns, f"They are the key of table {self.table}.")
        return flow

    def exchange_before(self, context: PlanContext, flow: Flow, partitions: int) -> Exchange | None:
        facts = require_facts(context.catalog, self._fed(context.app), context.operator)
        key = facts.key or context.app.dataset(self.table).key
        stream = StreamFacts(facts.name, facts.partitions, key, facts.partitioner)
        return exchange_before_stream(context.operator, "dataset", stream, flow, partitions)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        """Write the records; the dataset takes its changes when it next advances.

        The stream is there, as planning asks, and stays as it is: how it is spread is its own, and need not be as the
        dataset's buckets are, which another deployment may change.
        """
        (frame,) = frames
        fed = self._fed(batch.app)
        stream = batch.system_of(fed).info(split_stream_name(fed)[1])
        batch.send(operator, frame, fed, key=stream.key, partitions=stream.partitions)
        return frame
