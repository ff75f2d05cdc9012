"""`SendToTable`, which sends records or updates to a remote table, and the checks of what it
sends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from dagster_adjunct.orchestration.operators.columns import (
    OnNullKey,
    Types,
    first_duplicate,
    list_hidden_columns,
    require_columns,
    validate_column_names,
)
from dagster_adjunct.orchestration.operators.lookup_join import (
    AnyTable,
    Problems,
    function_column_types,
    function_problems,
    raise_first_problem,
)
from dagster_adjunct.orchestration.operators.operator import (
    ComparedColumn,
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
    LineageNode,
    Sources,
    sources_from_sql,
)
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.backends.columns import Column, Kind, parse_column
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.schemas.schema import quote_name, quote_text
from dagster_adjunct.resources.sql.checking import check_expression
from dagster_adjunct.resources.sql.expression import did_you_mean, parse_expression
from dagster_adjunct.resources.sql.types import expression_type
from dagster_adjunct.resources.tables.arrow import DEFAULT, UPDATE
from dagster_adjunct.resources.tables.operation import Capabilities, UpdateContract
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.step.batch import BatchContext


Expressions: TypeAlias = Mapping[str, str] | Sequence[str]
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Update:
    """The expressions that make an update of a record: pairs (the table's column, Spark SQL
    expression).

    The value is assigned (`set`), added or appended. `remove` names columns that are set to null.
    `if_missing` has the default record, to which an update is applied if there is no record; None:
    a missing record is an error.
    """

    set: Pairs = ()
    add: Pairs = ()
    append: Pairs = ()
    remove: tuple[str, ...] = ()
    if_missing: Pairs | None = None

    @property
    def parts(self) -> dict[str, Pairs]:
        """The pairs by kind of change ("set", "add", "append"), without kinds that have none."""
        return {name: pairs for name in ("set", "add", "append") if (pairs := getattr(self, name))}

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the table's columns that an update changes."""
        return (*(name for pairs in self.parts.values() for name, _ in pairs), *self.remove)

    @property
    def written(self) -> tuple[tuple[str, str, str], ...]:
        """All expressions, as (argument, the table's column, expression); the argument is "set",
        "add", "append" or "if_missing"."""
        parts = {**self.parts, "if_missing": self.if_missing or ()}
        return tuple(
            (part, name, expression) for part, pairs in parts.items() for name, expression in pairs
        )

    def expressions(self) -> tuple[str, ...]:
        """Return the expressions by which `map` makes the update and, if there is one, the
        default record.
        """
        structs = [f"'{name}', {struct_expression(pairs)}" for name, pairs in self.parts.items()]
        # Spark has no struct without fields: an update that only removes columns is a boolean.
        update = f"named_struct({', '.join(structs)})" if structs else "true"
        return (f"{update} as {UPDATE}", *default_expression(self.if_missing))


def default_expression(pairs: Pairs | None) -> tuple[str, ...]:
    """Return the expression by which `map` makes the default record; () if `pairs` is None."""
    if pairs is None:
        return ()
    # Spark has no struct without fields: a default record without columns is a boolean.
    return (f"{struct_expression(pairs) if pairs else '(true)'} as {DEFAULT}",)


def struct_expression(pairs: Pairs) -> str:
    """Return the Spark SQL expression of a struct with these fields."""
    arguments = [f"{quote_text(name)}, {expression}" for name, expression in pairs]
    return f"named_struct({', '.join(arguments)})"


def parse_pairs(what: str, columns: Expressions, *, empty: bool = False) -> Pairs:
    """Return pairs (column, expression), given as a mapping or as a list of columns that keep their
    names.

    `what` names operator and argument in errors: "update after join-2: set=".
    """
    argument = what.rpartition(" ")[2].rstrip("=")
    pairs = (
        dict(columns)
        if isinstance(columns, Mapping)
        else {name: quote_name(name) for name in columns}
    )
    names = validate_column_names(what, list(pairs))
    for name in names:
        if not pairs[name].strip():
            expected = "Spark SQL as a string, a text in quotes of its own: \"'north'\""
            raise argument_error(
                f"{what} gives {name!r} the value {pairs[name]!r}", expected, argument=argument
            )
        if (alias := parse_expression(pairs[name]).alias) is not None:
            found, expected = (
                f"{what} gives {name!r} the value {pairs[name]!r}",
                f"the expression without 'as {alias}'",
            )
            raise argument_error(found, expected, argument=argument, column=name)
    if not names and not empty:
        raise argument_error(f"{what} names no column", "at least one", argument=argument)
    return tuple((name, pairs[name]) for name in names)


