"""A run that stays: having caught up, it waits for something new and goes on, until its time is
over.

While it waits, it sends one request every half second, or every quarter second for ten seconds
after something new. In turn it looks at each stream, at the startpoints, and whether another run
asks for the application. What it has opened stays open.

    new records, markers, changes           the step goes on with its next batch
    startpoints, other partition counts     the step ends and begins again, as in a new run
    its end, memory, another run            the step ends, and the run with it

A run that always has something to read never waits; it looks between batches.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import cycle
from pathlib import Path

from dagster_adjunct.assets.writing.generation import Runtime
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.graph import (
    advances_between_batches,
    is_advanced_by_runs,
)
from dagster_adjunct.orchestration.startpoints.store import open_startpoints
from dagster_adjunct.orchestration.step.context import StepContext
from dagster_adjunct.orchestration.step.progress import StepReport
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.errors import RunLeaseLostError, TransientError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects.store import requests_at_once
from dagster_adjunct.resources.threads import REQUESTS_AT_ONCE, call_in_threads

# Seconds between two requests of a run that waits; and for how many seconds after something new it
# is half of that.
_PAUSE = 0.5
_EAGER_FOR = 10.0
# Of this many requests one is not for a stream.
_TURNS = 4
# Seconds between two looks at datasets that are read from files or queries, which take several
# requests.
_SOURCES_EVERY = 30.0
# Seconds after which a run that does not wait advances its datasets again.
_BUSY_EVERY = 10.0
# For how many seconds datasets may fail to advance, because a store does not answer, before the run
# fails.
_PATIENCE = 120.0
MAX_MEMORY = 4 * 1024**3
"""The bytes of memory of the Python process at which a staying run ends, so that the next one
begins afresh.
"""
_log = logging.getLogger("adjunct.run")

# Returns a text that changes when there is something new.
Look = Callable[[], object]


class Following:
    """How long a run stays, and what it looks at.

    `streams` and `startpoints` return texts that change with what they look at; `asked` returns who
    asks for the application, "" for nobody. `refresh` is called when a stream has changed: it
    advances the datasets, and returns whether the step can go on, or has to begin again. `datasets`
    are streams that are looked at after each batch, too. With `sources`, datasets that are read
    from files or queries, `refresh` is also called every 30 seconds. `say` receives messages for
    the user. `tick` is called again and again while the run waits. Up to `at_once` looks are made
    at the same time. `ended` is the reason for the run's end, "" before it.
    """

    def __init__(
        self,
        lasts: timedelta,
        *,
        streams: Mapping[str, Look],
        startpoints: Look,
        asked: Callable[[], str],
        refresh: Callable[[], bool],
        datasets: Collection[str] = (),
        sources: bool = False,
        say: Callable[[str], None] = lambda text: None,
        tick: Callable[[], None] = lambda: None,
        at_once: int = REQUESTS_AT_ONCE,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        memory: Callable[[], int] | None = None,
    ) -> None:
        self.ended = ""
        self._lasts, self._refresh, self._sources = lasts, refresh, sources
        self._say, self._tick, self._at_once = say, tick, at_once
        self._looks: dict[str, Look] = {**streams, "startpoints": startpoints}
        self._streams, self._asked, self._datasets = frozenset(streams), asked, tuple(datasets)
        self._clock, self._sleep, self._memory = clock, sleep, memory or memory_in_use
        self._end = clock() + lasts.total_seconds()
        self._next = self._next_sources = self._eager_until = clock()
        self._next_busy = clock() + _BUSY_EVERY
        self._failing_since: float | None = None
        self._seen: dict[str, object] = {}
        self._said = False
        self._turns = self._take_turns()

    def begin(self) -> None:
        """Remember the current state of the streams and startpoints, before the run reads anything.

        Whatever differs later is new.
        """
        self._seen |= {name: self._look(name) for name in self._looks}
        self._next_sources = self._clock() + _SOURCES_EVERY
        self._next_busy = self._clock() + _BUSY_EVERY

    def wait(self) -> bool:
        """Wait for something new.

        Returns whether the step goes on; if not, it begins again, or `ended` says why the run is
        over.
        """
        if not self._said:
            self._said = True
            self._say(f"caught up; staying for {self._lasts} from the start of the run")
        while not self._is_over():
            self._tick()
            pause = self._next - self._clock()
            if pause > 0:
                self._sleep(min(pause, max(0.0, self._end - self._clock())))
                continue
            self._next = self._clock() + (
                _PAUSE / 2 if self._clock() < self._eager_until else _PAUSE
            )
            if self._sources and self._clock() >= self._next_sources:
                self._next_sources = self._clock() + _SOURCES_EVERY
                if (holds := self._try_refresh()) is not None:
                    return holds
                continue
            name = next(self._turns)
            if name is None:
                self._ask()
            elif self._has_changed(name):
                self._eager_until = self._clock() + _EAGER_FOR
                if name not in self._streams:
                    return False
                if (holds := self._try_refresh()) is not None:
                    return holds
                self._seen.pop(name)  # it is looked at again
        self._say(f"this run ends: {self.ended}")
        return False

    def go_on(self) -> bool:
        """Check once, after a batch, what `wait` checks again and again; return whether the step
        goes on.

        A run that always has something to read notices only here that its time is over, that
        startpoints were requested, or that another run asks for the application.
        """
        self._tick()
        if not self._is_over():
            looks = [partial(self._has_changed, name) for name in ("startpoints", *self._datasets)]
            _, starts_anew, *news = call_in_threads(self._ask, *looks, at_once=self._at_once)
        if self.ended:
            self._say(f"this run ends: {self.ended}")
            return False
        if starts_anew:
            return False
        changed = [name for name, is_new in zip(self._datasets, news, strict=True) if is_new]
        if not changed and self._clock() < self._next_busy:
            return True
        holds = self._try_refresh()
        for name in changed if holds is None else ():
            self._seen.pop(name)  # it is looked at again
        return holds is not False

    def _try_refresh(self) -> bool | None:
        """Return the result of `refresh`; None if a store does not answer.

        Raises the store's error once that has lasted for _PATIENCE seconds.
        """
        try:
            holds = self._refresh()
        except TransientError as error:
            since = self._failing_since = (
                self._clock() if self._failing_since is None else self._failing_since
            )
            if isinstance(error, RunLeaseLostError) or self._clock() - since >= _PATIENCE:
                raise
            _log.warning("%s It is tried again.", error.problem)
            return None
        self._failing_since, self._next_busy = None, self._clock() + _BUSY_EVERY
        return holds

    def _is_over(self) -> bool:
        if not self.ended and self._clock() >= self._end:
            self.ended = f"it has stayed for {self._lasts}"
        if not self.ended and (used := self._memory()) > MAX_MEMORY:
            self.ended = (
                f"its process uses {used / 1024**3:.1f} GiB of memory, over"
                f" {MAX_MEMORY / 1024**3:.0f}"
            )
        return bool(self.ended)

    def _has_changed(self, name: str) -> bool:
        before, self._seen[name] = self._seen.get(name), self._look(name)
        return self._seen[name] != before

    def _look(self, name: str) -> object:
        """Return the current text of a stream or the startpoints; the text seen last if the
        store does not answer.
        """
        try:
            return self._looks[name]()
        except TransientError as error:
            _log.warning("%s It is looked at again.", error.problem)
            return self._seen.get(name)

    def _ask(self) -> None:
        """End this run if another one asks for the application; raise RunLeaseLostError if one
        has taken it over.
        """
        who = ""
        try:
            who = self._asked()
        except RunLeaseLostError:
            raise
        except TransientError as error:
            _log.warning("%s It is looked at again.", error.problem)
        if who:
            self.ended = f"{who} asks for the application"

    def _take_turns(self) -> Iterator[str | None]:
        """Yield the name of what to look at next, mostly a stream; None to check whether another
        run asks.
        """
        streams, others = cycle(sorted(self._streams)), cycle(["startpoints", None])
        while True:
            if self._streams:
                for _ in range(_TURNS - 1):
                    yield next(streams)
            yield next(others)


def follow_application(
    runtime: Runtime,
    app: Application,
    lasts: timedelta,
    asked: Callable[[], str],
    refresh: Callable[[], bool],
    say: Callable[[str], None],
    tick: Callable[[], None] = lambda: None,
) -> Following:
    """Return what a run that stays with this application waits for; `refresh` is as in
    `Following`.
    """
    advanced = [dataset for dataset in app.datasets if is_advanced_by_runs(dataset)]
    fed = {operator.spec.feeds for operator in app.operators}
    streams = [(dataset, dataset.stream) for dataset in advanced if dataset.stream is not None]
    names = {*app.inputs, *(stream for _, stream in streams)}

    def look_at(stream: str) -> str:
        system, name = split_stream_name(stream)
        return runtime.systems[system].fingerprint(name)

    return Following(
        lasts,
        streams={name: partial(look_at, name) for name in names},
        startpoints=open_startpoints(runtime.lake, app).fingerprint,
        asked=asked,
        refresh=refresh,
        datasets={
            stream for dataset, stream in streams if not advances_between_batches(dataset, fed)
        },
        sources=any(
            dataset.stream is None and not dataset.is_owned_by(app.name) for dataset in advanced
        ),
        say=say,
        tick=tick,
        at_once=requests_at_once(runtime.lake.store),
    )


def run_steps(following: Following | None, begin: Callable[[], StepContext]) -> StepReport:
    """Run the step of an application: once, or again and again while the run stays; return the
    report of all.

    `begin` plans, hands out the startpoints, and returns the context of the next step.
    """
    if following is None:
        return run_step(begin())
    report: StepReport | None = None
    while True:
        following.begin()
        context = replace(begin(), wait=following.wait, go_on=following.go_on, earlier=report)
        report = run_step(context)
        is_at_limit = context.max_batches is not None and report.batches >= context.max_batches
        if following.ended or is_at_limit:
            return report


def memory_in_use() -> int:
    """Return the bytes of memory of this process, 0 where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )
    return 0
