"""`Layer`: the one method that all parts of a table have, from the cache down to the function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from dagster_adjunct.resources.tables.operation import Operation
from dagster_adjunct.resources.tables.outcomes import Outcomes


class Layer(Protocol):
    """Takes operations and tells what became of each entry.

    What goes wrong with single entries is in the outcomes. What is raised is about all of them and no request was sent
    (a wrong declaration, a null key), or is the caller's cancellation.
    """

    async def send(self, operation: Operation[Any]) -> Outcomes: ...

    async def close(self) -> None:
        """Give back what is open, after what is under way; the next operation opens it again."""
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a function can do beyond puts, deletes and gets one by one; planning refuses what is not here.

    `changes` are the parts of `Changes` that its updates take. `largest` is how many entries a request may have.
    """

    updates: bool = False
    changes: frozenset[str] = frozenset()
    puts_if_absent: bool = False
    updates_with_defaults: bool = False  # update, or begin with the default, in one request
    newest_by: bool = False
    idempotent: bool = False
    takes_args: bool = False
    takes_arrow: bool = False  # ArrowEntries without making Python values of them
    largest: int | None = None