def build_update(
    what: str,
    key: Sequence[str],
    set: Expressions | None,
    add: Expressions | None,
    append: Expressions | None,
    remove: Sequence[str],
    if_missing: Expressions | None,
) -> Update:
    """Return the update for a user's arguments; `what` names the operator in errors."""
    given = {"set": set, "add": add, "append": append}
    parts = {
        name: parse_pairs(f"{what}: {name}=", columns, empty=True)
        for name, columns in given.items()
        if columns
    }
    removed = validate_column_names(f"{what}: remove=", remove)
    default = (
        None if if_missing is None else parse_pairs(f"{what}: if_missing=", if_missing, empty=True)
    )
    update = Update(remove=removed, if_missing=default, **parts)
    if not update.columns:
        raise ConfigurationError(
            f"{what} changes nothing.", "Give set=, add=, append= or remove=.", argument="set"
        )
    double = first_duplicate(update.columns)
    if double is not None:
        step = "Name a column in one of set, add, append and remove."
        raise ConfigurationError(f"{what} changes column {double!r} twice.", step, column=double)
    keyed = [name for name in update.columns if name in key]
    if keyed:
        problem = f"{what} changes {keyed[0]!r}, which is in the table's key ({', '.join(key)})."
        raise ConfigurationError(
            problem, "Leave it out: a record with another key is another record.", argument="set"
        )
    check_key_unchanged(f"{what}: if_missing=", key, default or ())
    return update


def check_key_unchanged(what: str, key: Sequence[str], pairs: Pairs) -> None:
    """Raise ConfigurationError for expressions that give a key column another value than the
    record has.
    """
    for name, expression in pairs:
        if name in key and (parse_expression(expression).column or "").lower() != name.lower():
            problem = (
                f"{what} gives {name!r}, which is in the table's key ({', '.join(key)}), the"
                f" expression {expression!r}: a record has the key by which it is looked up."
            )
            step = (
                f"Leave {name!r} out: the key is always part of the record. For another key,"
                " compute it before."
            )
            raise ConfigurationError(
                problem, step, argument=what.rpartition(" ")[2].rstrip("="), column=name
            )


@validated
def update_message(
    *, key: str | Sequence[str], update: Expressions, default: Expressions | None = None
) -> tuple[str, ...]:
    """Return what `map` takes to turn records into (key, UpdateMessage(update, default)).

    `key` names the table's key columns, which the records must have. `update` is what each message
    sets: {table column: Spark SQL expression}, or a list of columns that keep their names.
    `default` is the record inserted where none exists, before the update is applied; it includes
    the key automatically. `default=[]` is a plain upsert: the first record is what the update sets.

        stream.map(*update_message(key="tailnum", update={"last_dest": "dest"}, default=["model",
        "seats"]))
             .send_to(aircraft, UpdateContract.UPDATE_WITH_DEFAULTS)
    """
    keys = validate_column_names("update_message: key=", key)
    if not keys:
        raise ConfigurationError(
            "update_message() has no key.", "Pass the table's key columns as key=.", argument="key"
        )
    pairs = parse_pairs("update_message: update=", update)
    first = (
        None if default is None else parse_pairs("update_message: default=", default, empty=True)
    )
    check_key_unchanged("update_message: update=", keys, pairs)
    check_key_unchanged("update_message: default=", keys, first or ())
    return (
        *(quote_name(name) for name in keys),
        f"{struct_expression(pairs)} as {UPDATE}",
        *default_expression(first),
    )


_WIDENS_TO = {Kind.INTEGER: (Kind.FLOAT, Kind.DECIMAL)}
_NUMBERS = (Kind.INTEGER, Kind.FLOAT, Kind.DECIMAL)
_ADDABLE = (*_NUMBERS, Kind.JSON, Kind.OTHER)
_UNORDERED = (Kind.BOOLEAN, Kind.LIST, Kind.JSON)
# Types that no column of a table has, but whose values may fit one. (Structs are objects in JSON.)
_MAY_BE_ANY = re.compile(r"void$|null$|string collate ")
_NEVER_IN_JSON = re.compile(
    r"(?:^|[<:,])(?:map<|(?:interval|date|timestamp|timestamp_ntz|time|decimal|binary|variant)\b(?!\s*:))"
)
_APPENDABLE = (Kind.LIST, Kind.OTHER)


