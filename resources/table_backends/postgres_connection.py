"""Connections to PostgreSQL, and the translation of its errors into ours: transient or
permanent.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import socket
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.optional_packages import import_package
from dagster_adjunct.resources.table_backends.store import read_variable

if TYPE_CHECKING:
    import psycopg
    from psycopg import AsyncConnection

_SECRETS = ("password", "sslpassword", "sslkey", "oauth_client_secret")
_HOLDS_SECRET = re.compile(r"password\s*=|://")  # libpq takes a whole DSN as dbname

# SQLSTATE classes and codes: https://www.postgresql.org/docs/current/errcodes-appendix.html
_PASSING = {
    "40001",  # serialization failure
    "40P01",  # deadlock
    "55P03",  # lock not available
    "57014",  # statement_timeout, or an administrator cancelled the statement
}
_PASSING_CLASSES = ("08", "53")  # connection errors, insufficient resources
_NO_ACCESS = {
    *("28000", "28P01"),  # the login is rejected
    *("3D000", "3F000", "42P01"),  # there is no such database, schema or table
    "42501",  # the right is missing
}
# the server's function that compares a record with row security policies
_POLICY_CHECK = "ExecWithCheckOptions"
READ_ONLY = "25006"
"""The SQLSTATE of a write in a read-only transaction."""
READ_ONLY_STEP = (
    "Connect to the primary as a user with default_transaction_read_only off; it may be set for the"
    " role, the database or the server."
)
# libpq gives a rejected login no SQLSTATE, only the server's message. If that is in another
# language, the request is retried in vain; so is one to a wrong address, because it looks like a
# server that is down.
_FOR_GOOD = (
    "password authentication failed",
    "no password supplied",
    "authentication failed",
    "does not exist",
    "no pg_hba.conf entry",
    "is not permitted to log in",
    "certificate",
    "definition of service",
)
_FOR_NOW = (
    "starting up",
    "shutting down",
    "in recovery mode",
    "too many clients",
    "remaining connection slots",
)


def require_driver(label: str) -> None:
    """Raise ConfigurationError if psycopg can't be imported."""
    import_package(label, "psycopg", "postgres", table=label)


def check_keywords(keywords: Mapping[str, object]) -> dict[str, str]:
    """Return connection keywords of libpq with values as text; raise ConfigurationError if one
    is or holds a secret.
    """
    for name in keywords:
        if name in _SECRETS:
            problem = (
                f"a PostgreSQL table was declared with {name!r}, which would end up in pickles and"
                " logs."
            )
            step = (
                "Put the DSN into a variable and pass dsn_env, or use libpq's password file or"
                " service file."
            )
            raise errors.ConfigurationError(problem, step, argument=name)
    for name, value in keywords.items():
        if _HOLDS_SECRET.search(str(value)):
            raise errors.ConfigurationError(
                f"a PostgreSQL table was declared with a {name!r} that looks like a whole DSN (not"
                " shown).",
                "Put the DSN into an environment variable and pass its name as dsn_env.",
                argument=name,
            )
    return {name: str(value) for name, value in keywords.items()}


def connection_settings(
    label: str, dsn_env: str | None, keywords: Mapping[str, str]
) -> dict[str, Any]:
    """Return the settings to connect with: those of the DSN in the variable `dsn_env`, changed by
    `keywords`.

    libpq adds the rest from its own sources. The result may contain a password: pass it only to the
    connect functions. Raises ConfigurationError for an invalid DSN.
    """
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict

    dsn = ""
    if dsn_env is not None:
        dsn = read_variable(label, dsn_env, "DSN")
    try:
        settings = conninfo_to_dict(dsn, **keywords)
    except ProgrammingError:
        # The driver's own message may quote the DSN, and with it the password.
        problem = f"{label}: {dsn_env or 'its connection keywords'} can't be read as a DSN."
        step = "Use postgresql://user:password@host:port/dbname, or key=value pairs."
        raise errors.ConfigurationError(problem, step, setting=dsn_env) from None
    settings.setdefault("connect_timeout", 10)
    settings.setdefault("application_name", "adjunct")
    return dict(settings)


