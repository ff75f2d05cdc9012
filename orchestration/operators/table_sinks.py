"""`TableSink`, a remote table with what is sent to it, and checks that it fits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from dagster_adjunct.orchestration.operators.columns import Types, plain_path
from dagster_adjunct.orchestration.operators.lookup_join import (
    Problems,
    function_column_types,
    function_problems,
    raise_first_problem,
)
from dagster_adjunct.orchestration.operators.operator import ComparedColumn
from dagster_adjunct.orchestration.operators.updates import TableSend, Update
from dagster_adjunct.resources.schemas.paths import find_path, split_path, write_path
from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Simple,
    Struct,
    Type,
    TypeTextError,
    is_storable,
    nested_types,
    parse_type,
    write_name,
)
from dagster_adjunct.resources.sql.expression import did_you_mean, parse_expression
from dagster_adjunct.resources.sql.types import expression_type
from dagster_adjunct.resources.table_backends.columns import (
    Column,
    InnerNameError,
    Kind,
    inner_column,
    parse_column,
)
from dagster_adjunct.resources.table_backends.nested_values import parse_inner_name
from dagster_adjunct.resources.tables.arrow import DEFAULT, UPDATE
from dagster_adjunct.resources.tables.operation import Capabilities, UpdateContract
from dagster_adjunct.resources.tables.table import AnyTable

_WIDENS_TO = {Kind.INTEGER: (Kind.FLOAT, Kind.DECIMAL)}
_NUMBERS = (Kind.INTEGER, Kind.FLOAT, Kind.DECIMAL)
_ADDABLE = (*_NUMBERS, Kind.JSON, Kind.OTHER)  # OTHER: of a type that is not known here
_UNORDERED = (Kind.BOOLEAN, Kind.LIST, Kind.JSON, Kind.NESTED)
# Types that no column of a table has, but whose values may fit one.
_MAY_BE_ANY = re.compile(r"void$|null$|string collate ")
# A type with a part that JSON does not have: a map whose keys are not text, or one of these types,
# some of which only Spark has. What is before ":" is the name of a member.
_NEVER_IN_JSON = re.compile(
    r"(?:^|[<:,])(?:map<(?!string\b|…)"
    r"|(?:interval|date|timestamp|timestamp_ntz|time|decimal|binary|variant)\b(?!\s*:))"
)
_APPENDABLE = (Kind.LIST, Kind.OTHER)  # and JSON, if the table's function appends to it


@dataclass(frozen=True, slots=True)
class TableSink:
    """A table, a send to it, and the types of the records' columns, None if they are unknown.

    Fields of structs have names like "update.seats".
    """

    table: AnyTable
    send: TableSend
    types: Types = None

    @property
    def function(self) -> Any:
        """The table's write function; None if it has none."""
        return self.table.write_function

    @property
    def columns(self) -> dict[str, str] | None:
        """{column: type} as the table's write function declares it, or None."""
        return function_column_types(self.function)

    @property
    def sent(self) -> dict[str, str | None] | None:
        """{the table's column: type of what is sent to it}; None if these are unknown."""
        if self.send.update is not None:
            return self._sent_by_update(self.send.update)
        if self.types is None:
            return None
        if self.send.contract is None:
            return self._sent_by_records(self.types)
        fields = self.fields_of(UPDATE)
        if not fields:
            return None
        return self.keys | fields

    def _sent_by_update(self, update: Update) -> dict[str, str | None]:
        """Return {the table's column: type of what is sent to it} for updates made of records."""
        sent = self.keys | dict.fromkeys(update.columns)
        for name, text in (*update.set, *update.add):
            sent[name] = self.sent_type(name, text)
        return sent

    def _sent_by_records(self, types: Mapping[str, str | None]) -> dict[str, str | None]:
        """Return {the table's column: type of what is sent to it} for whole records."""
        moved_to_key = dict(self.send.on)
        sent = {}
        for name, kind in types.items():
            is_field = "." in name
            if not is_field and name not in moved_to_key:
                sent[name] = kind
        return sent | self.keys

    @property
    def keys(self) -> dict[str, str | None]:
        """{column of the table's key: type of what is sent to it}."""
        key = self.table.key
        sources = self.send.key_sources(key)
        return {name: self._type_at(source) for name, source in zip(key, sources, strict=True)}

    def _type_at(self, source: str) -> str | None:
        """Return the type of a column, or of the value at a path; None if it is unknown."""
        types = self.types or {}
        if source in types:
            return types[source]
        storable = {}
        for name, kind in types.items():
            if kind and is_storable(kind):
                storable[name] = kind
        path = find_path(source, storable)
        if path is None:
            return None
        return path.type

    @property
    def default(self) -> dict[str, str | None]:
        """{the table's column: type of what the default record has}; {} without one."""
        if self.send.contract is None:
            return {}
        if self.send.update is None:
            return self.fields_of(DEFAULT)
        default = {}
        for name, text in self.send.update.if_missing or ():
            default[name] = self.sent_type(name, text, DEFAULT)
        return default

    def fields_of(self, struct: str) -> dict[str, str | None]:
        """Return the types of the fields of a struct; {} if the records have none."""
        fields = {}
        for name, kind in (self.types or {}).items():
            column, dot, field = name.partition(".")
            if dot and column == struct:
                fields[field] = kind
        return fields

    def names_inside(self, name: str) -> bool:
        """Whether a name in an update is that of a value inside a column of structs."""
        if self.columns is not None and name in self.columns:
            return False
        return parse_inner_name(name) is not None

    def sent_type(self, name: str, expression: str, struct: str = UPDATE) -> str | None:
        """Return the type of what is sent to the column `name`: of this field of `struct`, or if
        the records have none, of the expression; None if it is unknown.
        """
        return self.fields_of(struct).get(name) or self.type_of(expression)

    def type_of(self, expression: str) -> str | None:
        """Return the type of an expression over the records' columns; None if it is unknown."""
        return expression_type(parse_expression(expression), self.types or {})