@dataclass(frozen=True, slots=True)
class TableSend:
    """A send to the remote table named `table`: of whole records, or with a `contract` of updates.

    `update` has the expressions that turn each record into an update; without it, the records must
    be update messages. `dead_letters` is how many records of a batch the table may reject
    permanently, which are passed to the next operator; with None, the first one fails the batch.
    `args` are passed to the table's write function. A table with marks stores the position of the
    last record that it applied from each source partition; `marks_as` names this send there.
    """

    table: str
    contract: UpdateContract | None = None
    on_null_key: OnNullKey = "fail"
    update: Update | None = None
    args: tuple[object, ...] = ()
    dead_letters: int | None = None
    marks_as: str | None = None


class ChangedColumns(NamedTuple):
    """The columns of a table that updates change, and how.

    A value is assigned (`set`), a number is added (`summed`), an element is appended to a list
    (`appended`), or a value is added to JSON or to an unknown type (`merged`). `begun` are further
    columns of the default record. Only the effect of sums does not depend on the order of updates.
    """

    set: frozenset[str]
    summed: frozenset[str]
    appended: frozenset[str]
    merged: frozenset[str]
    begun: frozenset[str]

    @property
    def only_sums(self) -> bool:
        return not self._ordered

    @property
    def adds(self) -> bool:
        """Whether applying an update twice differs from applying it once."""
        return bool(self.summed or self.appended or self.merged)

    @property
    def _ordered(self) -> frozenset[str]:
        return self.set | self.appended | self.merged

    def depends_on_order_with(self, other: ChangedColumns) -> bool:
        """Whether the order of two updates matters: both change a column, and one does more than
        add a number.
        """
        return bool(self._ordered & (other._ordered | other.summed)) or bool(
            other._ordered & self.summed
        )


@dataclass(frozen=True, slots=True)
class TableSink:
    """A table and a send to it."""

    table: AnyTable
    send: TableSend

    @property
    def update(self) -> Update:
        """The expressions of the update; an empty `Update` if records or update messages are
        sent.
        """
        return self.send.update or Update()

    @property
    def function(self) -> Any:
        return self.table.write_function

    @property
    def columns(self) -> dict[str, str] | None:
        """{column: type} as the table's write function declares it, or None."""
        return function_column_types(self.function)


def _sink_problems(sink: TableSink) -> Problems:
    """Yield why the table does not support the send, whatever columns the records have."""
    function = sink.function
    if function is None:
        yield (
            " has no write function, and records are sent to it.",
            "Declare it with write_function=….",
        )
        return
    yield from function_problems(sink.table, function, sink.send.args)
    can, name = getattr(function, "capabilities", None), type(function).__name__
    for condition in () if can is None else ("newest_by", "idempotent"):
        if getattr(sink.table, condition) and not getattr(can, condition):
            yield (
                f" is declared with {condition}, and {name} can't make a write conditional.",
                "Leave it out, or choose a store that can: PostgreSQL, SQLite, DynamoDB or Redis.",
            )
    if can is not None and sink.send.contract is not None:
        yield from _update_problems(sink, name, can)


def _update_problems(sink: TableSink, name: str, can: Capabilities) -> Problems:
    table, update = sink.table, sink.update
    if table.cache is not None:
        yield (
            " has a cache, and updates would leave outdated records in it.",
            "Declare another RemoteTable without cache= for the updates.",
        )
    if not can.updates:
        yield (
            f" is sent updates, and {name} supports only whole records.",
            "Send whole records without a contract, or override update() in the function.",
        )
    changes = (
        {*update.parts, *(["remove"] if update.remove else [])} if sink.send.update else {"set"}
    )
    lacking = sorted(changes - can.changes) if can.changes else []
    if lacking:
        yield (
            (
                f": {name} can't {' or '.join(lacking)} columns; it can"
                f" {', '.join(sorted(can.changes))}."
            ),
            "Set the columns to their new values, or choose a store that can.",
        )
    has_safe_defaults = (
        can.puts_if_absent or can.updates_with_defaults or table.defaults_may_overwrite
    )
    if sink.send.contract is UpdateContract.UPDATE_WITH_DEFAULTS and not has_safe_defaults:
        yield (
            (
                f": {name} can't put a record only where there is none, so a default could replace"
                " the record of another writer."
            ),
            (
                "Give the function put_if_absent(), or accept that with RemoteTable(…,"
                " defaults_may_overwrite=True), or use UPDATE_ONLY."
            ),
        )
    newest_by = table.newest_by
    if newest_by is not None and not table.idempotent and changes & {"add", "append"}:
        yield (
            (
                f" keeps the newest record by {newest_by!r}, and applies an update of the same time"
                " again: after a crash it would add or append twice."
            ),
            "Declare the table with idempotent=True, too.",
        )