def format_address(settings: Mapping[str, Any]) -> str:
    """Return host:port/dbname (or "service NAME") of a connection for errors, without the
    password.
    """
    if "service" in settings and "host" not in settings:
        return f"service {settings['service']}"
    host = (
        settings.get("host") or settings.get("hostaddr") or os.environ.get("PGHOST", "local socket")
    )
    port = settings.get("port") or os.environ.get("PGPORT", "5432")
    user = settings.get("user") or os.environ.get("PGUSER", "")
    return f"{host}:{port}/{settings.get('dbname') or os.environ.get('PGDATABASE') or user}"


# Set in each session, because a database, a role or the environment may have other defaults: texts
# in UTF-8, times as ISO 8601, and floats with all their digits. A commit that is confirmed survives
# a crash of the server: a run would not write it again. Of the values that promise more, such as
# `remote_apply`, each stays.
_SESSION = (
    "SET client_encoding = 'UTF8'; SET datestyle = 'ISO'; SET extra_float_digits = 1; SELECT"
    " set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') ="
    " 'off'"
)
IDLE_SECONDS = 30
"""After how many seconds the server ends a session that is paused within a transaction, which
holds locks.
"""


# The logins that have worked in this process, as digests. Those with another password are others.
_LOGGED_IN: set[bytes] = set()
_REFUSED_LOGIN = "authentication failed"


def _login(settings: Mapping[str, Any]) -> bytes:
    """Return what identifies a login, its password included, as a digest."""
    facts = (
        format_address(settings),
        settings.get("user"),
        settings.get("password"),
        settings.get("passfile"),
    )
    return hashlib.sha256(repr(facts).encode()).digest()


async def connect_async(label: str, settings: Mapping[str, Any]) -> psycopg.AsyncConnection[Any]:
    """Connect in autocommit mode, with UTC as the time zone.

    Raises TableUnavailableError if the server is unreachable, starting, stopping or full, even if
    it stays so. A login that the server has accepted before and rejects now is the same error. For
    any other rejected login, and for a missing database, it raises TableAccessError.
    """
    import psycopg

    try:
        connection = await psycopg.AsyncConnection.connect(autocommit=True, **settings)
    except psycopg.Error as error:
        raise _connection_error(error, label, settings) from None
    try:
        idle = f"SET idle_in_transaction_session_timeout = '{IDLE_SECONDS}s'"
        await connection.execute(f"{_SESSION}; SET TIME ZONE 'UTC'; {idle}")
    except psycopg.Error as error:
        await connection.close()
        raise translate_error(error, label, format_address(settings)) from error
    _LOGGED_IN.add(_login(settings))
    return connection


def connect_sync(label: str, settings: Mapping[str, Any]) -> psycopg.Connection[Any]:
    """Connect in autocommit mode, for blocking calls. Raises the same errors as `connect_async`.

    It sets neither the time zone nor a limit for sessions that are idle in a transaction.
    """
    import psycopg

    try:
        connection = psycopg.connect(autocommit=True, **settings)
    except psycopg.Error as error:
        raise _connection_error(error, label, settings) from None
    try:
        connection.execute(_SESSION)
    except psycopg.Error as error:
        connection.close()
        raise translate_error(error, label, format_address(settings)) from error
    _LOGGED_IN.add(_login(settings))
    return connection


def connect_snapshot(label: str, settings: Mapping[str, Any]) -> psycopg.Connection[Any]:
    """Connect for blocking read-only transactions, each of which sees one snapshot. Raises as
    `connect_async`.
    """
    import psycopg

    connection = connect_sync(label, settings)
    connection.autocommit = False
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    connection.read_only = True
    return connection


def _connection_error(
    error: psycopg.Error, label: str, settings: Mapping[str, Any]
) -> errors.AdjunctError:
    """Return the error of ours for a connection that could not be made.

    In this order: the server accepts none now, it rejects a login that it has accepted before, it
    rejects the login, it can't be reached.
    """
    message = _redact(str(error), settings)
    kind: type[errors.AdjunctError]
    kind = errors.TableUnavailableError
    what = "can't be reached"
    step = (
        "Check that the server runs, listens on this address, and can be reached from here; then"
        " run it again."
    )
    if any(words in message for words in _FOR_NOW):
        what = "does not accept connections now"
        step = "The connection is retried; if it keeps failing, check the server."
    elif _REFUSED_LOGIN in message and _login(settings) in _LOGGED_IN:
        what = "rejects a login that it accepted before"
        step = (
            "The password was changed, or a token has expired: renew it in libpq's password file,"
            " which each connection reads, or in the variable of the DSN, and start the run again."
        )
    elif any(words in message for words in _FOR_GOOD):
        kind = errors.TableAccessError
        what = "rejected the login"
        step = "Check the connection's user, password and database, and the server's pg_hba.conf."
    return kind(
        f"{label}: PostgreSQL at {format_address(settings)} {what} ({message}).", step, table=label
    )


