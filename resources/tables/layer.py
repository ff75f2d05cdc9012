"""`Layer`: the one method that all parts of a table have, from the cache down to the function."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dagster_adjunct.resources.tables.operation import Operation
from dagster_adjunct.resources.tables.outcomes import Outcomes, Problem


class Layer(Protocol):
    """Takes operations and tells what became of each entry.

    What goes wrong with single entries is in the outcomes. What is raised is about all of them and no request was sent
    (a wrong declaration, a null key), or is the caller's cancellation.
    """

    async def send(self, operation: Operation[Any]) -> Outcomes: ...

    async def close(self) -> None:
        """Give back what is open, after what is under way; the next operation opens it again."""
        ...


async def send_others(
    operation: Operation[Any], problems: Mapping[int, Problem], send: Callable[[Operation[Any]], Awaitable[Outcomes]]
) -> Outcomes:
    """The outcomes of an operation of which the entries with `problems` are not sent."""
    if not problems:
        return await send(operation)
    places = [place for place in range(len(operation)) if place not in problems]
    outcomes = Outcomes(len(operation), problems=problems)
    if not places:
        return outcomes
    return outcomes.amended(places, await send(operation.with_entries(operation.entries.take(places))))


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
    largest: int | None = None


# What a store can do that checks conditions itself and takes all changes.
OF_A_STORE = Capabilities(
    updates=True,
    changes=frozenset({"set", "add", "append", "remove"}),
    puts_if_absent=True,
    updates_with_defaults=True,
    newest_by=True,
    idempotent=True,
)
