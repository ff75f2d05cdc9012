r"""`RedisTable`: records as hashes of a Redis server, one hash per record.

A record with the key k is the hash `prefix:k`; with a key of several columns `prefix:k1:k2`, where
"\" and ":" in values are escaped with "\". Its fields are the columns, including the key's, and
what conditions store, with names that begin with `adjunct_` (`redis_records.py` defines the texts
and the scripts). One script call per key applies all of its entries, so it works in a cluster; a
key's entries take effect together, different keys independently.

Requests are encoded here and not by the client, since that is most of the cost of a bulk request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import uuid4

from pydantic import PositiveInt

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.optional_packages import import_package
from dagster_adjunct.resources.table_backends import redis_records
from dagster_adjunct.resources.table_backends.columns import (
    Column,
    Kind,
    check_key_text,
    check_not_reserved,
    make_checker,
    number_bounds,
)
from dagster_adjunct.resources.table_backends.epochs import epoch_name, must_raise_epoch
from dagster_adjunct.resources.table_backends.nested_values import InnerName, write_json
from dagster_adjunct.resources.table_backends.redis_eviction import (
    check_eviction,
    note_eviction,
    read_eviction_policy,
)
from dagster_adjunct.resources.table_backends.redis_records import (
    BEGUN,
    DONE,
    MISSING,
    NULL,
    SKIPPED,
)
from dagster_adjunct.resources.table_backends.store import (
    StoreTable,
    check_variable_name,
    read_variable,
)
from dagster_adjunct.resources.table_backends.write_plan import (
    CheckedChanges,
    Entry,
    Key,
    Row,
    RowCodec,
    validate_entries,
)
from dagster_adjunct.resources.tables.functions import (
    TableUse,
    check_run_fence,
    record_not_found_error,
)
from dagster_adjunct.resources.tables.operation import (
    Changes,
    Conditions,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    State,
)
from dagster_adjunct.resources.tables.presence import (
    BOOKKEEPING_SUFFIX,
    ID,
    NO_TABLE,
    RUNS,
    Presence,
    new_table_id,
)
from dagster_adjunct.resources.threads import PerLoop
from dagster_adjunct.resources.validation import Seconds, WholeSeconds, validated

if TYPE_CHECKING:
    from redis.asyncio import BlockingConnectionPool

_log = logging.getLogger("adjunct.table")
_logged: set[str] = set()  # notes that this process has logged
UNKNOWN = "?"
"""The eviction policy of a server that does not tell it."""
_SCHEMES = ("redis", "rediss", "unix")
# Errors after which a request can be retried, and which had no effect: the classes that redis-py
# has for some, and the codes of the others.
_FOR_NOW = {
    *("BusyLoadingError", "OutOfMemoryError", "ReadOnlyError"),
    *("MasterDownError", "ClusterDownError", "TryAgainError"),
}
_CODES_FOR_NOW = ("BUSY", "OOM", "MISCONF", "READONLY", "NOREPLICAS")
NO_SCRIPT = Problem(State.FAILED)  # the server does not know the script and did nothing


def check_url(label: str, url: str | None, url_env: str | None) -> None:
    """Raise ConfigurationError unless exactly one of `url` and `url_env` is given, or if `url`
    contains a password.
    """
    if (url is None) == (url_env is None):
        given = "neither url nor" if url is None else "both url and"
        problem = f"{label} has {given} url_env; expected one of them."
        step = (
            "Pass url='redis://host:6379/0', or url_env with the name of an environment variable"
            " that holds it."
        )
        raise errors.ConfigurationError(problem, step, argument="url")
    if url is None:
        return
    parts = _parts(label, "url", url)
    if parts.password is not None or "password" in parts.query.lower():
        raise errors.ConfigurationError(
            f"{label} has a password in its url, which would end up in pickles and logs.",
            "Pass url_env, the name of a variable that holds the URL, or remove the password and"
            " pass password_env.",
            argument="url",
        )


def _parts(label: str, what: str, url: str) -> Any:
    """Return the parsed URL of a server; ConfigurationError, without the URL, for an invalid one.
    `what` names its source.
    """
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - which may be none
    except ValueError:
        parts = urlsplit("")  # has no scheme: rejected below
    if parts.scheme not in _SCHEMES:
        problem = f"{label}: {what} is not a valid URL of a Redis server."
        step = "Use redis://host:6379/0, rediss://… for TLS, or unix:///path?db=0."
        raise errors.ConfigurationError(problem, step, argument=what)
    return parts


class RedisServer:
    """One event loop's connections to one server: at most `connections`, for which further requests
    wait.

    It never retries: a request without an answer may have had its effect.
    """

    def __init__(
        self,
        label: str,
        url: str,
        password: str | None,
        *,
        source: str,
        connections: int,
        timeout: float,
    ) -> None:
        from redis.asyncio import BlockingConnectionPool
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        self.label = label
        self._timeout = timeout
        parts = _parts(label, source, url)
        self.address = parts.path
        if parts.hostname:
            self.address = f"{parts.hostname}:{parts.port or 6379}"
        self._secrets = [secret for secret in (password, parts.password) if secret]
        settings: dict[str, Any] = {} if password is None else {"password": password}
        try:
            self.pool: BlockingConnectionPool = BlockingConnectionPool.from_url(
                url,
                max_connections=connections,
                timeout=None,  # waits for a connection: more requests than connections are fine
                protocol=2,
                retry=Retry(NoBackoff(), 0),  # requests are retried by layers above
                socket_connect_timeout=timeout,
                socket_timeout=None,  # `ask` limits the time of a whole request
                redis_connect_func=self._log_in,
                **settings,
            )
        except (ValueError, TypeError):  # the message may quote the password
            problem = f"{label}: {source} is not a valid URL of a Redis server."
            step = "Use redis://host:6379/0, with options that redis-py supports."
            raise errors.ConfigurationError(problem, step, setting=source) from None
        self.policy: str | None = None  # the server's eviction policy, once it was read
        self.reading_policy = asyncio.Lock()
        # `close` waits until no request is under way.
        self._busy = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def _log_in(self, connection: Any) -> None:
        """Log in within the time limit: a server that hangs may accept the connection and never
        answer.
        """
        from redis.exceptions import TimeoutError as LateReply

        try:
            async with asyncio.timeout(self._timeout):
                await connection.on_connect()
        except TimeoutError:
            raise LateReply(f"no reply to the login within {self._timeout} s") from None

    async def ask(self, commands: Sequence[bytes], *, reads: bool = False) -> list[Any]:
        """Send packed commands together, in order; return the answer of each, or its `Problem`.

        `reads` says that the commands change nothing, so that none is UNKNOWN without an answer.
        Raises RunLeaseLostError before sending if the run that sends them has lost its lease.
        """
        from redis.exceptions import BusyLoadingError, ReadOnlyError, RedisError, ResponseError

        self._busy += 1
        self._idle.clear()
        try:
            try:
                connection = await self.pool.get_connection()  # type: ignore[no-untyped-call]
            except (RedisError, OSError, TimeoutError) as error:
                return [self.problem(error, lost=State.FAILED)] * len(commands)
            answers: list[Any] = []
            reusable = True  # set to False also if the server has become a replica
            try:
                await check_run_fence()
                async with asyncio.timeout(self._timeout):
                    await connection.send_packed_command(b"".join(commands), check_health=False)
                    while len(answers) < len(commands):
                        try:
                            answers.append(
                                await connection.read_response(
                                    disable_decoding=True, disconnect_on_error=False
                                )
                            )
                        except (ResponseError, BusyLoadingError) as error:
                            answers.append(self.problem(error, lost=State.FAILED))
                            reusable = reusable and not isinstance(error, ReadOnlyError)
            except (RedisError, OSError, TimeoutError) as error:
                problem = self.problem(error, lost=State.FAILED if reads else State.UNKNOWN)
                answers += [problem] * (len(commands) - len(answers))
                reusable = False
            except BaseException:
                reusable = False
                raise
            finally:
                if not reusable:
                    await connection.disconnect(nowait=True)  # or others would get its late answers
                await self.pool.release(connection)
            return answers
        finally:
            self._busy -= 1
            if not self._busy:
                self._idle.set()

    def problem(self, error: BaseException, *, lost: State) -> Problem:
        """The problem of a command that raised `error`; `lost` is its state if no answer was
        received.

        In this order: the script is not known, the rights are missing, the server does not accept
        requests now, it gave no answer, it rejected the command.
        """
        from redis import exceptions

        text = " ".join(f"{getattr(error, 'status_code', None) or ''} {error}".split())[:300]
        for secret in self._secrets:
            text = text.replace(secret, "***")
        if isinstance(error, exceptions.NoScriptError):
            return NO_SCRIPT
        kind: type[errors.AdjunctError]
        state = State.REFUSED
        kind = errors.TableError
        step = "Correct the data or the server."
        what = f"rejected the request ({text})"
        denied = isinstance(error, exceptions.AuthenticationError | exceptions.NoPermissionError)
        if denied or "unauthenticated" in text:  # Redis' answer to long commands before a login
            kind = errors.TableAccessError
            what = f"rejected the login or the command ({text})"
            step = (
                "Check user, password and rights: HMGET, HGETALL, HSETNX, HINCRBY, EVALSHA, SCRIPT"
                " LOAD and the script's commands are needed."
            )
        elif type(error).__name__ in _FOR_NOW or text.startswith(_CODES_FOR_NOW):
            state = State.FAILED
            kind = errors.TableUnavailableError
            what = f"does not accept requests now ({text})"
            step = "The request is retried; if it keeps failing, check the server's log and memory."
        elif not isinstance(error, exceptions.ResponseError):
            unanswered = "can't be reached" if lost is State.FAILED else "did not answer"
            state = lost
            kind = errors.TableUnavailableError
            what = f"{unanswered} ({type(error).__name__}: {text})"
            step = (
                "The request is retried; check that the server runs and can be reached from here."
            )
        elif "WRONGTYPE" in text:
            step = "Another type is stored under the key."
        described = kind(f"{self.label}: Redis at {self.address} {what}.", step, table=self.label)
        described.__cause__ = error
        is_of_one_key = "WRONGTYPE" in text  # all other errors say nothing about the record
        return Problem(state, described, of_request=not is_of_one_key)

    async def close(self) -> None:
        """Close the connections after their requests."""
        await self._idle.wait()
        await self.pool.disconnect()


Packed = tuple[int, bytes]  # the number of arguments, and the arguments as they are sent


def pack_argument(text: bytes) -> bytes:
    """Encode one argument of a command."""
    return b"$%d\r\n%b\r\n" % (len(text), text)


def pack_command(*words: str) -> bytes:
    """Encode a command and its arguments."""
    return b"*%d\r\n%b" % (len(words), b"".join(pack_argument(word.encode()) for word in words))


class RedisCodec(RowCodec):
    """Encodes entries as arguments of commands, and decodes records.

    A checked value, as `RowCodec` calls it, is the text (bytes) that Redis stores. `label` names
    the table in errors, and `prefix` begins the names of its records. A text has at most
    `largest_value` bytes. A deleted record is remembered for `horizon` seconds, 0 for ever.
    """

    def __init__(
        self,
        label: str,
        prefix: str,
        key: Sequence[str],
        declared: Sequence[Column],
        largest_value: int,
        horizon: int,
    ) -> None:
        self._largest = largest_value
        self._horizon = horizon
        self._redis_columns = {
            column.name: redis_records.to_redis_column(column) for column in declared
        }
        # After the attributes above: it makes the encoders, which use them.
        super().__init__(label, key, declared, check=self._encoder_of)
        self._packed_names = {name: pack_argument(name.encode()) for name in self.names}
        check_not_reserved(label, declared)
        for column in declared:
            if column.name in self.key:
                check_key_text(label, column)
        self._prefix = prefix.encode() + b":"
        self._decoders = [
            (name, column.decode)
            for name, column in self._redis_columns.items()
            if name not in self.key
        ]
        self._key_decoders = [(name, self._redis_columns[name].decode) for name in self.key]
        others = [name for name, _ in self._decoders]
        asked = [b"adjunct_deleted", *(name.encode() for name in (*self.key, *others))]
        # A get's command before and after the record's name: HMGET, the name, and what it asks for.
        self._get_head = b"*%d\r\n$5\r\nHMGET\r\n" % (2 + len(asked))
        self._get_tail = b"".join(map(pack_argument, asked))

    def name(self, key: Row) -> bytes:
        r"""The name of the record's hash. In keys of several columns, "\" and ":" are escaped
        with "\".
        """
        if len(key) == 1:
            return self._prefix + bytes(key[0])
        escaped = [text.replace(b"\\", b"\\\\").replace(b":", b"\\:") for text in key]
        return self._prefix + b":".join(escaped)

    def _encoder_of(self, column: Column) -> Callable[[Any], bytes]:
        """Return the function that checks a column's value and returns its text; ValueError if that
        is too long.
        """
        check = make_checker(column)
        redis_column = self._redis_columns.get(column.name)
        if redis_column is None:  # a value inside a column
            redis_column = redis_records.to_redis_column(column)
            self._redis_columns[column.name] = redis_column
        encode = redis_column.encode
        largest = self._largest

        def encoded(value: Any) -> bytes:
            text = encode(check(value))
            if len(text) > largest:
                raise ValueError(
                    f"it has {len(text)} bytes, and {largest} are allowed (largest_value=…)"
                )
            return text

        def encoded_text(value: Any) -> bytes:
            """Return the same as `encoded`, faster for ASCII text, which most values are."""
            # A text that begins with byte 0 gets another one in front (`redis_records.py`).
            if value.__class__ is str and value.isascii() and value[:1] != "\0":
                text: bytes = value.encode()
                if len(text) <= largest:
                    return text
            return encoded(value)

        if column.kind is Kind.STRING and column.nested is None:
            return encoded_text
        return encoded

    def check_added(self, name: str, value: Any) -> Any:
        """The checked value to add to a column: a number as text, members of JSON as they were
        given.
        """
        text = super().check_added(name, value)
        if self.column(name).kind is Kind.JSON:
            return value
        return text

    # -- gets

    def pack_get(self, key: Row) -> bytes:
        """The packed command that reads a record; `record` decodes its answer.

        It asks for the mark of a deleted record, for the key's fields, and for the others. The
        key's fields tell a record without other fields from none.
        """
        return self._get_head + pack_argument(self.name(key)) + self._get_tail

    def record(self, key: Row, answer: Sequence[bytes | None]) -> dict[str, Any] | None:
        """The record in the answer to `pack_get`: the key's columns and the stored ones; None if
        there is no record. Raises SchemaMismatchError for a text that does not fit its column.
        """
        is_deleted = answer[0] is not None
        is_missing = answer.count(None) == len(answer)
        if is_deleted or is_missing:
            return None
        texts = answer[1 + len(key) :]
        keyed = zip(self._key_decoders, key, strict=True)
        record: dict[str, Any] = {name: decode(text) for (name, decode), text in keyed}
        try:
            for (name, decode), text in zip(self._decoders, texts, strict=True):
                if text is not None:
                    record[name] = None if text == NULL else decode(text)
        except (TypeError, AttributeError, ValueError, ArithmeticError) as error:
            raise errors.SchemaMismatchError(
                f"{self.table}: the record {self.name(key)!r} has {text!r} as its {name}, which is"
                f" not a valid {self.columns[name].type}.",
                "Correct the record, which another program has written, or the declaration.",
                column=name,
            ) from error
        return record

    # -- writes

    def compares(self, newest_by: str | None) -> str:
        """How the script compares times, which are in the column `newest_by`
        (`RedisColumn.compares`); "-" for None.
        """
        if newest_by is None:
            return "-"
        return self._redis_columns[newest_by].compares

    def settings(self, newest_by: str | None) -> bytes:
        """The packed arguments that are the same in all script calls of an operation: the column of
        the times, the seconds that tombstones stay, and a column of the key.
        """
        return b"".join(
            map(
                pack_argument,
                ((newest_by or "").encode(), b"%d" % self._horizon, self.key[0].encode()),
            )
        )

    def pack_entry(self, operation: Operation[Any], entry: Entry, used: set[str]) -> Packed:
        """The packed arguments of one entry; adds the kinds of changes that the script must
        support to `used`.
        """
        kind = operation.kind
        count = 0
        packed = b""
        if kind is OperationKind.UPDATE:
            count, packed = self._update(operation, entry, used)
        elif kind is not OperationKind.DELETE:
            count, packed = self._pack_fields(entry.value)
        packed = b"$%d\r\n%d\r\n%b" % (len(str(count)), count, packed)
        if not operation.conditions:
            return count + 1, packed
        conditions = self._conditions(operation, entry)
        return count + 1 + len(conditions), b"".join(map(pack_argument, conditions)) + packed

    def _conditions(self, operation: Operation[Any], entry: Entry) -> list[bytes]:
        """The arguments for the conditions of an entry: time and tie, then source and position.
        Raises SchemaMismatchError for a source with a tab or line end.
        """
        conditions = operation.conditions
        marks = operation.entries.marks
        assert marks is not None  # conditions require marks
        mark = marks[entry.place]
        texts = [] if conditions.newest_by is None else [entry.time, mark.tie.encode()]
        if conditions.idempotent:
            if "\n" in mark.source or "\t" in mark.source:
                raise errors.SchemaMismatchError(
                    f"{self.table}: a mark has the source {mark.source!r}; line ends and tabs are"
                    " not allowed in it.",
                    "Use the name of a stream partition as the source.",
                    table=self.table,
                )
            texts += [mark.source.encode(), mark.position.encode()]
        return texts

    def _pack_fields(self, checked: Mapping[str, Any]) -> Packed:
        """Pack checked values as pairs of field and value; columns that are not declared are
        left out.
        """
        names = self._packed_names
        parts = []
        for name, value in checked.items():
            if name in names:
                if value is None:
                    text = NULL
                else:
                    text = value
                parts.append(b"%b$%d\r\n%b\r\n" % (names[name], len(text), text))
        return 2 * len(parts), b"".join(parts)

    def _update(self, operation: Operation[Any], entry: Entry, used: set[str]) -> Packed:
        """The packed arguments of an update: its default, what it sets, and its other changes."""
        values = operation.entries.values or ()
        defaults = operation.entries.defaults
        update = values[entry.place]
        default_count = 0
        default_fields = b""
        default = defaults[entry.place] if defaults else None
        if default is not None:
            used.add("default")
            default_count, default_fields = self._pack_fields(self.whole(entry.key, default))
        sets = entry.value.set
        other_count = 0
        others = b""
        if isinstance(update, Changes):
            # The key's fields must exist, or removing all others would delete the hash.
            if update.remove:
                sets = dict(zip(self.key, entry.key, strict=True)) | sets
                for name in update.remove:
                    sets.pop(name, None)
            other_count, others = self._change_arguments(entry.value, update.remove, used)
        if self.has_inner:
            inside_count, inside = self._inside_arguments(entry.value, used)
            other_count += inside_count
            others += inside
        set_count, set_fields = self._pack_fields(sets)
        head = b"$%d\r\n%d\r\n%b$%d\r\n%d\r\n" % (
            len(str(default_count)),
            default_count,
            default_fields,
            len(str(set_count)),
            set_count,
        )
        return (2 + default_count + set_count + other_count, b"%b%b%b" % (head, set_fields, others))

    def _change_arguments(
        self, changes: CheckedChanges, remove: Sequence[str], used: set[str]
    ) -> Packed:
        """The packed arguments that add, merge, append and remove."""
        more: list[bytes] = []
        largest = b"%d" % self._largest
        for name, value in changes.add.items():
            if isinstance(name, InnerName):
                continue  # see `_inside_arguments`
            column = self._redis_columns[name]
            if self.columns[name].kind is Kind.JSON:
                used.add("merge")
                members = list(map(column.encode, chain.from_iterable(value.items())))
                more += [b"merge", name.encode(), largest, b"%d" % len(members), *members]
            else:
                used.add("add")
                how = b"f" if column.compares == "f" else b"n"  # as doubles, or by digits
                more += [b"add", name.encode(), how, value, column.least, column.most]
        for name, items in changes.append.items():
            if items != b"[]":
                used.add("append")
                without_brackets = items[1:-1]
                more += [b"append", name.encode(), largest, without_brackets]
        for name in remove:
            if name in self.columns:  # else a path, which is set to null
                used.add("remove")
                more += [b"remove", name.encode()]
        return len(more), b"".join(map(pack_argument, more))

    def _inside_arguments(self, changes: CheckedChanges, used: set[str]) -> Packed:
        """The packed arguments that change values inside columns."""
        more: list[bytes] = []
        for name, value in changes.set.items():
            if isinstance(name, InnerName):
                used.add("inside")
                more += self._inside_change(
                    name, b"set", [b"null" if value is None else value, b"", b""]
                )
        for name, value in changes.add.items():
            if isinstance(name, InnerName):
                used.update(("inside", "add"))
                column = self.column(name)
                # A decimal is a text in JSON.
                number = value.strip(b'"')
                more += self._inside_change(
                    name, _ADDED_AS[column.kind], [number, *_bounds_of(column)]
                )
        return len(more), b"".join(map(pack_argument, more))

    def _inside_change(self, path: InnerName, how: bytes, values: Sequence[bytes]) -> list[bytes]:
        """The arguments that change one value inside a column; `how` is "set", or how to add.
        `values` are the value or the number, and the least and the greatest sum.
        """
        names = [write_json(name).encode() for name in path.names]
        largest = b"%d" % self._largest
        head = [b"inside", path.root.encode(), largest, how, b"%d" % len(names)]
        return [*head, *names, *values]


_ADDED_AS = {Kind.INTEGER: b"n", Kind.FLOAT: b"f", Kind.DECIMAL: b"q"}  # inside JSON


def _bounds_of(column: Column) -> tuple[bytes, bytes]:
    """The least and the greatest sum as the script takes them; empty if there are none."""
    bounds = number_bounds(column)
    if bounds is None:
        return b"", b""
    return format(bounds.least, "f").encode(), format(bounds.greatest, "f").encode()


def pack_script_call(
    digest: bytes, settings: bytes, name: bytes, entries: Sequence[Packed]
) -> bytes:
    """Pack the command that calls the script with this `digest` for one key.

    `settings` are the packed arguments that all calls share (`RedisCodec.settings`), `name` is the
    hash, `entries` are the packed arguments of each entry.
    """
    if len(entries) == 1:
        count, packed = entries[0]
    else:
        count, packed = _join_packed(entries)
    return b"*%d\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n$1\r\n1\r\n$%d\r\n%b\r\n$%d\r\n%d\r\n%b%b" % (
        8 + count,
        digest,
        len(name),
        name,
        len(str(len(entries))),
        len(entries),
        settings,
        packed,
    )


def _join_packed(entries: Sequence[Packed]) -> Packed:
    """Return the arguments of several entries as those of one command."""
    counts, parts = zip(*entries, strict=True)
    return sum(counts), b"".join(parts)


def _fence_arguments(fence: Fence) -> tuple[str, str]:
    """Return the arguments of a script that checks a run's epoch."""
    return epoch_name(fence), str(fence.epoch)