def find_sink_problems(sink: TableSink) -> Problems:
    """Yield why the table does not support the send, whatever columns the records have."""
    function = sink.function
    if function is None:
        yield (
            " has no write function, and records are sent to it.",
            "Declare it with write_function=….",
        )
        return
    yield from function_problems(function, sink.send.args)
    can = getattr(function, "capabilities", None)
    if can is None:  # a user's own function, which may do anything
        return
    name = type(function).__name__
    for condition in ("newest_by", "idempotent"):
        if getattr(sink.table, condition) and not getattr(can, condition):
            yield (
                f" is declared with {condition}, and {name} can't make a write conditional.",
                "Leave it out, or choose a store that can: PostgreSQL, SQLite, DynamoDB or Redis.",
            )
    if sink.send.contract is not None:
        yield from _update_problems(sink, name, can)


def _update_problems(sink: TableSink, name: str, can: Capabilities) -> Problems:
    """Yield why the table, whose function of this name has these capabilities, can't be sent the
    updates.
    """
    table = sink.table
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
    if sink.send.update is None:
        changes: AbstractSet[str] = {"set"}  # what update messages do
    else:
        changes = sink.send.update.kinds
    lacking = sorted(changes - can.changes)
    if can.changes and lacking:
        yield (
            (
                f": {name} can't {' or '.join(lacking)} columns; it can"
                f" {', '.join(sorted(can.changes))}."
            ),
            "Set the columns to their new values, or choose a store that can.",
        )
    yield from _inside_problems(sink, name, can)
    if sink.send.contract is UpdateContract.UPDATE_WITH_DEFAULTS:
        yield from _default_problems(table, name, can)
    may_apply_twice = table.newest_by is not None and not table.idempotent
    if may_apply_twice and changes & {"add", "append"}:
        yield (
            (
                f" keeps the newest record by {table.newest_by!r}, and applies an update of the"
                " same time again: after a crash it would add or append twice."
            ),
            "Declare the table with idempotent=True, too.",
        )


