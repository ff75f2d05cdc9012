"""Connections to Redis, commands sent together over one of them, and what its errors say of an entry."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    TableAccessError,
    TableError,
    TableUnavailableError,
)
from dagster_adjunct.resources.tables.outcomes import Problem, State

if TYPE_CHECKING:
    from redis.asyncio import BlockingConnectionPool

_SCHEMES = ("redis", "rediss", "unix")
# Answers that say that nothing was done, and that may be others later; redis-py has classes for some of them.
_FOR_NOW = {
    *("BusyLoadingError", "OutOfMemoryError", "ReadOnlyError"),
    *("MasterDownError", "ClusterDownError", "TryAgainError"),
}
_CODES_FOR_NOW = ("BUSY", "OOM", "MISCONF", "READONLY", "NOREPLICAS")
NO_SCRIPT = Problem(State.FAILED)  # the server does not know the script: nothing was done


def require_client(label: str) -> None:
    """Return if redis-py can be imported; else say how to get it."""
    try:
        import redis.asyncio  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            f"{label} needs the package redis, which can't be imported here ({error}).",
            "Install it: pip install 'dagster-adjunct[redis]', on executors too.",
            package="redis",
            table=label,
        ) from error


def check_url(label: str, url: str | None, url_env: str | None) -> None:
    """Refuse a declaration that says nowhere, or twice, where the server is, or that holds a password."""
    if (url is None) == (url_env is None):
        raise ConfigurationError(
            f"{label} is declared with {'neither url nor' if url is None else 'both url and'} url_env.",
            "Give one: url='redis://host:6379/0', or the name of an environment variable that holds it.",
            argument="url",
        )
    if url is None:
        return
    parts = _parts(label, "url", url)
    if parts.password is not None or "password" in parts.query.lower():
        raise ConfigurationError(
            f"{label} was declared with a password in its url, which would travel in pickles and logs.",
            "Give url_env, the name of an environment variable that holds the whole URL, or leave the password out "
            "and give password_env.",
            argument="url",
        )


def _parts(label: str, what: str, url: str) -> Any:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - which may be none
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in _SCHEMES:
        raise ConfigurationError(
            f"{label}: {what} can't be read as a URL of a Redis server.",
            "Expected redis://host:6379/0, rediss://… for TLS, or unix:///path?db=0.",
            argument=what,
        )
    return parts


def from_environment(label: str, name: str, what: str) -> str:
    """The value of an environment variable, which must be set."""
    value = os.environ.get(name, "")
    if not value:
        raise ConfigurationError(
            f"{label}: the environment variable {name}, which should hold its {what}, is not set here.",
            f"Set {name}, on executors too.",
            setting=name,
        )
    return value


class RedisServer:
    """The connections of one event loop to one server; at most so many at a time, others wait.

    Nothing is sent again by the client itself: what was sent and not answered may have had its effect.
    """

    def __init__(
        self, label: str, url: str, password: str | None, *, source: str, connections: int, timeout: float
    ) -> None:
        from redis.asyncio import BlockingConnectionPool
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        self.label, self._timeout = label, timeout
        parts = _parts(label, source, url)
        self.place = f"{parts.hostname or 'localhost'}:{parts.port or 6379}" if parts.hostname else parts.path
        self._secrets = [secret for secret in (password, parts.password) if secret]
        settings: dict[str, Any] = {} if password is None else {"password": password}
        try:
            self.pool: BlockingConnectionPool = BlockingConnectionPool.from_url(
                url,
                max_connections=connections,
                timeout=None,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                socket_connect_timeout=timeout,
                socket_timeout=None,  # requests have their limit as a whole, here
                **settings,
            )
        except (ValueError, TypeError):  # whose message may quote the password
            raise ConfigurationError(
                f"{label}: {source} can't be read as a URL of a Redis server.",
                "Expected redis://host:6379/0, and of options what redis-py knows.",
                setting=source,
            ) from None
        self._busy, self._idle = 0, asyncio.Event()
        self._idle.set()

    async def ask(self, commands: Sequence[bytes], *, reads: bool = False) -> list[Any]:
        """The answers to packed commands, sent together in this order: values, or the `Problem` of one.

        What `reads` had no effect, so it never is UNKNOWN.
        """
        from redis.exceptions import RedisError

        self._busy += 1
        self._idle.clear()
        try:
            try:
                connection = await self.pool.get_connection()  # type: ignore[no-untyped-call]
            except (RedisError, OSError, TimeoutError) as error:
                return [self.problem(error, lost=State.FAILED)] * len(commands)
            answers: list[Any] = []
            whole = False
            try:
                async with asyncio.timeout(self._timeout):
                    await connection.send_packed_command(b"".join(commands), check_health=False)
                    whole = await self._read(connection, len(commands), answers)
            except (RedisError, OSError, TimeoutError) as error:
                problem = self.problem(error, lost=State.FAILED if reads else State.UNKNOWN)
                answers += [problem] * (len(commands) - len(answers))
            finally:
                if not whole:
                    await connection.disconnect(nowait=True)  # what it still answers would be taken for other answers
                await self.pool.release(connection)
            return answers
        finally:
            self._busy -= 1
            if not self._busy:
                self._idle.set()

    async def _read(self, connection: Any, count: int, answers: list[Any]) -> bool:
        """Read all answers; return whether the connection may be used again: not one to a server that is no master."""
        from redis.exceptions import BusyLoadingError, ReadOnlyError, ResponseError

        read, whole = connection.read_response, True
        while len(answers) < count:
            try:
                answers.append(await read(disable_decoding=True, disconnect_on_error=False))
            except (ResponseError, BusyLoadingError) as error:
                answers.append(self.problem(error, lost=State.FAILED))
                whole = whole and not isinstance(error, ReadOnlyError)
        return whole

    def problem(self, error: BaseException, *, lost: State) -> Problem:
        """What an error says of the entries that met it; `lost`: the state of those whose connection ended."""
        from redis import exceptions

        text = " ".join(f"{getattr(error, 'status_code', None) or ''} {error}".split())[:300]
        for secret in self._secrets:
            text = text.replace(secret, "***")
        if isinstance(error, exceptions.NoScriptError):
            return NO_SCRIPT
        denied = isinstance(error, exceptions.AuthenticationError | exceptions.NoPermissionError)
        if denied or "unauthenticated" in text:  # what a login would have told of many arguments
            return self._refused(
                TableAccessError,
                f"refused the login or the command ({text})",
                "Check user, password and rights: it needs HMGET, EVALSHA, SCRIPT LOAD and what the script calls",
                error,
            )
        if type(error).__name__ in _FOR_NOW or text.startswith(_CODES_FOR_NOW):
            busy = TableUnavailableError(
                f"{self.label} at {self.place} takes no requests now ({text}).",
                "It is tried again; if that goes on, look at the server's log and memory.",
                table=self.label,
            )
            busy.__cause__ = error
            return Problem(State.FAILED, busy)
        if isinstance(error, exceptions.ResponseError):
            other_type = "WRONGTYPE" in text
            hint = "Another type is stored under the key" if other_type else "Correct the data or the server"
            return self._refused(TableError, f"refused the request ({text})", hint, error)
        unanswered = "can't be reached" if lost is State.FAILED else "did not answer"
        gone = TableUnavailableError(
            f"{self.label}: Redis at {self.place} {unanswered} ({type(error).__name__}: {text}).",
            "Check that the server runs and can be reached from here; what had no effect is sent again.",
            table=self.label,
        )
        gone.__cause__ = error
        return Problem(lost, gone)

    def _refused(self, kind: type[TableError], what: str, hint: str, error: BaseException) -> Problem:
        refused: AdjunctError = kind(f"{self.label} at {self.place} {what}.", f"{hint}.", table=self.label)
        refused.__cause__ = error
        return Problem(State.REFUSED, refused)

    async def close(self) -> None:
        """Close the connections once the requests that use them have ended."""
        await self._idle.wait()
        await self.pool.disconnect()
