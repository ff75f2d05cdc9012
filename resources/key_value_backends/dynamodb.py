"""`DynamoDbSegments`: key-value tables in DynamoDB."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from dagster_adjunct.resources.backends.dynamodb import resolve_table_key
from dagster_adjunct.resources.backends.dynamodb_connection import Connection, error_code
from dagster_adjunct.resources.common import argument_error, check_whole_number
from dagster_adjunct.resources.errors import TableUnavailableError, TransientError
from dagster_adjunct.resources.key_value.segment import TableId, TableSegment, restore_backend
from dagster_adjunct.resources.key_value_backends.dynamodb_layout import (
    GATES,
    KEY_SCHEMA,
    LIMITS,
    SegmentLayout,
    TableCalls,
    dynamodb_errors,
    table_label,
)
from dagster_adjunct.resources.key_value_backends.dynamodb_segment import HORIZON, DynamoDbSegment
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

_LONGEST_NAME = 255
_CREATING_SECONDS = 10.0  # for a server in trouble; the table itself may take a minute
_SEALING_SECONDS = 60.0
_DELETING_SECONDS = 300.0
_LABEL = "key-value tables in DynamoDB"
_PREFIX = re.compile(r"[A-Za-z0-9_.-]{0,64}")


@validated
class DynamoDbSegments:
    """Key-value tables as DynamoDB tables, paid per request, whose names start with `prefix`.

    Every write is a transaction, which costs twice as much as a plain write, plus a check whether the table is sealed.
    Up to `threads` requests of a table run at a time for each event loop, and for all threads without one.

    Region, endpoint and credentials come from boto3's own chain unless they are passed. `credentials_env` names the
    environment variables with the access key's id, the secret and, optionally, the session token.
    """

    limits = LIMITS
    waits = True
    horizon = HORIZON

    def __init__(
        self,
        *,
        region: str | None = None,
        endpoint_url: str | None = None,
        profile: str | None = None,
        credentials_env: Sequence[str] | None = None,
        prefix: str = "adjunct-",
        threads: int = 16,
        connect_timeout: float = 3.0,
        read_timeout: float = 15.0,
    ) -> None:
        one = (credentials_env,) if isinstance(credentials_env, str) else credentials_env
        named = None if one is None else tuple(one)
        self.connection = Connection(region, endpoint_url, profile, named, connect_timeout, read_timeout)
        self.connection.check(_LABEL)
        check_whole_number(threads, f"{_LABEL} have threads={threads!r}", "at least one", argument="threads")
        if not _PREFIX.fullmatch(prefix):
            found, expected = f"{_LABEL} have prefix={prefix!r}", "at most 64 letters, digits, '-', '_' or '.'"
            raise argument_error(found, expected, argument="prefix")
        self.prefix = prefix
        self.threads = threads
        self._calls: WeakValueDictionary[TableId, TableCalls] = WeakValueDictionary()
        self._opening, self._connecting = threading.Lock(), threading.Lock()

    def __repr__(self) -> str:
        where = self.connection.endpoint_url or self.connection.region or "by boto3's configuration"
        return f"DynamoDbSegments({where}, prefix={self.prefix!r})"

    def to_dict(self) -> dict[str, Any]:
        connection = self.connection
        return {
            "region": connection.region,
            "endpoint_url": connection.endpoint_url,
            "profile": connection.profile,
            "credentials_env": None if connection.credentials_env is None else list(connection.credentials_env),
            "prefix": self.prefix,
            "threads": self.threads,
            "connect_timeout": connection.connect_timeout,
            "read_timeout": connection.read_timeout,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return restore_backend, (DynamoDbSegments, self.to_dict())

    def create(self, table: TableId, partitions: int) -> None:
        """Create a table, paid per request, and wait until it accepts requests."""
        name, tags = self._name(table), {"adjunct:scope": table.scope, "adjunct:table": table.name}

        def create(client: DynamoDBClient) -> None:
            with dynamodb_errors(table, sent=False):
                resolve_table_key(client, table_label(table), name, KEY_SCHEMA, create=True, tags=tags)

        with self._client(table) as client:
            _retrying(_CREATING_SECONDS)(create, client)

    def seal(self, table: TableId, partitions: int) -> None:
        """Close all gates. A gate that a write is passing is closed after it, and no write passes it then."""
        name = self._name(table)
        gates = [SegmentLayout(at).gate(number) for at in range(partitions) for number in range(GATES)]
        with self._client(table) as client, ThreadPoolExecutor(self.threads) as threads:

            def close(gate: dict[str, Any]) -> None:
                with dynamodb_errors(table, sent=True):
                    client.put_item(TableName=name, Item=gate)

            try:
                list(threads.map(lambda gate: _retrying(_SEALING_SECONDS)(close, gate), gates))
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise

    def delete(self, table: TableId, partitions: int) -> None:
        """Delete a table and wait until it is gone, because it may accept writes until then."""
        name, label = self._name(table), table_label(table)

        def delete(client: DynamoDBClient) -> None:
            with dynamodb_errors(table, sent=False):
                try:
                    client.delete_table(TableName=name)
                except Exception as error:
                    if error_code(error) == "ResourceNotFoundException":
                        return
                    if error_code(error) != "ResourceInUseException":  # it is being created or deleted
                        raise
            problem = f"{label} is not deleted after {_DELETING_SECONDS:.0f} s."
            raise TableUnavailableError(problem, f"Try again, and check the table {name} in AWS.", table=label)

        with self._client(table) as client:
            _retrying(_DELETING_SECONDS, longest_pause=2.0)(delete, client)

    def open(self, table: TableId, partition: int) -> TableSegment:
        with self._opening:
            calls = self._calls.get(table)
            if calls is None:
                calls = self._calls[table] = TableCalls(table, self._name(table), self._connect, self.threads)
        return DynamoDbSegment(calls, SegmentLayout(partition))

    def location(self, table: TableId, partition: int) -> str:
        where = self.connection.endpoint_url or self.connection.region or "of boto3's configuration"
        return f"DynamoDB {where}, table {self._name(table)}, partition {partition}"

    @contextmanager
    def _client(self, table: TableId) -> Iterator[DynamoDBClient]:
        client = self._connect(table_label(table))
        try:
            yield client
        finally:
            client.close()

    def _connect(self, label: str) -> DynamoDBClient:
        """Return a client for all threads, which its user closes."""
        with self._connecting:
            self.connection = self.connection.with_session(label)
            return self.connection.client(label, self.threads)

    def _name(self, table: TableId) -> str:
        """Return the name of a table in DynamoDB: unique by its incarnation; the rest is for people, and truncated."""
        room = _LONGEST_NAME - len(self.prefix) - len(table.incarnation) - 2
        scope = table.scope[: max(room // 2, room - len(table.name))]
        return f"{self.prefix}{scope}-{table.name[: room - len(scope)]}-{table.incarnation}"


def _retrying(seconds: float, longest_pause: float = 0.5) -> Retrying:
    return Retrying(
        retry=retry_if_exception(_may_pass),
        wait=wait_random_exponential(multiplier=0.01, max=longest_pause),
        stop=stop_after_delay(seconds),
        reraise=True,
    )


def _may_pass(error: BaseException) -> bool:
    """Whether a reachable server may answer otherwise in a moment."""
    from botocore.exceptions import ConnectTimeoutError, EndpointConnectionError

    unreached = isinstance(error.__cause__, EndpointConnectionError | ConnectTimeoutError)
    return isinstance(error, TransientError) and not unreached