def _inside_problems(sink: TableSink, function: str, can: Capabilities) -> Problems:
    """Yield why a table can't be sent updates of values inside columns."""
    if sink.send.update is not None:
        changed = sink.send.update.columns
    else:
        changed = tuple(sink.fields_of(UPDATE))
    name_by_path: dict[tuple[str, ...], str] = {}
    for name in filter(sink.names_inside, changed):
        path = parse_inner_name(name)
        assert path is not None
        if not can.inside:
            yield (
                f": {function} can't change {name!r} inside column {path.root!r} in one request.",
                f"Set all of column {path.root!r}, or choose a store that can: SQLite, PostgreSQL,"
                " DynamoDB with columns=, or key-value rows.",
            )
        if path.root in changed:
            overlapping = path.root
        else:
            overlapping = name_by_path.setdefault((path.root, *path.names), name)
        if overlapping != name:
            yield (
                f" is sent updates that change {overlapping!r} and {name!r}, which overlap.",
                "Change a value once.",
            )


def _default_problems(table: AnyTable, name: str, can: Capabilities) -> Problems:
    """Yield why the table, whose function of this name has these capabilities, can't insert
    default records safely.
    """
    keeps_existing = can.puts_if_absent or can.updates_with_defaults
    if keeps_existing or table.defaults_may_overwrite:
        return
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


def check_sink_columns(
    operator: str, sink: TableSink, types: Types, columns: dict[str, str] | None
) -> None:
    """Raise PlanningError for a sent column that the table certainly does not have, or has with
    another type.

    `types` are those of the records' columns; `columns` is {column: type} of the table, None if it
    is unknown.
    """
    sink = replace(sink, types=types)
    raise_first_problem(operator, sink.table, _column_problems(sink, columns))


def _written_types(sink: TableSink) -> list[tuple[str, str | None]]:
    """Return pairs (the table's column, type of what is written to it). A column that both updates
    and the default record have is listed twice.

    For whole records with unknown columns, these are the declared columns, with unknown types.
    """
    written: dict[str, str | None] = {}
    update = sink.send.update
    if update is not None:
        written |= sink.keys
        for name, text in (*update.set, *update.add, *update.append):
            written[name] = sink.type_of(text)
    elif sink.sent:
        written |= sink.sent
    elif sink.send.contract is None:
        written |= dict.fromkeys(sink.columns or {})
    return [*written.items(), *sink.default.items()]


def compare_sink_types(sink: TableSink) -> list[ComparedColumn]:
    """Return the table's columns that are written, each with the type of what is sent and the
    declared type.

    Left out are columns that are not declared, or declared as JSON or as a type that is not known
    here: many types may be sent to them.
    """
    columns = sink.columns or {}
    compared = []
    for name, kind in _written_types(sink):
        declared = _declared_column(name, columns)
        if declared is None or declared.kind in (Kind.OTHER, Kind.JSON):
            continue
        declared_type = columns.get(name, _spelled(declared))
        compared.append(ComparedColumn(name, kind, f"table {sink.table.name}", declared_type))
    return compared


def find_summed_columns(sink: TableSink) -> frozenset[str]:
    """Return the columns to which updates add numbers, as opposed to JSON.

    For that, the column's declared type or the type of the added value must be known to be a
    number.
    """
    columns = sink.columns or {}
    summed = set()
    for name, text in sink.send.expressions.add:
        declared = _declared_column(name, columns)
        if declared is not None and declared.kind in _NUMBERS:
            summed.add(name)
        added_type = sink.type_of(text)
        if added_type is not None and parse_column(name, added_type).kind in _NUMBERS:
            summed.add(name)
    return frozenset(summed)


def _declared_column(name: str, columns: Mapping[str, str]) -> Column | None:
    """Return the column that a name in an update means, or the value inside a column; None if the
    table has no such column, or nothing there that an update can change.
    """
    if name in columns:
        return parse_column(name, columns[name])
    path = parse_inner_name(name)
    if path is None or path.root not in columns:
        return None
    try:
        return inner_column(path, parse_column(path.root, columns[path.root]))
    except InnerNameError:
        return None


