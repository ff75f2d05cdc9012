"""`DynamoDbSegments`: key-value tables in DynamoDB, without a server of one's own."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from dagster_adjunct.resources.backends.dynamodb_connection import Connection
from dagster_adjunct.resources.common import check_whole_number
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.key_value.segment import TableId, TableSegment
from dagster_adjunct.resources.key_value_backends.dynamodb_layout import (
    LIMITS,
    Clients,
    LoopCalls,
    PhysicalTables,
    SegmentLayout,
    TableCalls,
    ThreadCalls,
    physical_name,
)
from dagster_adjunct.resources.key_value_backends.dynamodb_segment import HORIZON, DynamoDbSegment
from dagster_adjunct.resources.validation import validated

_LABEL = "key-value tables in DynamoDB"
_PREFIX = re.compile(r"[A-Za-z0-9_.-]{0,64}")


@validated
class DynamoDbSegments:
    """Each key-value table is a DynamoDB table, paid by request, whose name begins with `prefix`.

    Every write is a transaction, which costs twice what a plain write does, and a check whether the table is sealed. Up
    to `threads` requests of a table are under way at a time for each event loop, and for all threads that have none.

    Region, endpoint and credentials come from boto3's own chain unless they are given: `credentials_env` names the
    environment variables that hold the access key's id, the secret and maybe the session's token.
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
            raise ConfigurationError(
                f"{_LABEL} have prefix={prefix!r}: expected at most 64 letters, digits, '-', '_' or '.'.",
                "Change it.",
                argument="prefix",
            )
        self.prefix = prefix
        self.threads = threads
        self._clients = Clients(self.connection)
        self._tables = PhysicalTables(self._clients, threads)
        self._calls: WeakValueDictionary[tuple[type, TableId], TableCalls] = WeakValueDictionary()
        self._opening = threading.Lock()

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
        return _made, (self.to_dict(),)

    def create(self, table: TableId, partitions: int) -> None:
        self._tables.create(table, self._name(table))

    def seal(self, table: TableId, partitions: int) -> None:
        self._tables.seal(table, self._name(table), partitions)

    def delete(self, table: TableId, partitions: int) -> None:
        self._tables.delete(table, self._name(table))

    def open(self, table: TableId, partition: int) -> TableSegment:
        return self._segment(LoopCalls, table, partition)

    def open_blocking(self, table: TableId, partition: int) -> TableSegment:
        return self._segment(ThreadCalls, table, partition)

    def location(self, table: TableId, partition: int) -> str:
        where = self.connection.endpoint_url or self.connection.region or "of boto3's configuration"
        return f"DynamoDB {where}, table {self._name(table)}, partition {partition}"

    def _segment(self, kind: type[LoopCalls] | type[ThreadCalls], table: TableId, partition: int) -> DynamoDbSegment:
        with self._opening:
            calls = self._calls.get((kind, table))
            if calls is None:
                calls = self._calls[kind, table] = kind(table, self._clients, self.threads)
        return DynamoDbSegment(calls, SegmentLayout(self._name(table), partition))

    def _name(self, table: TableId) -> str:
        return physical_name(self.prefix, table)


def _made(settings: dict[str, Any]) -> DynamoDbSegments:
    return DynamoDbSegments(**settings)
