"""Makes, seals and deletes the DynamoDB tables that key-value tables lie in. Blocking; all of it may be repeated."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from dagster_adjunct.resources.backends.dynamodb_connection import code_of
from dagster_adjunct.resources.backends.dynamodb_schema import usable_key
from dagster_adjunct.resources.errors import AdjunctError, TableUnavailableError, TransientError
from dagster_adjunct.resources.key_value.table_segment import TableId
from dagster_adjunct.resources.key_value_backends.dynamodb_calls import Clients, label_of, meaning_of
from dagster_adjunct.resources.key_value_backends.dynamodb_layout import GATES, KEY_SCHEMA, SegmentLayout

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

_LONGEST_NAME = 255
_CREATING_SECONDS = 10.0  # for a server that is at a loss; then up to a minute for the table
_SEALING_SECONDS = 60.0
_DELETING_SECONDS = 300.0


def physical_name(prefix: str, table: TableId) -> str:
    """Return the name of a table in DynamoDB: the incarnation makes it its own, the rest is for people, and cut."""
    room = _LONGEST_NAME - len(prefix) - len(table.incarnation) - 2
    scope = table.scope[: max(room // 2, room - len(table.name))]
    return f"{prefix}{scope}-{table.name[: room - len(scope)]}-{table.incarnation}"


class PhysicalTables:
    """Tables by their physical names, reached by these clients, so many requests at a time."""

    def __init__(self, clients: Clients, threads: int) -> None:
        self._clients = clients
        self._threads = threads

    def create(self, table: TableId, name: str) -> None:
        """Make a table, paid by request, and wait until it takes requests."""
        tags = {"adjunct:scope": table.scope, "adjunct:table": table.name}
        with self._client(table) as client:

            def make() -> None:
                try:
                    usable_key(client, label_of(table), name, KEY_SCHEMA, create=True, tags=tags)
                except AdjunctError:
                    raise
                except Exception as error:
                    raise meaning_of(error, table, sent=False) from error

            _retrying(_CREATING_SECONDS)(make)

    def seal(self, table: TableId, name: str, partitions: int) -> None:
        """Shut all gates. A gate that a write is just passing is shut after it, and no write passes it then."""
        gates = [
            SegmentLayout(name, partition).gate(number) for partition in range(partitions) for number in range(GATES)
        ]
        with self._client(table) as client, ThreadPoolExecutor(self._threads) as threads:

            def shut(gate: dict[str, Any]) -> None:
                try:
                    client.put_item(TableName=name, Item=gate)
                except Exception as error:
                    raise meaning_of(error, table, sent=True) from error

            def shut_for_certain(gate: dict[str, Any]) -> None:
                _retrying(_SEALING_SECONDS)(shut, gate)

            try:
                list(threads.map(shut_for_certain, gates))
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise

    def delete(self, table: TableId, name: str) -> None:
        """Delete a table and wait until it is gone: while it is being deleted it may still take writes."""
        with self._client(table) as client:

            def see_it_gone() -> None:
                try:
                    client.delete_table(TableName=name)
                except Exception as error:
                    if code_of(error) == "ResourceNotFoundException":
                        return
                    if code_of(error) != "ResourceInUseException":  # it is being made, or deleted
                        raise meaning_of(error, table, sent=False) from error
                raise TableUnavailableError(
                    f"{label_of(table)} is not deleted after {_DELETING_SECONDS:.0f} s.",
                    f"Try again; look at the table {name} in AWS.",
                    table=label_of(table),
                )

            _retrying(_DELETING_SECONDS, longest_pause=2.0)(see_it_gone)

    @contextmanager
    def _client(self, table: TableId) -> Iterator[DynamoDBClient]:
        client = self._clients.new(label_of(table), self._threads)
        try:
            yield client
        finally:
            client.close()


def _retrying(seconds: float, longest_pause: float = 0.5) -> Retrying:
    return Retrying(
        retry=retry_if_exception(_may_pass),
        wait=wait_random_exponential(multiplier=0.01, max=longest_pause),
        stop=stop_after_delay(seconds),
        reraise=True,
    )


def _may_pass(error: BaseException) -> bool:
    """Whether a server that is there may answer otherwise in a moment."""
    from botocore.exceptions import ConnectTimeoutError, EndpointConnectionError

    unreached = isinstance(error.__cause__, EndpointConnectionError | ConnectTimeoutError)
    return isinstance(error, TransientError) and not unreached