def _spelled(column: Column) -> str:
    """Return the type of a column as it is declared, such as "decimal(9,2)"."""
    return f"{column.type}{column.size}"


def _unknown_problems(sink: TableSink, name: str, columns: dict[str, str]) -> Problems:
    """Yield why a name that is sent, and is none of the `columns`, can't be stored: it is no value
    inside a column either, or the send can't change values inside columns.
    """
    path = parse_inner_name(name)
    is_update = sink.send.contract is not None and name not in sink.default
    if path is not None and path.root in columns and is_update:
        try:
            inner_column(path, parse_column(path.root, columns[path.root]))
        except InnerNameError as error:
            yield f"{error}.", f"{error.next_step}."
        if name in dict(sink.send.expressions.append):
            yield (
                f": {name!r} is a value inside a column, and an update would append to it.",
                "Append to a column that is an array.",
            )
        return
    step = _suggest_known_name(sink, name, columns)
    if sink.send.contract is None:
        step = f"{step} {_suggest_leaving_out(name, sink.send.on)}"
    yield f" has no column {name!r}; it has {', '.join(columns)}.", step


def _suggest_known_name(sink: TableSink, name: str, columns: dict[str, str]) -> str:
    """Return what to write instead of a name that the table does not have: the path of a value
    inside a column if the expression for `name` is such a path, else a similar name.
    """
    expressions: dict[str, str] = {}
    for written in sink.send.expressions.written:
        expressions.setdefault(written.column, written.expression)
    steps = plain_path(expressions.get(name, ""))
    if len(steps) > 1 and steps[-2] in columns:
        inner = write_path(steps[-2:])
        return f"For a value inside a column write {{{inner!r}: {write_path(steps)!r}}}."
    return f"{did_you_mean(name, columns)}Correct the name, or add the column to it."


def _suggest_leaving_out(name: str, on: Sequence[tuple[str, str]]) -> str:
    """Return how to leave a column out of whole records. `on` says where the records have the
    table's key: a key inside that column gets a column of its own.
    """
    inner_keys = []
    for source, key in on:
        if split_path(source)[:1] == (name,):
            inner_keys.append(f'"{source} as {key}"')
    expressions = ", ".join((f'"* except ({write_name(name)})"', *inner_keys))
    instead = ", in place of on=" if inner_keys else ""
    return f"Or leave it out of the records: .map({expressions}){instead}."


def _column_problems(sink: TableSink, columns: dict[str, str] | None) -> Problems:
    """Yield why what is sent does not fit the table's `columns`, {column: type} or None if these
    are unknown. Later problems may rely on it that earlier ones were raised.
    """
    sent = sink.sent
    if sent is None:
        return
    if sink.send.contract is None and sink.fields_of(UPDATE):
        yield (
            " is sent updates without a contract, as whole records.",
            (
                "May updates create records? send_to(table, UpdateContract.UPDATE_ONLY), or"
                " UPDATE_WITH_DEFAULTS."
            ),
        )
    yield from _newest_by_problems(sink, sent, columns or {})
    if columns is None:
        return
    for name, kind in (*sent.items(), *sink.default.items()):
        if name not in columns:
            yield from _unknown_problems(sink, name, columns)
        declared = _declared_column(name, columns)
        if declared is not None:
            yield from _type_problems(sink, declared, kind, columns.get(name, _spelled(declared)))
    for name, text in sink.send.expressions.add:
        declared = _declared_column(name, columns)
        assert declared is not None
        yield from _addition_problems(sink, declared, text)
    for name, text in sink.send.expressions.append:
        yield from _append_problems(sink, name, text, columns[name])


def _type_problems(sink: TableSink, column: Column, kind: str | None, wanted: str) -> Problems:
    """Yield why values of the type `kind` can't be stored in a column, which is declared as
    `wanted`.
    """
    name = column.name
    added = dict(sink.send.expressions.add)
    if name in added and column.kind not in _ADDABLE:  # _addition_problems says so
        return
    if kind is not None and not _fits(parse_column("sent", kind), column):
        sources = {key: source for source, key in sink.send.on}
        sent_by_column = sources | dict(sink.send.expressions.set) | added  # as the user wrote it
        yield (
            f" has the column {name!r} as {wanted}, and {kind} is sent"
            f"{_mismatch_within(kind, column)}.",
            _suggest_cast(sent_by_column.get(name, name), kind, wanted),
        )