def check_sink_columns(
    operator: str, sink: TableSink, types: Types, stored: dict[str, str] | None = None
) -> None:
    """Raise PlanningError for a sent column that the table certainly does not have, or has with
    another type.

    `types` are those of the records' columns; fields of structs have names like "update.seats".
    `stored` is {column: type} as the store reports it, used instead of the declared columns.
    """
    raise_first_problem(operator, sink.table, _column_problems(sink, types, stored))


def compare_sink_types(sink: TableSink, types: Types) -> list[ComparedColumn]:
    """Return the table's columns that are written, each with the type of what is sent and the
    declared type.
    """
    columns = sink.columns or {}
    if sink.send.update is not None:
        written = [(name, (types or {}).get(name)) for name in sink.table.key]
        written += [
            (name, _type(text, types))
            for pairs in sink.update.parts.values()
            for name, text in pairs
        ]
    else:
        unknown = dict.fromkeys(columns) if sink.send.contract is None else {}
        written = list((_sent_types(sink, types) or unknown).items())
    written += _default_types(sink, types).items()
    return [
        ComparedColumn(name, kind, f"table {sink.table.name}", columns[name])
        for name, kind in written
        if name in columns and parse_column(name, columns[name]).kind not in (Kind.OTHER, Kind.JSON)
    ]


def find_summed_columns(sink: TableSink, types: Types) -> frozenset[str]:
    """Return the columns to which updates add numbers, as opposed to JSON.

    For that, the column's declared type or the type of the added value must be known to be a
    number.
    """
    columns = sink.columns or {}
    return frozenset(
        name
        for name, text in sink.update.add
        if any(
            kind and parse_column(name, kind).kind in _NUMBERS
            for kind in (columns.get(name), _type(text, types))
        )
    )


def _column_problems(sink: TableSink, types: Types, stored: dict[str, str] | None) -> Problems:
    sent = _sent_types(sink, types)
    if sent is None:
        return
    if sink.send.contract is None and any(name.startswith(f"{UPDATE}.") for name in types or ()):
        yield (
            " is sent updates without a contract, as whole records.",
            (
                "May updates create records? send_to(table, UpdateContract.UPDATE_ONLY), or"
                " UPDATE_WITH_DEFAULTS."
            ),
        )
    columns, update = sink.columns if stored is None else stored, sink.update
    yield from _newest_by_problems(sink, sent, columns)
    if columns is None:
        return
    added = dict(update.add)
    texts = dict((*update.set, *update.add))
    for name, kind in (*sent.items(), *_default_types(sink, types).items()):
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
    yield from _addition_problems(sink, types, columns)


def _addition_problems(sink: TableSink, types: Types, columns: dict[str, str]) -> Problems:
    """Yield a problem for each value that can't be added or appended to its column; `columns` is
    {column: type}.
    """
    update = sink.update
    for name, text in update.add:  # only the members of a struct can be added to JSON
        kind = _sent_type(name, text, types) or "null"
        if (
            parse_column(name, columns[name]).kind is Kind.JSON
            and not kind.startswith("struct<")
            and _MAY_BE_ANY.match(kind) is None
        ):
            yield (
                f" has the column {name!r} as {columns[name]}, and {kind} is added to it.",
                f"Add members to it: named_struct('…', {text}).",
            )
    for name, text in update.append:  # an element, or an array of them
        sent, column = _sent_type(name, text, types), parse_column(name, columns[name])
        if sent is None:
            continue
        appended, element = parse_column("sent", sent), column.element or column
        if not _fits_column(appended.element or appended, element):
            yield (
                f" has the column {name!r} as {columns[name]}, and {sent} is appended to it.",
                _suggest_cast(text, sent, f"{element.type}{element.size}"),
            )
    appendable = (
        (*_APPENDABLE, Kind.JSON)
        if getattr(sink.function, "appends_to_json", True)
        else _APPENDABLE
    )
    for part, pairs, kinds, step in (
        ("add", update.add, _ADDABLE, "Add to a number, or members to JSON."),
        ("append", update.append, appendable, "Append to an array."),
    ):
        for name, _ in pairs:
            if parse_column(name, columns[name]).kind not in kinds:
                yield (
                    (
                        f" has the column {name!r} as {columns[name]}, and an update would"
                        f" {part} to it."
                    ),
                    step,
                )


