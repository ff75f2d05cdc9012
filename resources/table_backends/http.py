"""`HttpTable`: records of an HTTP service that has one resource per key. Subclasses adapt it to
their service.

    get               GET    path     2xx: the record, 404: none
    put               PUT    path     2xx
    put if absent     PUT    path, If-None-Match: *       2xx: put, 412: there is one
    update            PATCH  path     2xx, 404: the record is missing
    delete            DELETE path     2xx, 404: there was none

Every other answer is an error. A subclass adapts to its service by overriding `decode`, `encode`,
`path_of` or one of the requests; for a service that takes many records at once it overrides
`get_all`, `put_all`, `delete_all` or `update_all`, and sends with `request`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from urllib.parse import quote, urlsplit

from pydantic import PositiveInt

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.optional_packages import import_package
from dagster_adjunct.resources.table_backends.nested_values import PartError, check_json
from dagster_adjunct.resources.table_backends.store import check_variable_name, read_variable
from dagster_adjunct.resources.table_backends.write_plan import Key, Record
from dagster_adjunct.resources.tables import functions
from dagster_adjunct.resources.tables.functions import (
    DeclaredFunction,
    TableReadFunction,
    TableWriteFunction,
)
from dagster_adjunct.resources.tables.operation import (
    Capabilities,
    Changes,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    RowEntries,
    State,
    first_cause,
    key_columns,
    key_length_error,
    key_reorderer,
    to_changes,
)
from dagster_adjunct.resources.threads import PerLoop
from dagster_adjunct.resources.times import utc_now
from dagster_adjunct.resources.validation import Seconds, validated

if TYPE_CHECKING:
    import ssl

    import httpx

READS = ("GET", "HEAD")
QueryValue = str | int | float | bool | None
_SHOWN = 300  # characters of a reply that an error contains at most


@dataclass(eq=False, repr=False, kw_only=True)
class HttpUnavailableError(errors.TableUnavailableError):
    """The service could not answer the request now, or its answer was lost.

    `had_effect` is False if the request certainly had no effect, None if that is unknown.
    """

    status: int | None = None
    retry_after: float | None = None  # seconds
    had_effect: bool | None = None


def error_from_response(
    answer: httpx.Response, label: str, secrets: Iterable[str]
) -> errors.AdjunctError:
    """Return the error for an unsuccessful response. It quotes the beginning of the body,
    without `secrets`.
    """
    status = answer.status_code
    beginning = _quote_reply(answer.text, secrets)
    what = f"{label}: {answer.request.method} {answer.request.url.copy_with(query=None)}"
    may_pass = status in (408, 429) or status >= 500
    if may_pass:
        retry_after = parse_retry_after(answer.headers.get("Retry-After"), utc_now())
        # The service asks to come back later, instead of doing anything.
        is_put_off = status == 429 or (status == 503 and retry_after is not None)
        had_no_effect = is_put_off or answer.request.method in READS
        return HttpUnavailableError(
            f"{what} was answered with {status}{beginning}.",
            "The request is retried; if it keeps failing, contact the service's operator.",
            table=label,
            status=status,
            retry_after=retry_after,
            had_effect=False if had_no_effect else None,
        )
    is_redirected = status < 400
    concerns_all_records = is_redirected or status in (401, 403, 405, 407)
    kind = errors.TableAccessError if concerns_all_records else errors.TableError
    return kind(
        f"{what} was rejected with {status}{beginning}.",
        "Correct the request or the declaration.",
        table=label,
    )


_PARTS = (206, 207)  # Partial Content, Multi-Status


def partial_answer_error(answer: httpx.Response, label: str) -> errors.TableError:
    """The error for an answer that is successful only for a part of what was asked, and may name
    what failed.
    """
    return errors.TableError(
        f"{label}: {answer.request.method} {answer.request.url.copy_with(query=None)} was answered"
        f" with {answer.status_code}, which stands for a part of what was asked only.",
        "Use a path of the service with one answer per record, or override the method that sends"
        " the request.",
        table=label,
    )


def parse_retry_after(retry_after: str | None, now: datetime) -> float | None:
    """Return the seconds to wait that a Retry-After header asks for, as a number or as a date after
    `now`.

    None without a header, or if it is invalid.
    """
    if retry_after is None:
        return None
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - now).total_seconds())


def lost_request_error(
    error: Exception, label: str, method: str, url: str, secrets: Iterable[str]
) -> HttpUnavailableError:
    """Return the error for a request that got no response; a write that may have been sent may
    have had an effect.
    """
    import httpx

    unsent = isinstance(
        error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout | httpx.ProxyError
    )
    what = "did not answer"
    if unsent:
        what = "can't be reached"
    problem = (
        f"{label}: {method} {url}: the service"
        f" {what} ({type(error).__name__}{_quote_reply(str(error), secrets)})."
    )
    step = "The request is retried; check that the service runs and can be reached from here."
    return HttpUnavailableError(
        problem, step, table=label, had_effect=False if unsent or method in READS else None
    )


def _quote_reply(text: str, secrets: Iterable[str]) -> str:
    """Return ": " and the beginning of a reply, without secrets; "" if the reply is empty."""
    for secret in secrets:
        text = text.replace(secret, "***")
    text = " ".join(text.split())
    if not text:
        return ""
    if len(text) > _SHOWN:
        return f": {text[:_SHOWN]}…"
    return f": {text}"


_COLUMN = re.compile(r"{(\w+)}")
_SECRET_HEADERS = ("authorization", "proxy-authorization", "cookie", "x-api-key")


@validated
@dataclass(frozen=True)
class HttpExtra:
    """Query parameters and headers for one call of a table: `table.get(key,
    HttpExtra(params={"unit": "km"}))`.

    Pass mappings or pairs; they are stored as pairs. Its headers replace the table's headers of the
    same names. It is hashable, so a cache keeps the answers to different extras apart.
    """

    params: Mapping[str, QueryValue] | tuple[tuple[str, QueryValue], ...] = ()
    headers: Mapping[str, str] | tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("params", "headers"):
            given = getattr(self, name)
            if isinstance(given, Mapping):
                object.__setattr__(self, name, tuple(sorted(given.items())))


class _Client(NamedTuple):
    """One event loop's client, its limit of concurrent requests (`turns`), and the secrets to keep
    out of errors.

    Waiting for a turn does not count for the timeout.
    """

    client: httpx.AsyncClient
    turns: asyncio.Semaphore
    secrets: tuple[str, ...]


async def _check_before_sending(event: str, info: object) -> None:
    """Look at the run's lease once more when the connection is there, whose making may have been
    paused. Raises RunLeaseLostError if the run may have lost its lease.
    """
    if event.endswith(".send_request_headers.started"):
        await functions.check_run_fence()


@validated
class HttpTable(
    DeclaredFunction, TableReadFunction[Key, Record], TableWriteFunction[Key, Record, Record]
):
    """Read and write function for an HTTP service.

    `path` has the key's columns in braces ("/planes/{tail}"). Their values are percent-encoded, so
    a key can't add segments to the path; a segment that would become empty, "." or ".." is
    rejected. `headers` are sent with each request. `secret_headers` maps headers to the environment
    variables with their values, which are read when a client is opened and never stored.
    `puts_if_absent` declares that the service honours `If-None-Match: *`.

    At most `connections` requests of an event loop are under way at a time, each for at most
    `timeout` seconds.
    """

    def __init__(
        self,
        base_url: str,
        path: str,
        key: str | Sequence[str],
        *,
        headers: Mapping[str, str] | None = None,
        secret_headers: Mapping[str, str] | None = None,
        puts_if_absent: bool = False,
        connections: PositiveInt = 10,
        timeout: Seconds = 10.0,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.path = path
        self.key = key_columns(path, key)
        self.headers = dict(headers or {})
        self.secret_headers = dict(secret_headers or {})
        self.puts_if_absent = puts_if_absent
        self.connections = connections
        self.timeout = timeout
        self._label = f"HTTP table {path}"
        for header, name in self.secret_headers.items():
            check_variable_name(f"secret_headers[{header!r}]", name, label=self._label)
        self._check()
        self._clients: PerLoop[_Client] = PerLoop(self._client)

    def _check(self) -> None:
        """Raise ConfigurationError for an invalid URL or path, and for a secret in the
        declaration.
        """
        what = f"HTTP table {self.path}"
        step = "Use https://host:port/path, without a query."
        try:
            parts = urlsplit(self.base_url)
            parts.port  # noqa: B018 - which may be none
        except ValueError:
            parts = urlsplit("")  # has no scheme: rejected below
        is_server = parts.scheme in ("http", "https") and parts.hostname
        if not is_server or parts.query or parts.fragment:
            raise errors.ConfigurationError(
                f"{what} has an invalid base_url (not shown).", step, argument="base_url"
            )
        if parts.username is not None or parts.password is not None:
            raise errors.ConfigurationError(
                f"{what} has credentials in its base_url, which would end up in pickles and logs.",
                "Remove them, and name an environment variable for the header:"
                " secret_headers={'Authorization': …}.",
                argument="base_url",
            )
        for header in self.headers:
            if header.lower() in _SECRET_HEADERS:
                raise errors.ConfigurationError(
                    f"{what} has a value for its secret header {header}, which would end up in"
                    " pickles and documents.",
                    f"Name the environment variable that holds it: secret_headers={{{header!r}:"
                    " …}.",
                    argument="headers",
                )
        named = _COLUMN.findall(self.path)
        if sorted(named) != sorted(self.key) or not self.path.startswith("/"):
            raise errors.ConfigurationError(
                f"{what}: its path names {', '.join(named) or 'no column'}, and its key is"
                f" {', '.join(self.key)}.",
                "Use a path like /planes/{tail} that names each key column once.",
                argument="path",
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_url!r}, {self.path!r}, key={self.key})"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            updates=True,
            changes=frozenset({"set"}),
            puts_if_absent=self.puts_if_absent,
            takes_args=True,
        )

    async def open(self) -> None:
        self._clients.here()

    async def check(self, use: functions.TableUse) -> None:
        """Ask whether the service can be reached, with a HEAD of its base URL; any answer will do.

        Whether it knows the path and accepts the credentials can't be asked without a key.
        """
        import_package(self._label, "httpx", "http", table=self._label)
        import httpx

        open_ = self._clients.here()
        url = self.base_url + "/"
        try:
            async with asyncio.timeout(self.timeout):
                await open_.client.head(url)
        except (httpx.TransportError, TimeoutError) as error:
            raise lost_request_error(error, self._label, "HEAD", url, open_.secrets) from error

    async def find_misfits(self, operation: Operation[Any]) -> Mapping[int, Problem]:
        """Return the problems of entries whose path or body can't be made; sends nothing."""
        found: dict[int, Problem] = {}
        values = operation.entries.values or ()
        ordered = key_reorderer(self._label, self.key, operation.key)
        for place, key in enumerate(operation.entries.keys):
            try:
                self.path_of(key if ordered is None else ordered(key))
                if operation.kind is OperationKind.UPDATE:
                    self.encode(to_changes(values[place]).set)
                else:
                    self.encode(values[place])
            except Exception as error:  # noqa: BLE001 - as for a request
                found[place] = functions.problem_from_error(self, error)
        return found

    async def close(self) -> None:
        """Close the running event loop's connections after its requests."""
        open_ = self._clients.take()
        if open_ is not None:
            for _ in range(self.connections):
                await open_.turns.acquire()  # wait until no request is under way or waits
            await open_.client.aclose()

    async def send(self, operation: Operation[Any]) -> Outcomes:
        """Send the entries with their keys in the order of this table's key columns."""
        ordered = key_reorderer(self._label, self.key, operation.key)
        if ordered is None:
            return await super().send(operation)
        keys = list(map(ordered, operation.entries.keys))  # in the order of this table's key
        entries = RowEntries(keys, operation.entries.values)
        return await super().send(replace(operation, entries=entries, key=self.key))

    # -- overridden for other services

    def path_of(self, key: Key) -> str:
        """The path of the key's resource, which is appended to the base URL. Raises
        SchemaMismatchError for a key with which it would be that of another resource.
        """
        if len(self.key) == 1:
            parts = (key,)
        else:
            parts = key
        if not isinstance(parts, tuple) or len(parts) != len(self.key):
            raise key_length_error(self._label, key, self.key)
        texts = {
            name: quote(_path_text(self._label, part), safe="")
            for name, part in zip(self.key, parts, strict=True)
        }
        segments = [
            _COLUMN.sub(lambda match: texts[match[1]], segment) for segment in self.path.split("/")
        ]
        for segment, declared in zip(segments, self.path.split("/"), strict=True):
            if segment in ("", ".", "..") and segment != declared:
                # It would be the path of another resource.
                problem = (
                    f"{self._label}: with the key {key!r}, a segment of the URL's path becomes"
                    f" {segment!r}, so the URL would name another resource or the whole collection."
                )
                step = "Filter such keys out before they reach the table."
                raise errors.SchemaMismatchError(problem, step, table=self._label)
        return "/".join(segments)

    def encode(self, record: Record) -> bytes:
        """The body of a put or an update: the record, or the changed columns, as JSON. Raises
        SchemaMismatchError if JSON does not hold it.
        """
        try:
            return json.dumps(dict(record), allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:
            why = _misfit(record) or error
            problem = f"{self._label}: a record can't be written as JSON: {why}."
            step = "Convert its values before writing, or override encode()."
            raise errors.SchemaMismatchError(problem, step, table=self._label) from error

    def decode(self, body: bytes) -> Record:
        """The record in the body of the response to a get, which must be a JSON object."""
        try:
            record: Any = json.loads(body)
            wrong = None if isinstance(record, dict) else f"a JSON {type(record).__name__}"
        except ValueError:
            wrong = "no JSON"
        if wrong is not None:
            problem = (
                f"{self._label}: expected a JSON object in the response, got {wrong}:"
                f" {body[:200]!r}."
            )
            raise errors.TableError(
                problem, "Check the path and the service, or override decode().", table=self._label
            )
        return cast("Record", record)

    # -- requests

    async def get(self, key: Key, *args: object) -> Record | None:
        """Return the record that GET answers, None for the status 404."""
        answer = await self.request("GET", self.path_of(key), args, expected=(404,))
        if answer.status_code == 404:
            return None
        return self.decode(answer.content)

    async def put(self, key: Key, value: Record, *args: object) -> None:
        await self.request("PUT", self.path_of(key), args, body=self.encode(value))

    async def put_if_absent(self, key: Key, value: Record, *args: object) -> bool:
        """PUT with If-None-Match, and return whether the record was absent: not for the status
        412.
        """
        body = self.encode(value)
        only = {"If-None-Match": "*"}
        answer = await self.request(
            "PUT", self.path_of(key), args, body=body, headers=only, expected=(412,)
        )
        return answer.status_code != 412

    async def update(self, key: Key, update: Record | Changes, *args: object) -> None:
        """PATCH with the columns to set. Raises RecordNotFoundError for the status 404."""
        changes = to_changes(update)
        if changes.add or changes.append or changes.remove:
            problem = f"{self._label} only sets columns: its updates can't add, append or remove."
            raise errors.SchemaMismatchError(
                problem, "Set the columns to their new values.", table=self._label
            )
        answer = await self.request(
            "PATCH", self.path_of(key), args, body=self.encode(changes.set), expected=(404,)
        )
        if answer.status_code == 404:
            raise functions.record_not_found_error([key], self._label)

    async def delete(self, key: Key, *args: object) -> None:
        await self.request("DELETE", self.path_of(key), args, expected=(404,))

    async def request(
        self,
        method: str,
        path: str,
        args: Sequence[object] = (),
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        expected: Sequence[int] = (),
    ) -> httpx.Response:
        """Send a request; return its response if it is successful, or if its status is in
        `expected`.

        Else it raises an HttpUnavailableError, which is retried, or a TableError; before sending,
        RunLeaseLostError if the run that sends it has lost its lease. `args` are the extra
        arguments of the table's call, each an `HttpExtra`.
        """
        import httpx

        params: list[tuple[str, QueryValue]] = []
        extra_headers = {} if body is None else {"Content-Type": "application/json"}
        for extra in args:
            if not isinstance(extra, HttpExtra):
                problem = f"{self._label} got {extra!r} as an argument; expected an HttpExtra."
                step = "Pass query parameters and headers as HttpExtra(params={…}, headers={…})."
                raise errors.TableError(problem, step, table=self._label)
            params += cast("Iterable[tuple[str, QueryValue]]", extra.params)
            extra_headers |= dict(extra.headers)
        open_ = self._clients.here()
        url = self.base_url + path
        try:
            async with open_.turns, asyncio.timeout(self.timeout):
                await functions.check_run_fence()
                answer = await open_.client.request(
                    method,
                    url,
                    content=body,
                    params=tuple(params) or None,
                    headers={**extra_headers, **(headers or {})},
                    extensions={"trace": _check_before_sending},
                )
        except (httpx.TransportError, TimeoutError) as error:
            raise lost_request_error(error, self._label, method, url, open_.secrets) from error
        if answer.status_code in _PARTS:
            raise partial_answer_error(answer, self._label)
        if answer.is_success or answer.status_code in expected:
            return answer
        raise error_from_response(answer, self._label, open_.secrets)

    def problem_of(self, error: BaseException, *, sent: bool = True) -> Problem:
        """The problem of a request that raised this: of unknown outcome if it was sent and not
        answered clearly.
        """
        unavailable = first_cause(error, HttpUnavailableError)
        if unavailable is None:
            return super().problem_of(error, sent=sent)
        if sent and unavailable.had_effect is None:
            state = State.UNKNOWN
        else:
            state = State.FAILED
        return Problem(state, error, unavailable.retry_after)

    def _client(self) -> _Client:
        """Open an event loop's client, with the secrets that environment variables hold now."""
        import_package(self._label, "httpx", "http", table=self._label)
        import httpx

        secrets = {
            header: read_variable(self._label, name, f"header {header}")
            for header, name in self.secret_headers.items()
        }
        client = httpx.AsyncClient(
            headers={**self.headers, **secrets},
            limits=httpx.Limits(
                max_connections=self.connections, max_keepalive_connections=self.connections
            ),
            timeout=self.timeout,
            verify=_load_trust_store(),
        )
        return _Client(client, asyncio.Semaphore(self.connections), tuple(secrets.values()))


def _misfit(record: Record) -> str:
    """Return which part of a record JSON does not hold, and why; "" if it holds all of them."""
    try:
        check_json(dict(record))
    except (PartError, RecursionError) as error:
        return str(error)
    return ""


@cache
def _load_trust_store() -> ssl.SSLContext:
    """Return the trusted certificates. They are loaded once per process: that takes longer than
    some requests.
    """
    import httpx

    return httpx.create_ssl_context()


def _path_text(label: str, part: object) -> str:
    """Return a value of a key as text for a path, which is not percent-encoded yet. Raises
    SchemaMismatchError for other types.
    """
    if isinstance(part, bool):
        if part:
            return "true"
        return "false"
    if isinstance(part, date | datetime):
        return part.isoformat()
    if not isinstance(part, str | int):
        problem = (
            f"{label} got {part!r} ({type(part).__name__}) in a key; expected text, whole numbers,"
            " dates or times."
        )
        raise errors.SchemaMismatchError(
            problem, "Convert the key, or override path_of().", table=label
        )
    return str(part)
