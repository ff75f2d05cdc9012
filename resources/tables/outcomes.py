"""`Outcomes`: what became of each entry of an operation.

An entry without a problem is done, and done entries cost nothing here: what is kept is the records that a get found,
and the problems by the entry's place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

_NONE: Mapping[int, Problem] = MappingProxyType({})


class State(Enum):
    """What became of an entry that is not simply done."""

    SKIPPED = "skipped"  # its condition did not hold: the store has something newer, or has it already. No error
    MISSING = "missing"  # an update met no record, and had no default
    REFUSED = "refused"  # it fails again until something is changed
    FAILED = "failed"  # it had no effect, and may be sent again
    UNKNOWN = "unknown"  # sent, and no answer came: it may have had its effect


@dataclass(frozen=True, slots=True)
class Problem:
    """Why one entry is not done. `retry_after`: seconds that the store asked to wait before it is sent again.

    `of_request`: the request failed as a whole, whatever was in it, so that nothing is said of this one record.
    """

    state: State
    error: BaseException | None = None
    retry_after: float | None = None
    of_request: bool = False

    @property
    def may_pass(self) -> bool:
        """Whether the entry may succeed when it is sent again as it was."""
        return self.state in (State.FAILED, State.UNKNOWN)

    @property
    def is_answer(self) -> bool:
        """Whether the store did as it was asked, and this is what it had to say: no failure, and nothing to repeat."""
        return self.state in (State.SKIPPED, State.MISSING)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """One outcome for each of `count` entries.

    `records` are a get's, None where there is no record. `defaults_put` counts the records that updates began.
    `waited`: seconds before requests were sent, for the table's rate; no retry policy's time is used up by them.
    """

    count: int
    records: Sequence[Any] | None = None
    problems: Mapping[int, Problem] = field(default_factory=lambda: _NONE)
    defaults_put: int = 0
    waited: float = 0.0

    @staticmethod
    def all(count: int, problem: Problem) -> Outcomes:
        """The same problem for every entry."""
        return Outcomes(count, problems=dict.fromkeys(range(count), problem))

    def places(self, *states: State) -> list[int]:
        """The places of the entries in one of these states, in order."""
        return sorted(place for place, problem in self.problems.items() if problem.state in states)

    @property
    def done(self) -> int:
        """How many entries have taken effect, or were read."""
        return self.count - len(self.problems)

    def amended(self, places: Sequence[int], later: Outcomes) -> Outcomes:
        """These outcomes where the entries at `places` were sent again, with `later` as their outcomes."""
        again = set(places)
        problems = {place: problem for place, problem in self.problems.items() if place not in again}
        problems |= {places[place]: problem for place, problem in later.problems.items()}
        records = self.records
        if later.records is not None:
            records = [None] * self.count if records is None else list(records)
            for place, record in zip(places, later.records, strict=True):
                records[place] = record
        return Outcomes(
            self.count, records, problems, self.defaults_put + later.defaults_put, self.waited + later.waited
        )


def joined(parts: Iterable[Outcomes]) -> Outcomes:
    """The outcomes of an operation that was sent in parts, one after the other."""
    kept = list(parts)
    if len(kept) == 1:
        return kept[0]
    problems: dict[int, Problem] = {}
    records: list[Any] | None = [] if any(part.records is not None for part in kept) else None
    count = 0
    for part in kept:
        problems |= {count + place: problem for place, problem in part.problems.items()}
        if records is not None:
            records.extend(part.records if part.records is not None else [None] * part.count)
        count += part.count
    defaults_put, waited = sum(part.defaults_put for part in kept), sum(part.waited for part in kept)
    return Outcomes(count, records, problems, defaults_put, waited)