def _newest_by_problems(
    sink: TableSink, sent: dict[str, str | None], columns: dict[str, str] | None
) -> Problems:
    """Yield problems of the column `newest_by`: it is not sent, updates do not set it, or its
    values have no order.
    """
    name = sink.table.newest_by
    if name is None:
        return
    what, is_update = f" keeps the newest record by {name!r}", sink.send.update is not None
    if name not in sent:
        argument = "set=" if is_update else ""
        yield (
            f"{what}, which is not sent; the columns that are sent are {', '.join(sent)}.",
            (
                f"Send it with each record: {argument}{{'{name}': …}}."
                if sink.send.contract
                else "Keep the column."
            ),
        )
        return
    if is_update and name not in dict(sink.update.set):
        yield (
            f"{what}, and updates do not set it.",
            f"Set it with each update: set={{'{name}': …}}.",
        )
    kind = sent[name] or (columns or {}).get(name)
    if kind is not None and parse_column(name, kind).kind in _UNORDERED:
        yield (
            f"{what}, which is {kind}: expected a time, a date, a number or a text.",
            "Name a column whose values grow with time.",
        )


def _sent_types(sink: TableSink, types: Types) -> dict[str, str | None] | None:
    """Return {the table's column: type of what is sent to it}; None if the sent columns are
    unknown.
    """
    known: dict[str, str | None] = types or {}
    keys = {name: known.get(name) for name in sink.table.key}
    if sink.send.update is not None:
        pairs = (*sink.update.set, *sink.update.add)
        sent = {name: _sent_type(name, text, types) for name, text in pairs}
        return keys | sent | {name: None for name in sink.update.columns if name not in sent}
    if types is None:
        return None
    if sink.send.contract is None:
        return {name: kind for name, kind in types.items() if "." not in name}
    fields = _field_types(UPDATE, known)
    return keys | fields if fields else None


def _field_types(struct: str, types: dict[str, str | None]) -> dict[str, str | None]:
    return {
        name.partition(".")[2]: kind
        for name, kind in types.items()
        if name.startswith(f"{struct}.")
    }


def _default_types(sink: TableSink, types: Types) -> dict[str, str | None]:
    if sink.send.contract is None:
        return {}
    if sink.send.update is None:
        return _field_types(DEFAULT, types or {})
    return {
        name: _sent_type(name, text, types, DEFAULT) for name, text in sink.update.if_missing or ()
    }


def _sent_type(name: str, expression: str, types: Types, struct: str = UPDATE) -> str | None:
    return (types or {}).get(f"{struct}.{name}") or _type(expression, types)


def _type(expression: str, types: Types) -> str | None:
    return expression_type(parse_expression(expression), types or {})


def _fits(sent: str | None, declared: str) -> bool:
    """Whether values of the type `sent` can be stored in a column; an unknown type (None) is
    assumed to fit.
    """
    return sent is None or _fits_column(
        parse_column("sent", sent), parse_column("declared", declared)
    )


def _fits_column(sent: Column, declared: Column) -> bool:
    ours, theirs = sent.kind, declared.kind
    if theirs is Kind.OTHER or ours is Kind.JSON:
        return True
    if theirs is Kind.JSON:
        return _NEVER_IN_JSON.search(sent.type) is None
    if sent.type.startswith("array<…"):  # an array whose element type is unknown
        return theirs is Kind.LIST
    if sent.element is not None and declared.element is not None:
        return _fits_column(sent.element, declared.element)
    if ours is Kind.OTHER:
        return _MAY_BE_ANY.match(sent.type) is not None
    return ours is theirs or theirs in _WIDENS_TO.get(ours, ())


