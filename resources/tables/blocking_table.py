"""`BlockingTable`: a remote table for code that isn't async."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

from dagster_adjunct.resources.loop_thread import LoopThread
from dagster_adjunct.resources.schemas.records import ArrowFrame
from dagster_adjunct.resources.tables.partial_update import UpdateContract, UpdateMessage

if TYPE_CHECKING:
    from dagster_adjunct.resources.tables.metrics import TableMetrics
    from dagster_adjunct.resources.tables.operation import Operation
    from dagster_adjunct.resources.tables.outcomes import Outcomes
    from dagster_adjunct.resources.tables.remote_table import RemoteTable

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
U = TypeVar("U")


class BlockingTable(Generic[K, V, U]):
    """The operations of a `RemoteTable`, each returning when it is done.

    They run on an event loop of its own in a thread of its own, so they may be called from any thread,
    also from one whose event loop is running (which they block meanwhile). Use it in a `with` block,
    or `close()` it; arguments, results and errors are those of `RemoteTable`.
    """

    def __init__(self, table: RemoteTable[K, V, U]) -> None:
        self.table = table
        self._thread = LoopThread(f"table-{table.name}")

    def __enter__(self) -> BlockingTable[K, V, U]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def metrics(self) -> TableMetrics:
        """What the table has done so far."""
        return self.table.metrics

    def send(self, operation: Operation[K]) -> Outcomes:
        return self._thread.run(self.table.send(operation))

    def flush(self) -> None:
        self._thread.run(self.table.flush())

    def get(self, key: K, *args: object) -> V | None:
        return self._thread.run(self.table.get(key, *args))

    def get_all(self, keys: Iterable[K], *args: object) -> dict[K, V]:
        return self._thread.run(self.table.get_all(keys, *args))

    def put(self, key: K, value: V | None, *args: object) -> None:
        self._thread.run(self.table.put(key, value, *args))

    def put_all(self, entries: Iterable[tuple[K, V | None]] | ArrowFrame, *args: object) -> None:
        self._thread.run(self.table.put_all(entries, *args))

    def delete(self, key: K, *args: object, newest: object = None) -> None:
        self._thread.run(self.table.delete(key, *args, newest=newest))

    def delete_all(self, keys: Iterable[K], *args: object, newest: object = None) -> None:
        self._thread.run(self.table.delete_all(keys, *args, newest=newest))

    def update(self, key: K, update: U, *args: object) -> None:
        self._thread.run(self.table.update(key, update, *args))

    def update_all(self, entries: Iterable[tuple[K, U]] | ArrowFrame, *args: object) -> None:
        self._thread.run(self.table.update_all(entries, *args))

    def update_messages(
        self,
        entries: Iterable[tuple[K, UpdateMessage[U, V]]],
        contract: UpdateContract = UpdateContract.UPDATE_ONLY,
        *args: object,
    ) -> None:
        self._thread.run(self.table.update_messages(entries, contract, *args))

    def close(self) -> None:
        """Close the table and end the thread. The next operation starts them again."""
        self._thread.close(self.table.close)