def pack_fenced_call(
    bookkeeping: str,
    fence: Fence,
    digest: bytes,
    settings: bytes,
    name: bytes,
    entries: Sequence[Packed],
) -> bytes:
    """Pack a script call like `pack_script_call`, of a script that checks the epoch of a run first.

    Its last key is the book-keeping, its last arguments are those of the check.
    """
    count, packed = _join_packed(entries)
    arguments = [b"EVALSHA", digest, b"2", name, bookkeeping.encode(), b"%d" % len(entries)]
    last = [text.encode() for text in _fence_arguments(fence)]
    return b"*%d\r\n%b%b%b%b" % (
        len(arguments) + 3 + count + len(last),
        b"".join(map(pack_argument, arguments)),
        settings,
        packed,
        b"".join(map(pack_argument, last)),
    )


_LARGEST = 512 * 1024 * 1024  # bytes that a value can have in Redis


@validated
class RedisTable(StoreTable):
    """Read and write function for the hashes of a Redis server whose names begin with `prefix:`.

    The server is `url` ("redis://user@host:6379/0", "rediss://…" for TLS, "unix:///path"), with the
    password in the environment variable `password_env`; or the whole URL is in the variable
    `url_env`. Both are read when connecting, and never stored.

    `columns` gives each column's type. A get returns the key's columns and the stored ones; null, a
    missing column and an empty text are distinct. Numbers are added exactly: integers within the
    bits of their type, decimals within their digits, floats as doubles.

    Deletes under conditions leave a tombstone for `forget_deleted_after` seconds (for ever by
    default). A value of more than `largest_value` bytes is rejected before it is sent. At most
    `connections` requests of an event loop are under way at a time, each for at most `timeout`
    seconds.
    """

    def __init__(  # noqa: PLR0913
        self,
        prefix: str,
        key: str | Sequence[str],
        *,
        columns: Mapping[str, str],
        url: str | None = None,
        url_env: str | None = None,
        password_env: str | None = None,
        forget_deleted_after: WholeSeconds | None = None,
        largest_value: PositiveInt = _LARGEST,
        connections: PositiveInt = 8,
        timeout: Seconds = 10.0,
    ) -> None:
        self.prefix = prefix
        self._label = f"Redis table {prefix}"
        self._declare(prefix, key, columns)
        self.url = url
        self.url_env = url_env
        self.password_env = password_env
        self.forget_deleted_after = forget_deleted_after
        self.largest_value = largest_value
        self.connections = connections
        self.timeout = timeout
        if not prefix or not prefix.isprintable():
            raise errors.ConfigurationError(
                f"a Redis table has the prefix {prefix!r}; expected printable text.",
                argument="prefix",
            )
        for name in ("url_env", "password_env"):
            if getattr(self, name) is not None:
                check_variable_name(name, getattr(self, name), label=self._label)
        check_url(self._label, url, url_env)
        if largest_value > _LARGEST:
            problem = f"{self._label} has largest_value={largest_value!r}; expected at most 512 MB."
            raise errors.ConfigurationError(problem, argument="largest_value")
        horizon = forget_deleted_after or 0
        self._codec = RedisCodec(
            self._label, prefix, self.key, self._declared, largest_value, horizon
        )
        self._servers: PerLoop[RedisServer] = PerLoop(self._server)

    def __repr__(self) -> str:
        where = f"url_env={self.url_env!r}" if self.url is None else f"url={self.url!r}"
        return f"RedisTable({self.prefix!r}, key={self.key}, {where})"

    async def open(self) -> None:
        import_package(self._label, "redis.asyncio", "redis", table=self._label)
        self._servers.here()

    async def check(self, use: TableUse) -> None:
        """Ask the server whether it can be reached and read, and takes writes."""
        await self.open()
        nobody = f"{self.prefix}:{uuid4().hex}"  # no record has this name
        commands = [pack_command("HMGET", nobody, "adjunct_check")]
        if use.writes:
            commands.append(pack_command("HDEL", nobody, "adjunct_check"))
        for answer in await self._servers.here().ask(commands, reads=True):
            if isinstance(answer, Problem) and answer.error is not None:
                raise answer.error

    async def find_misfits(self, operation: Operation[Any]) -> Mapping[int, Problem]:
        return validate_entries(self._codec, operation).problems

    async def close(self) -> None:
        """Close the running event loop's connections after its requests."""
        server = self._servers.take()
        if server is not None:
            await server.close()

    async def send(self, operation: Operation[Any]) -> Outcomes:
        if not len(operation):
            return Outcomes(0)
        if operation.kind is OperationKind.GET:
            return await self._get(operation)
        return await self._write(operation)

    async def check_settings(self, conditions: Conditions, *, fenced: bool = False) -> list[str]:
        """Raise ConfigurationError if the server may evict what the conditions need; return a
        sentence if it may evict records.
        """
        await self.open()
        server = self._servers.here()
        policy = await self._eviction_policy()
        check_eviction(self._label, server.address, policy, conditions, fenced=fenced)
        note = note_eviction(self._label, server.address, policy)
        if note is None:
            return []
        return [note]

    async def _eviction_policy(self) -> str | None:
        """Return the server's eviction policy, which is read once for each event loop; None if
        it can't be read.
        """
        server = self._servers.here()
        async with server.reading_policy:
            if server.policy is None:
                server.policy = await read_eviction_policy(self._answer) or UNKNOWN
        if server.policy == UNKNOWN:
            return None
        return server.policy

    async def _check_eviction(self, operation: Operation[Any]) -> None:
        """Raise ConfigurationError if the server may evict what the operation's conditions need.

        Logs the notes of `check_settings` once in this process.
        """
        server = self._servers.here()
        conditions = operation.conditions
        fenced = operation.fenced
        was_noted = server.policy is not None
        if was_noted:
            policy = await self._eviction_policy()
            check_eviction(self._label, server.address, policy, conditions, fenced=fenced)
            return
        for note in await self.check_settings(conditions, fenced=fenced):
            if note not in _logged:
                _logged.add(note)
                _log.warning("%s", note)

    async def _answer(self, *words: str) -> Any:
        """Return the server's answer to one command that changes nothing, or its Problem."""
        (answer,) = await self._servers.here().ask([pack_command(*words)], reads=True)
        return answer

    async def inspect(self) -> Presence:
        await self.open()
        (answer,) = await self._ask(("HGETALL", self._bookkeeping))
        return self._presence(answer)

    async def begin_run(self, *, create: bool, marks: bool, fence: Fence | None = None) -> Presence:
        """Count a run in the key `prefix__adjunct_runs`, which is lost with the records if the
        server loses them.

        TableNotFoundError if the key is missing, unless `create` allows to create it;
        RunLeaseLostError if the `fence` is that of an earlier run than the last.
        """
        await self.open()
        if not create and not (await self.inspect()).exists:
            problem = (
                f"{self._label}: the key {self._bookkeeping} is gone, and its records probably"
                " with it."
            )
            raise errors.TableNotFoundError(problem, "Restore them from a copy.", table=self._label)
        if fence is not None:
            check = redis_records.FENCE + "return 1"
            (known,) = await self._ask(
                ("EVAL", check, "1", self._bookkeeping, *_fence_arguments(fence))
            )
            self._check_fenced(known, fence)
        *_, answer = await self._ask(
            ("HSETNX", self._bookkeeping, ID, str(new_table_id())),
            ("HINCRBY", self._bookkeeping, RUNS, "1"),
            ("HGETALL", self._bookkeeping),
        )
        return self._presence(answer)

    def _check_fenced(self, answer: Any, fence: Fence) -> None:
        """Raise RunLeaseLostError if a script has answered with the epoch of a later run."""
        if isinstance(answer, list) and len(answer) == 2 and answer[0] == redis_records.FENCED:
            must_raise_epoch(self._label, int(answer[1]), fence)

    @property
    def _bookkeeping(self) -> str:
        """The name of the hash with the book-keeping."""
        return f"{self.prefix}{BOOKKEEPING_SUFFIX}"

    def _presence(self, answer: list[bytes]) -> Presence:
        """Return what the book-keeping, as names and values in turn, says about the table."""
        texts = [text.decode() for text in answer]
        values = dict(zip(texts[::2], texts[1::2], strict=True))
        if values:
            return Presence(exists=True, id=values.get(ID), runs=int(values.get(RUNS, 0)))
        return NO_TABLE

    async def _ask(self, *commands: tuple[str, ...]) -> list[Any]:
        """Return the answers to these commands; raise the error of the first that failed."""
        packed = [pack_command(*command) for command in commands]
        answers = await self._servers.here().ask(packed)
        for answer in answers:
            if isinstance(answer, Problem):
                assert answer.error is not None
                raise answer.error
        return answers

    async def _get(self, operation: Operation[Any]) -> Outcomes:
        """Return the records of an operation's keys as its outcomes."""
        valid = validate_entries(self._codec, operation)
        codec = self._codec
        records: list[Any] = [None] * len(operation)
        problems = dict(valid.problems)
        commands = [codec.pack_get(entry.key) for entry in valid.entries]
        answers = await self._servers.here().ask(commands, reads=True) if commands else []
        for entry, answer in zip(valid.entries, answers, strict=True):
            if isinstance(answer, Problem):
                problems[entry.place] = answer
                continue
            try:
                records[entry.place] = codec.record(entry.key, answer)
            except errors.AdjunctError as error:
                problems[entry.place] = Problem(State.REFUSED, error)
        return Outcomes(len(operation), records, problems)

    async def _write(self, operation: Operation[Any]) -> Outcomes:
        """Write an operation with one script call per key. Raises ConfigurationError if the server
        may evict what its conditions need.
        """
        try:
            await self._check_eviction(operation)
        except errors.TransientError as error:
            return Outcomes.all(len(operation), Problem(State.FAILED, error))  # nothing was sent
        valid = validate_entries(self._codec, operation)
        problems = dict(valid.problems)
        # By the hash's name, the index and the packed arguments of each entry.
        by_name: dict[bytes, list[tuple[int, Packed]]] = {}
        used: set[str] = set()
        for entry in valid.entries:
            try:
                packed = self._codec.pack_entry(operation, entry, used)
                name = self._codec.name(entry.key)
                by_name.setdefault(name, []).append((entry.place, packed))
            except errors.AdjunctError as error:
                problems[entry.place] = Problem(State.REFUSED, error)
        begun = 0
        answers = await self._call_scripts(operation, by_name, frozenset(used))
        for own, answer in zip(by_name.values(), answers, strict=True):
            if answer == DONE:
                continue
            # A single answer is for the only entry, or is an error of the whole call.
            results = answer if isinstance(answer, list) else [answer] * len(own)
            for (place, _), one in zip(own, results, strict=True):
                begun += one == BEGUN
                problem = self._problem(one, operation.entries.keys[place])
                if problem is not None:
                    problems[place] = problem
        return Outcomes(len(operation), problems=problems, defaults_put=begun)

    async def _call_scripts(
        self,
        operation: Operation[Any],
        by_name: Mapping[bytes, Sequence[tuple[int, Packed]]],
        used: frozenset[str],
    ) -> list[Any]:
        """Call the script that writes the entries of a hash, for each hash; return the answers.
        Raises RunLeaseLostError if a later run has begun.
        """
        conditions = operation.conditions
        fence = operation.fence if operation.fenced else None
        script = redis_records.build_script(
            operation.kind,
            self._codec.compares(conditions.newest_by),
            conditions.idempotent,
            used,
            fenced=fence is not None,
        )
        if fence is None:
            pack_call = pack_script_call
        else:
            pack_call = partial(pack_fenced_call, self._bookkeeping, fence)
        settings = self._codec.settings(conditions.newest_by)
        commands = []
        for name, own in by_name.items():
            entries = [packed for _, packed in own]
            commands.append(pack_call(script.digest, settings, name, entries))
        answers = await self._send_calls(commands, script.text)
        if fence is not None:
            for answer in answers:
                self._check_fenced(answer, fence)
        return answers

    def _problem(self, answer: Any, key: Key) -> Problem | None:
        """The problem that the script's answer for an entry means; None if the entry was
        applied.
        """
        if isinstance(answer, Problem):
            return answer
        if isinstance(answer, bytes):
            refused = errors.TableError(
                f"{self._label}: the entry for {key!r} was rejected:"
                f" {answer.decode(errors='replace')}.",
                "Correct the update, the record or the column's type.",
                table=self._label,
            )
            return Problem(State.REFUSED, refused)
        if answer == MISSING:
            return Problem(State.MISSING, record_not_found_error([key], self._label))
        return Problem(State.SKIPPED) if answer == SKIPPED else None

    async def _send_calls(self, commands: Sequence[bytes], script: bytes) -> list[Any]:
        """Send calls of a script; return the answers. If the server does not know the script, as
        after a restart, load it and send the calls again.
        """
        server = self._servers.here()
        answers = await server.ask(commands) if commands else []
        again = [place for place, answer in enumerate(answers) if answer is NO_SCRIPT]
        if again:
            load = b"*3\r\n%b" % b"".join(map(pack_argument, (b"SCRIPT", b"LOAD", script)))
            loaded, *rest = await server.ask([load, *(commands[place] for place in again)])
            for place, answer in zip(again, rest, strict=True):
                answers[place] = loaded if answer is NO_SCRIPT else answer
        return answers

    def _server(self) -> RedisServer:
        """Return the connections of an event loop, which are made when they are needed."""
        url = self.url if self.url_env is None else read_variable(self._label, self.url_env, "URL")
        password = None
        if self.password_env is not None:
            password = read_variable(self._label, self.password_env, "password")
        assert url is not None
        return RedisServer(
            self._label,
            url,
            password,
            source="url" if self.url_env is None else self.url_env,
            connections=self.connections,
            timeout=self.timeout,
        )