def _addition_problems(sink: TableSink, column: Column, text: str) -> Problems:
    """Yield why a value can't be added to a column."""
    name = column.name
    declared = _spelled(column)
    if column.kind not in _ADDABLE:
        yield (
            f" has the column {name!r} as {declared}, and an update would add to it.",
            "Add to a number, or members to JSON.",
        )
    if column.kind is not Kind.JSON:
        return
    kind = sink.sent_type(name, text) or "null"
    has_members = kind.startswith(("struct<", "map<"))
    if not has_members and not _MAY_BE_ANY.match(kind):
        yield (  # only the members of an object can be added to JSON
            f" has the column {name!r} as {declared}, and {kind} is added to it.",
            f"Add members to it: named_struct('…', {text}).",
        )


def _append_problems(sink: TableSink, name: str, text: str, declared: str) -> Problems:
    """Yield why an element, or an array of them, can't be appended to a column."""
    column = parse_column(name, declared)
    sent = sink.sent_type(name, text)
    if sent is not None:
        appended = parse_column("sent", sent)
        element = column.element or column
        if not _fits(appended.element or appended, element):
            yield (
                f" has the column {name!r} as {declared}, and {sent} is appended to it.",
                _suggest_cast(text, sent, f"{element.type}{element.size}"),
            )
    if column.kind is Kind.JSON:
        can_append = getattr(sink.function, "appends_to_json", True)
    else:
        can_append = column.kind in _APPENDABLE
    if not can_append:
        yield (
            f" has the column {name!r} as {declared}, and an update would append to it.",
            "Append to an array.",
        )


def _newest_by_problems(
    sink: TableSink, sent: dict[str, str | None], columns: dict[str, str]
) -> Problems:
    """Yield problems of the column `newest_by`: it is not sent, updates do not set it, or its
    values have no order.
    """
    name = sink.table.newest_by
    if name is None:
        return
    what = f" keeps the newest record by {name!r}"
    update = sink.send.update
    if name not in sent:
        step = "Keep the column."
        if sink.send.contract is not None:
            argument = "" if update is None else "set="
            step = f"Send it with each record: {argument}{{'{name}': …}}."
        missing = f"which is not sent; the columns that are sent are {', '.join(sent)}."
        yield f"{what}, {missing}", step
        return
    if update is not None and name not in dict(update.set):
        step = f"Set it with each update: set={{'{name}': …}}."
        yield f"{what}, and updates do not set it.", step
    if name not in columns and sink.names_inside(name):
        yield f"{what}, a value inside a column.", "Name a column of its own."
    kind = sent[name] or columns.get(name)
    if kind is not None and parse_column(name, kind).kind in _UNORDERED:
        yield (
            f"{what}, which is {kind}: expected a time, a date, a number or a text.",
            "Name a column whose values grow with time.",
        )


def _fits(sent: Column, declared: Column) -> bool:
    """Whether values of the type `sent` can be stored in a column.

    In this order: columns or values of any type, columns of JSON, columns of nested types, lists,
    values of unknown type, and types of which one holds the other.
    """
    sent_kind = sent.kind
    declared_kind = declared.kind
    if declared_kind is Kind.OTHER or sent_kind is Kind.JSON:
        return True
    if declared_kind is Kind.JSON:
        return _NEVER_IN_JSON.search(sent.type) is None
    if declared_kind is Kind.NESTED:
        if _is_partly_unknown(sent, declared):
            return True
        return not _mismatch_within(sent.type, declared)
    if sent.type.startswith("array<…"):  # an array whose element type is unknown
        return declared_kind is Kind.LIST
    if sent.element is not None and declared.element is not None:
        return _fits(sent.element, declared.element)
    if sent_kind is Kind.OTHER:
        return _MAY_BE_ANY.match(sent.type) is not None
    return sent_kind is declared_kind or declared_kind in _WIDENS_TO.get(sent_kind, ())


