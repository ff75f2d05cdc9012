"""What a Spark task does to write its records into a table: batches are pulled beside the event loop, and a bounded
number of them is under way; Spark waits where the table is slower."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dagster_adjunct.resources.errors import AdjunctError, TableError, TableUnavailableError
from dagster_adjunct.resources.tables.arrow_operations import Part
from dagster_adjunct.resources.tables.error_chain import first_cause
from dagster_adjunct.resources.tables.outcomes import Outcomes, Problem, State
from dagster_adjunct.resources.tables.record_problems import is_of_the_record

AT_ONCE = 4
"""Batches of Spark's that are under way at a time."""
KEYS_SHOWN = 5
_END = object()


@dataclass(frozen=True, slots=True)
class Letter:
    """An entry that is refused for good: its row of a batch, what was asked, and why it was not done."""

    batch: Any
    row: int
    kind: str
    key: Any
    value: Any
    problem: str


@dataclass(slots=True)
class TaskReport:
    """What became of a task's records: counts, and those that were not done."""

    failed: int = 0
    keys: list[str] = field(default_factory=list)  # the first of those that failed
    error: AdjunctError | None = None
    missing: bool = False
    unfit: bool = False  # whether the error is about what is in its record
    letters: list[Any] = field(default_factory=list)

    def add(self, part: Part, outcomes: Outcomes, *, letters: Callable[[Letter], Any] | None, at_most: int) -> None:
        """Take in what became of a part's entries. With `letters`, those that are refused for good are kept as such."""
        problems = outcomes.problems
        if not problems:
            return
        entries = part.operation.entries
        for place in sorted(problems):
            problem = problems[place]
            if problem.state is State.SKIPPED:  # its condition did not hold: an answer, which the table counts
                continue
            if letters is not None and is_of_the_record(problem) and len(self.letters) < at_most + 1:
                values = entries.values
                value = None if values is None else values[place]
                kind = part.operation.kind.value
                self.letters.append(
                    letters(Letter(part.batch, part.rows[place], kind, entries.keys[place], value, _told(problem)))
                )
                if len(self.letters) <= at_most:
                    continue
            self._fail(problem, entries.keys[place])

    def _fail(self, problem: Problem, key: Any) -> None:
        self.failed += 1
        if len(self.keys) < KEYS_SHOWN:
            self.keys.append(repr(key))
        if self.error is None:
            self.error, self.missing = _error(problem), problem.state is State.MISSING
            self.unfit = is_of_the_record(problem)


def _told(problem: Problem) -> str:
    error = problem.error
    return error.problem if isinstance(error, AdjunctError) else f"{type(error).__name__}: {error}"


def _error(problem: Problem) -> AdjunctError:
    error = problem.error
    ours = None if error is None else first_cause(error, AdjunctError)
    if ours is not None:
        return ours
    told = f"{type(error).__name__}: {error}" if error is not None else f"the entry is {problem.state.value}"
    if problem.may_pass:
        return TableUnavailableError(f"{told}.", "See whether the store can be reached, then run the batch again.")
    return TableError(f"{told}.", "Correct the records or the table, then run the batch again.")


async def pump(
    batches: Iterator[Any],
    parts: Callable[[Any], Sequence[Part]],
    send: Callable[[Part], Any],
    done: Callable[[Part, Outcomes], bool],
) -> None:
    """Send all batches, at most `AT_ONCE` of them under way; stop pulling where `done` says that it is no use.

    Operations are begun in order, and the table keeps those of one key in the order of the calls.
    """
    loop = asyncio.get_running_loop()
    going: set[asyncio.Task[bool]] = set()
    useful = True

    async def write(parts: Sequence[Part]) -> bool:
        outcomes = await asyncio.gather(*(send(part) for part in parts))
        well = [done(part, outcome) for part, outcome in zip(parts, outcomes, strict=True)]
        return all(well)

    try:
        while useful:
            batch = await loop.run_in_executor(None, next, batches, _END)
            if batch is _END:
                break
            if len(going) >= AT_ONCE:
                await asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED)
            finished = {task for task in going if task.done()}
            going -= finished
            # What follows a batch that failed must not be begun: see HeldBack.
            useful = all(task.result() for task in finished)
            if useful:
                going.add(asyncio.create_task(write(parts(batch))))
                await asyncio.sleep(0)  # it takes its turn before the next one
        await asyncio.gather(*going)
    finally:
        for task in going:
            task.cancel()
        await asyncio.gather(*going, return_exceptions=True)