def translate_error(error: psycopg.Error, label: str, address: str) -> errors.AdjunctError:
    """Return the error of ours for an error of the driver: transient if the same transaction may
    succeed later.

    In this order: no answer or for now, read-only, against a policy, without access, values that do
    not fit, rejected for another reason.
    """
    import psycopg

    state = error.sqlstate or ""
    # The message in one line. Its details quote the whole row, so they are left out, except for the
    # names of objects that depend on one to be dropped.
    message = error.diag.message_primary or str(error)
    if state == "2BP01":
        message = f"{message}: {error.diag.message_detail}"
    # FATAL means that the server ended the connection: it restarts, an administrator did, or the
    # session was idle.
    was_ended = error.diag.severity_nonlocalized in ("FATAL", "PANIC")
    got_no_answer = isinstance(error, psycopg.OperationalError) and not state
    is_lost = isinstance(error, psycopg.InterfaceError) or was_ended or got_no_answer
    kind: type[errors.AdjunctError]
    kind = errors.TableError
    what = "the server rejected the request"
    step = "Correct the data or the table."
    if is_lost or state in _PASSING or state.startswith(_PASSING_CLASSES):
        kind = errors.TableUnavailableError
        what = "the transaction failed"
        step = "The transaction is retried; if it keeps failing, check the server's log."
    elif state == READ_ONLY:
        kind = errors.TableAccessError
        what = "the session is read-only"
        step = READ_ONLY_STEP
    elif is_against_policy(error):
        what = "a row security policy rejects the record"
        step = "Filter such records out, or correct the policy."
    elif state in _NO_ACCESS:
        kind = errors.TableAccessError
        what = "it can't be accessed"
        step = "Check that the table exists and that the user has access to it."
    elif isinstance(error, psycopg.DataError | psycopg.ProgrammingError):
        kind = errors.SchemaMismatchError
        what = "the values do not fit the columns"
        step = "Correct the values or the table."
    return kind(f"{label} at {address}: {what} ({' '.join(message.split())}).", step, table=label)


def is_against_policy(error: psycopg.Error) -> bool:
    """Whether a row security policy rejects a record, so that other records may be accepted.

    Its SQLSTATE is that of a missing right, which concerns all records.
    """
    return error.sqlstate == "42501" and error.diag.source_function == _POLICY_CHECK


def _redact(text: str, settings: Mapping[str, Any]) -> str:
    """Return a text in one line, without the secrets of these settings."""
    for name in _SECRETS:
        secret = str(settings.get(name) or "")
        if secret:
            text = text.replace(secret, "***")
    return " ".join(text.split())


T = TypeVar("T")
_CANCEL_SECONDS = 1.0  # seconds for the server to end a cancelled request


async def run_cancellable(connection: AsyncConnection[Any], request: Awaitable[T]) -> T:
    """Await a request over this connection; if the caller is cancelled, close the connection within
    some seconds.

    The driver alone would wait for the server's reply to the cancellation, which a dead network
    never delivers.
    """
    import psycopg

    under_way = asyncio.ensure_future(request)
    try:
        return await asyncio.shield(under_way)
    except asyncio.CancelledError:
        with suppress(psycopg.Error):
            # So that the request holds no locks any more.
            await connection.cancel_safe(timeout=_CANCEL_SECONDS)
        with (
            suppress(psycopg.Error, OSError),
            socket.socket(fileno=os.dup(connection.fileno())) as wire,
        ):
            wire.shutdown(socket.SHUT_RDWR)
        await asyncio.wait([under_way], timeout=_CANCEL_SECONDS)
        await connection.close()
        raise