# A type that is void, or has a part that is, or that the planner does not know.
_UNKNOWN_PART = re.compile(r"[<:,](?:void|null|…)|^(?:void|null)$")


def _is_partly_unknown(sent: Column, declared: Column) -> bool:
    """Whether a type may be that of a nested column, as the planner doesn't know all of it: nulls
    fit every type.
    """
    if sent.kind is not Kind.OTHER or _UNKNOWN_PART.search(sent.type) is None:
        return False
    kind, brackets, _ = sent.type.partition("<")
    if not brackets:  # the type of null alone
        return True
    return declared.type.startswith(f"{kind}<")


def _mismatch_within(sent: str, declared: Column) -> str:
    """Return where a nested type that is sent differs from that of a column, or has a type that
    JSON lacks, as words to append to an error; "" if it fits.
    """
    if declared.kind is Kind.JSON:
        return _unfit_for_json(sent, write_name(declared.name))
    if declared.kind is not Kind.NESTED or declared.nested is None:
        return ""
    try:
        tree = parse_type(sent)
    except TypeTextError:
        return f"; expected {declared.nested}"
    found = _find_mismatch(tree, declared.nested, write_name(declared.name))
    return "" if found is None else f"; {found}"


def _unfit_for_json(sent: str, name: str) -> str:
    """Return which part of a type that is sent to the JSON column `name` JSON does not have, as
    words to append to an error; "" for none.
    """
    try:
        parts = nested_types(parse_type(sent))
    except TypeTextError:
        return ""
    for path, type_ in parts:
        if path and isinstance(type_, Simple) and _NEVER_IN_JSON.match(type_.name):
            return f"; {name}{path} is {type_}, which JSON does not have"
    return ""


def _find_mismatch(sent: Type, declared: Type, path: str) -> str | None:
    """Return where and how values of the first type don't fit the second one; None if they do."""
    if isinstance(sent, Array) and isinstance(declared, Array):
        return _find_mismatch(sent.element, declared.element, f"{path}[]")
    if isinstance(sent, Map) and isinstance(declared, Map):
        return _find_mismatch(sent.value, declared.value, f"{path}[*]")
    if isinstance(sent, Struct) and isinstance(declared, Struct):
        return _find_member_mismatch(sent, declared, path)
    if isinstance(sent, Simple) and isinstance(declared, Simple):
        sent_column = parse_column("sent", str(sent))
        if _fits(sent_column, parse_column("held", str(declared))):
            return None
    return f"{path} is sent as {sent}, and the table has it as {declared}"


def _find_member_mismatch(sent: Struct, declared: Struct, path: str) -> str | None:
    """Return which member of the first struct doesn't fit the second one, and how; None if all
    fit.
    """
    for member in sent.members:
        inner = f"{path}.{write_name(member.name)}"
        known = declared.member(member.name)
        if known is None:
            names = ", ".join(write_name(member.name) for member in declared.members)
            return f"{inner} is sent, and {path} has {names}"
        found = _find_mismatch(member.type, known.type, inner)
        if found is not None:
            return found
    return None


def _suggest_cast(name: str, sent: str, declared: str) -> str:
    """Return a next step: how to convert the value sent to the column `name` to its `declared`
    type.
    """
    kind = parse_column("declared", declared).kind
    is_nested = sent.startswith(("struct<", "array<", "map<"))
    if kind is Kind.JSON:
        if sent.startswith("map<") and not sent.startswith("map<string"):
            return f"Make its keys texts: transform_keys({name}, (k, v) -> cast(k as string))."
        if is_nested:
            return "Cast members that are not text, numbers or booleans, for example to string."
        return f"Cast it: cast({name} as string)."
    if kind is Kind.NESTED:
        return "Send values of the table's type, or correct its declared columns."
    if kind is Kind.STRING and is_nested:
        return f"Convert it to text: to_json({name})."
    return f"Cast it: cast({name} as {declared})."
