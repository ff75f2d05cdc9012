r"""`RedisTable`: records as hashes of a Redis server, one hash a record.

A record with the key k is the hash `prefix:k`; of a key of several columns `prefix:k1:k2`, where a "\" or ":" in a
value has a "\" before it. Its fields are the columns (redis_values.py says how they are written), those of the key
among them, and what conditions keep, whose names begin with `adjunct_`. One call of a script for each key does all of
its entries (redis_script.py), so a cluster's rule holds that a script touches the keys that it is given; a key's
entries take effect together, what other keys do is apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dagster_adjunct.resources.backends.environment_variables import variable_name
from dagster_adjunct.resources.backends.redis_connection import (
    NO_SCRIPT,
    RedisServer,
    check_url,
    from_environment,
    require_client,
)
from dagster_adjunct.resources.backends.redis_requests import RedisRequests, command, script_call
from dagster_adjunct.resources.backends.redis_script import BEGUN, DONE, MISSING, SKIPPED, script
from dagster_adjunct.resources.backends.rows import Key, Record, Row
from dagster_adjunct.resources.checked_numbers import check_seconds, check_whole_number
from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError, TableError
from dagster_adjunct.resources.tables.column_changes import Changes
from dagster_adjunct.resources.tables.key_columns import key_columns
from dagster_adjunct.resources.tables.layer import OF_A_STORE, Capabilities
from dagster_adjunct.resources.tables.operation import Operation, OperationKind
from dagster_adjunct.resources.tables.outcomes import Outcomes, Problem, State
from dagster_adjunct.resources.tables.per_loop import PerLoop
from dagster_adjunct.resources.tables.pickled_functions import as_declared
from dagster_adjunct.resources.tables.record_not_found import record_not_found
from dagster_adjunct.resources.tables.table_functions import StoreFunction

_LARGEST = 512 * 1024 * 1024  # bytes of a value, by Redis' own limit


class RedisTable(StoreFunction[Key, Record, Record | Changes]):
    """Read and write function over the hashes below one prefix.

    Where the server is: `url` ("redis://user@host:6379/0", "rediss://…" for TLS, "unix:///path"), with the password
    in the environment variable that `password_env` names; or all of it in the variable that `url_env` names. Both are
    read when connecting, and never stored.

    `columns` gives each column's type. A get returns the key's columns and those that are stored; null, a column that
    is not there and an empty text are told apart. Numbers are added exactly: integers within the bits of their type,
    decimals within their digits, floats as doubles are.

    Deletes under conditions leave a tombstone for `forget_deleted_after` seconds (for good unless given). A value of
    more than `largest_value` bytes is refused before it is sent. At most `connections` requests of an event loop are
    under way at a time, each for at most `timeout` seconds.
    """

    appends_to_json: ClassVar[bool] = False  # only to lists

    def __init__(
        self,
        prefix: str,
        key: str | Sequence[str],
        *,
        columns: Mapping[str, str],
        url: str | None = None,
        url_env: str | None = None,
        password_env: str | None = None,
        forget_deleted_after: int | None = None,
        largest_value: int = _LARGEST,
        connections: int = 8,
        timeout: float = 10.0,
    ) -> None:
        self.prefix, self.key, self.columns = prefix, key_columns(prefix, key), dict(columns)
        self.url, self.url_env, self.password_env = url, url_env, password_env
        self.forget_deleted_after, self.largest_value = forget_deleted_after, largest_value
        self.connections, self.timeout = connections, timeout
        self._label = f"Redis table {prefix}"
        if not prefix or not prefix.isprintable():
            raise ConfigurationError(
                f"a Redis table has {prefix!r} as its prefix; expected printable text.", "Name it.", argument="prefix"
            )
        for name in ("url_env", "password_env"):
            if getattr(self, name) is not None:
                variable_name(name, getattr(self, name), label=self._label)
        check_url(self._label, url, url_env)
        check_seconds(timeout, f"{self._label} has timeout={timeout!r}", argument="timeout")
        numbers = {"connections": connections, "largest_value": largest_value}
        forgets = f"{self._label} has forget_deleted_after={forget_deleted_after!r}"
        check_seconds(forget_deleted_after, forgets, argument="forget_deleted_after", none=True)
        if forget_deleted_after is not None:
            numbers["forget_deleted_after"] = forget_deleted_after
        for name, number in numbers.items():
            check_whole_number(number, f"{self._label} has {name}={number!r}", "a whole number above 0", argument=name)
        if largest_value > _LARGEST:
            raise ConfigurationError(
                f"{self._label} has largest_value={largest_value!r}; expected at most 512 MB.",
                "Correct the declaration.",
                argument="largest_value",
            )
        self._requests = RedisRequests(
            self._label, prefix, self.key, self.columns, largest_value, forget_deleted_after or 0
        )
        self._servers: PerLoop[RedisServer] = PerLoop(self._server)

    def __repr__(self) -> str:
        where = f"url_env={self.url_env!r}" if self.url is None else f"url={self.url!r}"
        return f"RedisTable({self.prefix!r}, key={self.key}, {where})"

    def to_dict(self) -> dict[str, Any]:
        """The declaration as plain values; it holds no secret."""
        names = ("url", "url_env", "password_env", "forget_deleted_after", "largest_value", "connections", "timeout")
        declared = {"prefix": self.prefix, "key": list(self.key), "columns": dict(self.columns)}
        return declared | {name: getattr(self, name) for name in names}

    def __reduce__(self) -> tuple[Any, ...]:
        return as_declared(self, RedisTable, RedisTable.to_dict(self))

    @property
    def capabilities(self) -> Capabilities:
        return OF_A_STORE

    def column_types(self) -> dict[str, str]:
        return dict(self.columns)

    async def open(self) -> None:
        require_client(self._label)
        self._servers.here()

    async def close(self) -> None:
        """Close the running event loop's connections, once the requests that use them have ended."""
        server = self._servers.take()
        if server is not None:
            await server.close()

    async def send(self, operation: Operation[Any]) -> Outcomes:
        if not len(operation):
            return Outcomes(0)
        return await (self._get(operation) if operation.kind is OperationKind.GET else self._write(operation))

    async def _get(self, operation: Operation[Any]) -> Outcomes:
        keys, requests = operation.entries.keys, self._requests
        to_row = requests.rows.keys_by(operation.key)
        commands, rows, problems = [], dict[int, Row](), dict[int, Problem]()
        for place, key in enumerate(keys):
            try:
                row = to_row(key)
                commands.append(requests.get(row))
                rows[place] = row
            except AdjunctError as error:
                problems[place] = Problem(State.REFUSED, error)
        records: list[Any] = [None] * len(keys)
        answers = await self._servers.here().ask(commands, reads=True) if commands else []
        for (place, row), answer in zip(rows.items(), answers, strict=True):
            if isinstance(answer, Problem):
                problems[place] = answer
                continue
            try:
                records[place] = requests.record(row, answer)
            except AdjunctError as error:
                problems[place] = Problem(State.REFUSED, error)
        return Outcomes(len(keys), records, problems)

    async def _write(self, operation: Operation[Any]) -> Outcomes:
        requests, conditions = self._requests, operation.conditions
        to_row, compares = requests.rows.keys_by(operation.key), requests.compares(conditions.newest_by)
        problems: dict[int, Problem] = {}
        by_name: dict[bytes, list[tuple[int, tuple[int, bytes]]]] = {}
        used: set[str] = set()
        for place, key in enumerate(operation.entries.keys):
            try:
                row = to_row(key)
                packed = requests.entry(operation, place, row, used)
                by_name.setdefault(requests.name(row), []).append((place, packed))
            except AdjunctError as error:
                problems[place] = Problem(State.REFUSED, error)
        digest, text = script(operation.kind, compares, conditions.idempotent, frozenset(used))
        settings = requests.settings(conditions.newest_by)
        commands = [script_call(digest, settings, name, [p for _, p in own]) for name, own in by_name.items()]
        begun = 0
        for own, answer in zip(by_name.values(), await self._called(commands, text), strict=True):
            if answer == DONE:
                continue
            told = answer if isinstance(answer, list) else [answer] * len(own)
            for (place, _), one in zip(own, told, strict=True):
                begun += one == BEGUN
                problem = self._problem(one, operation.entries.keys[place])
                if problem is not None:
                    problems[place] = problem
        return Outcomes(len(operation), problems=problems, defaults_put=begun)

    def _problem(self, answer: Any, key: Key) -> Problem | None:
        """What the script's answer says of the entry; None where it is done."""
        if answer in (DONE, BEGUN):
            return None
        if isinstance(answer, Problem):
            return answer
        if answer == SKIPPED:
            return Problem(State.SKIPPED)
        if answer == MISSING:
            return Problem(State.MISSING, record_not_found([key], self._label))
        refused = TableError(
            f"{self._label}: the entry for {key!r} was refused: {answer.decode(errors='replace')}.",
            "Correct the update, the record or the column's type.",
            table=self._label,
        )
        return Problem(State.REFUSED, refused)

    async def _called(self, commands: Sequence[bytes], script: bytes) -> list[Any]:
        """The answers to calls of a script, which is loaded where the server does not know it, as after a restart."""
        server = self._servers.here()
        answers = await server.ask(commands) if commands else []
        again = [place for place, answer in enumerate(answers) if answer is NO_SCRIPT]
        if again:
            loaded, *rest = await server.ask(
                [command(b"SCRIPT", b"LOAD", script), *(commands[place] for place in again)]
            )
            for place, answer in zip(again, rest, strict=True):
                answers[place] = loaded if answer is NO_SCRIPT else answer
        return answers

    def _server(self) -> RedisServer:
        url = self.url if self.url_env is None else from_environment(self._label, self.url_env, "URL")
        password = None
        if self.password_env is not None:
            password = from_environment(self._label, self.password_env, "password")
        assert url is not None
        return RedisServer(
            self._label,
            url,
            password,
            source="url" if self.url_env is None else self.url_env,
            connections=self.connections,
            timeout=self.timeout,
        )
