"""Runs, and tasks of them, that spend one budget: in time that passes by hand, and what was
spent in each window.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dagster_adjunct.resources.tables.credit_demands import Demand, Demands
from dagster_adjunct.resources.tables.rate import Budget, SharedTimeline, lease_credits

STEP = 0.01


@dataclass
class Task:
    """Sends requests of so many credits one after the other; each takes `pause` seconds in the
    store.
    """

    request: float
    pause: float
    demand: Demand | None = None
    free_at: float = 0.0


@dataclass
class Run:
    """A driver: its clock is `ahead` of true time; a lease takes `delay` seconds of it."""

    name: str
    demands: Demands
    ahead: float = 0.0
    delay: float = 0.05
    tasks: list[Task] = field(default_factory=list)
    pending: tuple[float, Callable[[], None]] | None = None
    alive: bool = True


@dataclass
class World:
    """One budget that any number of runs spend; `spent` are the times at which credits were, and
    how many.
    """

    rate: float
    now: float = 1000.0
    timeline: SharedTimeline = field(default_factory=SharedTimeline)
    runs: list[Run] = field(default_factory=list)
    spent: list[tuple[float, float]] = field(default_factory=list)
    spent_by: dict[str, float] = field(default_factory=dict)

    def run(
        self,
        name: str,
        tasks: int = 2,
        *,
        request: float | None = None,
        pause: float = 0.02,
        **more: float,
    ) -> Run:
        run = Run(name, Demands(self.rate), **more)
        credits = Budget("b", "write", self.rate).largest if request is None else request
        run.tasks += [Task(credits, pause) for _ in range(tasks)]
        self.runs.append(run)
        return run

    def at(self, time: float) -> bool:
        return abs(self.now - time) < STEP / 2

    def leave(self, task: Task) -> None:
        """A task dies, in the middle of a demand or not."""
        for run in self.runs:
            if task in run.tasks:
                run.tasks.remove(task)
                if task.demand is not None:
                    run.demands.withdraw(task.demand, self.now)

    def pass_(self, seconds: float, at_step: Callable[[World], None] = lambda world: None) -> None:
        for _ in range(round(seconds / STEP)):
            self.now += STEP
            at_step(self)
            for run in random.Random(int(self.now * 100)).sample(self.runs, len(self.runs)):
                if run.alive:
                    self._step(run)

    def _step(self, run: Run) -> None:
        for task in run.tasks:
            if task.demand is None and task.free_at <= self.now:
                task.demand = run.demands.add(task.request)
        for demand in run.demands.pay(self.now):
            self.spent.append((self.now, demand.credits))
            self.spent_by[run.name] = self.spent_by.get(run.name, 0.0) + demand.credits
            for task in run.tasks:
                if task.demand is demand:
                    task.demand, task.free_at = None, self.now + task.pause
        if run.pending is not None and run.pending[0] <= self.now:
            run.pending[1]()
            run.pending = None
        if run.pending is None and (wish := run.demands.next_lease(self.now)) is not None:
            asked = wish

            def decide() -> None:
                run.demands.lease_takes = run.delay
                self.timeline, got = lease_credits(
                    self.timeline, run.name, self.now + run.ahead, asked, self.rate
                )
                if got is not None:
                    credits = (got.end - got.start) * self.rate
                    run.demands.leased.add(self.now + got.start, self.now + got.end, credits)

            run.pending = (self.now + run.delay, decide)


def of_the_rate(
    spent: Iterable[tuple[float, float]], rate: float, begin: float, end: float
) -> list[float]:
    """Return what was spent in each window of 10 s between these times, a tenth of a second
    apart, of what may be.
    """
    spent = list(spent)
    parts, start = [], begin
    while start + 10 <= end:
        parts.append(
            sum(credits for time, credits in spent if start <= time < start + 10) / (rate * 10)
        )
        start += 0.1
    return parts