def _suggest_cast(name: str, sent: str | None, declared: str) -> str:
    """Return a next step: how to convert the value sent to the column `name` to its `declared`
    type.
    """
    kind, sent = parse_column("declared", declared).kind, sent or ""
    if kind is Kind.JSON:
        if sent.startswith("map<"):
            return "Give its members names: named_struct(…)."
        if sent.startswith(("struct<", "array<")):
            return "Cast members that are not text, numbers or booleans, for example to string."
        return f"Cast it: cast({name} as string)."
    if kind is Kind.STRING and sent.startswith(("map<", "struct<", "array<")):
        return f"Convert it to text: to_json({name})."
    return f"Cast it: cast({name} as {declared})."


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
        return tuple(expression for _, _, expression in self._update.written)

    @property
    def _update(self) -> Update:
        return self.send.update or Update()

    def target(self, app: Application) -> LineageNode:
        return LineageNode("table", self.send.table)

    def summary(self) -> str:
        contract = f" ({self.send.contract.value})" if self.send.contract is not None else ""
        update = self._update
        parts = "".join(
            f", {part} {', '.join(name for name, _ in pairs)}"
            for part, pairs in update.parts.items()
        )
        removed = f", remove {', '.join(update.remove)}" if update.remove else ""
        return f"table {self.send.table}{contract}{parts}{removed}"

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (columns,) = arriving
        table, names, types = self.send.table, columns.names, columns.types
        key, sink = context.app.table_key(table), self._sink(context.app)
        require_columns(
            context.operator, "the stream", key, names, f"They are the key of table {table}."
        )
        raise_first_problem(context.operator, sink.table, _sink_problems(sink))
        for part, name, expression in self._update.written:
            where = f"Correct {part}= for column {name!r} of table {table}."
            check_expression(context.operator, expression, names, types, next_step=where)
        if self.send.contract is not None and self.send.update is None:
            require_columns(
                context.operator,
                "the stream",
                (UPDATE,),
                names,
                f"With a contract table {table} takes updates: give records their form with "
                ".map(*update_message(…)), or write stream.update(table, set={…}); or leave the"
                " contract out.",
            )
        context.declared.extend(compare_sink_types(sink, types))
        check_sink_columns(context.operator, sink, types)
        return columns

    def changed(self, app: Application, arriving: Columns) -> ChangedColumns | None:
        update = self.send.update
        if update is None:
            return None
        summed = find_summed_columns(self._sink(app), arriving.types)
        return ChangedColumns(
            frozenset(name for name, _ in update.set) | frozenset(update.remove),
            summed,
            frozenset(name for name, _ in update.append),
            frozenset(name for name, _ in update.add) - summed,
            frozenset(name for name, _ in update.if_missing or ())
            - frozenset(app.table_key(self.send.table)),
        )

    def spark_need(self, context: PlanContext, arriving: Sequence[Columns]) -> str:
        if self.send.contract is not None and self.send.update is None:
            return "updates in records"
        if self._update.append:
            return "append="
        return expressions_need(self.sql, arriving[0]) if self.sql else ""

    def _sink(self, app: Application) -> TableSink:
        return TableSink(app.tables[self.send.table], self.send)

    def exchange_before(self, context: PlanContext, flow: Flow, partitions: int) -> Exchange | None:
        table = self.send.table
        return exchange_before_table(
            context.operator, table, context.app.table_key(table), flow, partitions
        )

    def written(self, arriving: Columns) -> Columns:
        written: dict[str, Sources] = {}
        made = [
            (field, part.sources)
            for name, column in arriving.known.items()
            for field, part in (column.fields or {name: column}).items()
        ]
        if self.send.update is not None:
            sources = arriving.sources
            made = [
                (name, sources_from_sql(expression, sources))
                for _, name, expression in self._update.written
            ]
        for name, its in made:
            written[name] = tuple(dict.fromkeys((*written.get(name, ()), *its)))
        return Columns({name: ColumnFacts(None, its) for name, its in written.items()}, typed=False)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        """Write the records and return them unchanged, computed once."""
        (frame,) = frames
        if batch.has_consumers(operator):
            frame = batch.materialize(operator, frame)
        written = frame
        if self.send.update is not None:
            key = [quote_name(name) for name in batch.app.table_key(self.send.table)]
            update = self._with_lists(frame)
            hidden = [quote_name(name) for name in list_hidden_columns(batch.names(frame))]
            written = batch.select_update(frame, (*hidden, *key), update)
        batch.write(operator, written, self.send)
        return frame

    def _with_lists(self, frame: DataFrame) -> Update:
        """Return the update with lists to append: a single value becomes a list of it, null
        appends nothing.
        """
        pairs = self._update.append
        kinds = (
            frame.selectExpr(*[expression for _, expression in pairs]).schema.fields
            if pairs
            else []
        )
        lists = {
            name: (
                text
                if field.dataType.typeName() == "array"
                else f"case when ({text}) is not null then array({text}) end"
            )
            for (name, text), field in zip(pairs, kinds, strict=True)
        }
        return replace(self._update, append=tuple(lists.items()))
