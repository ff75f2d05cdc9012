"""What the tables of all stores share: their declaration, and the packages and environment
variables that they need.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.table_backends.columns import Column, Kind, parse_known_column
from dagster_adjunct.resources.table_backends.write_plan import Key, Record
from dagster_adjunct.resources.tables.functions import DeclaredFunction, StoreFunction
from dagster_adjunct.resources.tables.operation import (
    STORE_CAPABILITIES,
    Capabilities,
    Changes,
    key_columns,
)


class StoreTable(DeclaredFunction, StoreFunction[Key, Record, Record | Changes]):
    """The base of read and write functions for one table of a store; `_label` names it in
    errors.
    """

    appends_to_json: ClassVar[bool] = False  # an update can append to columns of lists only
    _label: str
    # Set by `_declare`:
    key: tuple[str, ...]
    columns: dict[str, str] | None
    create: bool
    _declared: tuple[Column, ...]  # `columns` as parsed; none if only the store knows them

    def _declare(
        self,
        name: str,
        key: str | Sequence[str],
        columns: Mapping[str, str] | None,
        *,
        create: bool = False,
    ) -> None:
        """Check the declaration, and set the attributes `key`, `columns`, `create` and `_declared`.

        Raises ConfigurationError for `create` without columns, and for a column of the key that is
        not declared, or whose values are nested. `name` is the table's, for errors.
        """
        self.key = key_columns(name, key)
        self.columns = None if columns is None else dict(columns)
        self.create = create
        self._declared = tuple(parse_known_column(*pair) for pair in (columns or {}).items())
        if create and columns is None:
            problem = f"{self._label} can't be created without its columns."
            raise ConfigurationError(
                problem, 'Declare columns={"name": "type", …}.', argument="columns", table=name
            )
        absent = [] if columns is None else [part for part in self.key if part not in columns]
        if absent:
            declared = ", ".join(self.columns or ()) or "none"
            found = f"{self._label} has the key column {absent[0]!r}"
            problem = f"{found}, and declares no column {absent[0]!r}: its columns are {declared}."
            raise ConfigurationError(
                problem, "Correct key=, or declare that column.", argument="key", table=name
            )
        for column in self._declared:
            if column.name in self.key and column.kind in (Kind.NESTED, Kind.LIST):
                raise ConfigurationError(
                    f"{self._label} has the key column {column.name!r}, which is {column.type}:"
                    " expected a simple value.",
                    "Name a column of simple values. If records have its value inside a column,"
                    ' send them with on={"customer.id": "id"}.',
                    argument="key",
                    table=name,
                )

    @property
    def capabilities(self) -> Capabilities:
        return STORE_CAPABILITIES

    def column_types(self) -> dict[str, str] | None:
        if self.columns is None:
            return None
        return dict(self.columns)


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_variable_name(
    argument: str, given: object, example: str = '"MY_VARIABLE"', *, label: str = ""
) -> str:
    """Return the name of an environment variable that `argument` was given; ConfigurationError for
    an invalid one, which is not shown, as it may be the secret itself.
    """
    if isinstance(given, str) and _NAME.fullmatch(given):
        return given
    problem = (
        f"{label}{': ' if label else ''}{argument} is not the name of an environment variable"
        " (value not shown)."
    )
    step = f"Put the value into an environment variable and pass its name: {argument}={example}."
    raise ConfigurationError(problem, step, argument=argument)


def read_variable(label: str, name: str, what: str) -> str:
    """Return the value of an environment variable, which holds `what`; ConfigurationError if it
    is not set.
    """
    value = os.environ.get(name, "")
    if not value:
        problem = (
            f"{label}: the environment variable {name}, which holds its {what}, is not set here."
        )
        raise ConfigurationError(problem, f"Set {name}, on executors too.", setting=name)
    return value


_PURGE_SECONDS = 3600.0
PURGED_AT_ONCE = 200_000  # rows that one write purges at most, to stay within its time limit
_last_purges: dict[str, float] = {}  # when this process last purged, by table
_purge_lock = threading.Lock()


def claim_due_purge(table: str, forget_after: float | None) -> bool:
    """Return whether a write to `table` has to purge first what was applied to its keys; if so, the
    next writes need not.

    True at the first write of a process, then once an hour, or every `forget_after` seconds if that
    is less. Never without `forget_after`.
    """
    if forget_after is None:
        return False
    now = time.monotonic()
    with _purge_lock:
        last = _last_purges.get(table)
        if last is not None and now - last < min(forget_after, _PURGE_SECONDS):
            return False
        _last_purges[table] = now
    return True


def continue_purge(table: str, purged: int) -> None:
    """Make the next write purge again if this one has `purged` as many rows as it may: more may
    be left.
    """
    if purged >= PURGED_AT_ONCE:
        with _purge_lock:
            _last_purges.pop(table, None)
