"""`Batch` and `BatchProvider`: which operations are gathered into one, and when it is full."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dagster_adjunct.resources.checked_numbers import check_whole_number
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.tables.operation import Operation, RowEntries


class Batch:
    """Operations that are sent together, in the order in which they were added."""

    __slots__ = ("_provider", "count", "operations", "size")

    def __init__(self, provider: BatchProvider) -> None:
        self._provider = provider
        self.operations: list[Operation[Any]] = []
        self.count = 0  # entries
        self.size = 0  # bytes, where the provider has a limit

    def takes(self, operation: Operation[Any], size: int) -> bool:
        """Whether the batch stays within its limits with the operation in it; an empty one takes anything."""
        provider = self._provider
        if not self.operations:
            return True
        if self.count + operation.count > provider.size:
            return False
        return provider.bytes is None or self.size + size <= provider.bytes

    def add(self, operation: Operation[Any], size: int) -> None:
        self.operations.append(operation)
        self.count += operation.count
        self.size += size

    @property
    def full(self) -> bool:
        """Whether nothing more fits, so that there is no use in waiting."""
        provider = self._provider
        return self.count >= provider.size or (provider.bytes is not None and self.size >= provider.bytes)


@dataclass(frozen=True, slots=True)
class BatchProvider:
    """What a table's batches are like: how much is in one request, and how long an operation waits for others.

    - `size`: at most so many entries.
    - `bytes`: about so many bytes at most (`size_of`); an entry that is larger goes alone.
    - `delay`: operations wait so many seconds for others, unless a batch is full before. With 0 those that are made in
      one turn of the event loop are gathered, which costs an operation nothing but that turn.
    - `compact`: of puts and deletes of one key in a batch only the last is sent, unless something else is asked of the
      key between them. Updates are refused then, since each of them counts; so are conditions.
    """

    size: int = 1000
    bytes: int | None = None
    delay: float = 0.0
    compact: bool = False

    def __post_init__(self) -> None:
        whole = "a whole number from 1 on"
        check_whole_number(self.size, f"a batch of {self.size!r} entries", whole, argument="size")
        if self.bytes is not None:
            check_whole_number(self.bytes, f"a batch of {self.bytes!r} bytes", whole, argument="bytes")
        number = isinstance(self.delay, int | float) and not isinstance(self.delay, bool)
        if not number or not 0 <= self.delay < math.inf:
            raise ConfigurationError(
                f"a batch's delay is {self.delay!r}: expected a number of seconds from 0 on.",
                "Change it.",
                argument="delay",
            )
        if not isinstance(self.compact, bool):
            raise ConfigurationError(
                f"a batch's compact is {self.compact!r}: expected True or False.", "Change it.", argument="compact"
            )

    def batch(self) -> Batch:
        """A new, empty batch."""
        return Batch(self)

    def gathers(self, operation: Operation[Any], size: int) -> bool:
        """Whether the operation may be sent with others: its entries are Python values, and leave room."""
        if type(operation.entries) is not RowEntries or operation.count >= self.size:
            return False
        return self.bytes is None or size < self.bytes

    def size_of(self, operation: Operation[Any]) -> int:
        """The operation's bytes where there is a limit, else 0."""
        return 0 if self.bytes is None else operation.entries.nbytes
