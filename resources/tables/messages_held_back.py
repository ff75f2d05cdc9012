"""What is not sent because an earlier message of its key was given up."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from dagster_adjunct.resources.tables.layer import Layer, send_others
from dagster_adjunct.resources.tables.operation import Operation
from dagster_adjunct.resources.tables.order_of_a_key import Turn
from dagster_adjunct.resources.tables.outcomes import Outcomes, Problem, State
from dagster_adjunct.resources.tables.record_problems import comes_again

_Line = tuple[Hashable, str]


class HeldBack:
    """Sends operations; where one with marks is given up, those that wait behind it don't overtake it.

    The store skips a message that is older than the last that it applied. Were a later one of the key applied, the one
    that was given up would be skipped when the whole batch is sent again, and so be lost. What is asked after the
    caller was told goes its way, but not what is sent to be run again as a whole (`Operation.rerun`): whoever sends
    that asks for more before all of a batch is answered. What is refused for what is in it holds nothing back.
    """

    def __init__(self) -> None:
        self._held: WeakKeyDictionary[Turn, dict[_Line, Problem]] = WeakKeyDictionary()
        self._until_rerun: dict[_Line, Problem] = {}

    async def sent(self, turn: Turn, operation: Operation[Any], below: Layer) -> Outcomes:
        """The outcomes of an operation whose turn has come."""
        if not operation.conditions.idempotent:
            return await below.send(operation)
        held = self._held.pop(turn, None) if self._held else None
        if operation.rerun and self._until_rerun:
            held = {**self._until_rerun, **(held or {})}
        outcomes = await (below.send(operation) if held is None else _others(operation, held, below))
        if outcomes.problems and (turn.behind or operation.rerun):
            self._hold(turn, operation, outcomes)
        return outcomes

    def _hold(self, turn: Turn, operation: Operation[Any], outcomes: Outcomes) -> None:
        lines = _lines(operation)
        given_up = {lines[place]: problem for place, problem in outcomes.problems.items() if comes_again(problem)}
        if operation.rerun:
            self._until_rerun.update(given_up)
        waiting, seen = list(turn.behind) if given_up else [], set[Turn]()
        while waiting:
            behind = waiting.pop()
            if behind not in seen:
                seen.add(behind)
                waiting.extend(behind.behind)
                self._held.setdefault(behind, {}).update(given_up)


def _lines(operation: Operation[Any]) -> Sequence[_Line]:
    """In which line each entry waits: that of its key and source."""
    entries = operation.entries
    return [(key, mark.source) for key, mark in zip(entries.keys, entries.marks or (), strict=True)]


async def _others(operation: Operation[Any], held: Mapping[_Line, Problem], below: Layer) -> Outcomes:
    """Send the entries of lines that are not held; the others have failed, as nothing of them was sent."""
    lines = _lines(operation)
    problems = {
        place: replace(held[line], state=State.FAILED if held[line].may_pass else State.REFUSED)
        for place, line in enumerate(lines)
        if line in held
    }
    return await send_others(operation, problems, below.send)
