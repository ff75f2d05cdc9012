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
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import cycle, islice
from pathlib import Path

from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.graph import (
    advances_between_batches,
    is_advanced_by_runs,
)
from dagster_adjunct.orchestration.startpoints.store import open_startpoints
from dagster_adjunct.resources.errors import RunLeaseLostError, StreamNotFoundError, TransientError
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
# Seconds between two looks at records that wait for a dataset, which is advanced before, and at
# results that wait for the time when they are restated.
_HELD_EVERY = 5.0
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


@dataclass(frozen=True, slots=True)
class Watched:
    """What a run that stays looks at.

    - `streams` and `startpoints` return texts that change with what they look at.
    - `asked`: returns who asks for the application, "" for nobody.
    - `refresh`: called when a stream has changed; it advances the datasets, and returns whether the
      step can go on, or has to begin again.
    - `datasets`: streams that are looked at after each batch, too.
    - `sources`: whether there are datasets that are read from files or queries: `refresh` is also
      called every 30 seconds.
    - `at_once`: how many looks are made at the same time.
    """

    streams: Mapping[str, Look]
    startpoints: Look
    asked: Callable[[], str]
    refresh: Callable[[], bool]
    datasets: Collection[str] = ()
    sources: bool = False
    at_once: int = REQUESTS_AT_ONCE


def memory_in_use() -> int:
    """Return the bytes of memory of this process, 0 where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


@dataclass(frozen=True, slots=True)
class Machine:
    """The clock, in seconds, and the memory that a run goes by."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    memory: Callable[[], int] = memory_in_use


class Following:
    """How long a run stays, and what it looks at.

    `say` receives messages for the user. `tick` is called again and again while the run waits.
    `ended` is the reason for the run's end, "" before it.
    """

    def __init__(
        self,
        lasts: timedelta,
        watched: Watched,
        *,
        say: Callable[[str], None] = lambda text: None,
        tick: Callable[[], None] = lambda: None,
        machine: Machine | None = None,
    ) -> None:
        self.ended = ""
        self._lasts = lasts
        self._watched = watched
        self._say = say
        self._tick = tick
        self._machine = machine or Machine()
        self._clock = self._machine.clock
        self._looks: dict[str, Look] = {**watched.streams, "startpoints": watched.startpoints}
        self._end = self._clock() + lasts.total_seconds()
        # Times by the clock: of the next look, the next advance of datasets that are read from
        # files or queries, and the next one of all datasets if the run never waits.
        now = self._clock()
        self._next_look = now
        self._next_sources = now
        self._next_busy = now + _BUSY_EVERY
        self._eager_until = now
        self._failing_since: float | None = None
        self._seen: dict[str, object] = {}
        self._has_said_caught_up = False
        self._turns = self._take_turns()

    def begin(self) -> None:
        """Remember the current state of the streams and startpoints, before the run reads anything.

        Whatever differs later is new.
        """
        self._seen |= {name: self._look(name) for name in self._looks}
        self._next_sources = self._clock() + _SOURCES_EVERY
        self._next_busy = self._clock() + _BUSY_EVERY

    def wait(self, held: bool = False) -> bool:
        """Wait for something new; while records are `held` because they wait for a dataset, or
        results for the time when they are restated, at most for some seconds.

        Returns whether the step goes on; if not, it begins again, or `ended` says why the run is
        over.
        """
        retry_at = self._clock() + _HELD_EVERY
        if not self._has_said_caught_up:
            self._has_said_caught_up = True
            self._say(f"caught up; staying for {self._lasts} from the start of the run")
        while not self._is_over():
            self._tick()
            now = self._clock()
            if held and now >= retry_at:
                goes_on = self._try_refresh()
                if goes_on is not None:
                    return goes_on
                retry_at = now + _HELD_EVERY
            if now < self._next_look:
                self._machine.sleep(min(self._next_look - now, max(0.0, self._end - now)))
                continue
            pause = _PAUSE / 2 if now < self._eager_until else _PAUSE
            self._next_look = now + pause
            goes_on = self._look_once()
            if goes_on is not None:
                return goes_on
        self._say(f"this run ends: {self.ended}")
        return False

    def _look_once(self) -> bool | None:
        """Look at what comes next. Return True if the step goes on and False if it begins again;
        None if there is nothing new, or a store does not answer.
        """
        if self._watched.sources and self._clock() >= self._next_sources:
            self._next_sources = self._clock() + _SOURCES_EVERY
            return self._try_refresh()
        name = next(self._turns)
        if name is None:
            self._ask()
            return None
        if not self._has_changed(name):
            return None
        self._eager_until = self._clock() + _EAGER_FOR
        if name not in self._watched.streams:
            return False
        goes_on = self._try_refresh()
        if goes_on is None:
            self._seen.pop(name)  # it is looked at again
        return goes_on

    def go_on(self) -> bool:
        """Check once, after a batch, what `wait` checks again and again; return whether the step
        goes on.

        A run that always has something to read notices only here that its time is over, that
        startpoints were requested, or that another run asks for the application.
        """
        self._tick()
        if self._is_over():
            self._say(f"this run ends: {self.ended}")
            return False
        datasets = tuple(self._watched.datasets)
        looks = [partial(self._has_changed, name) for name in ("startpoints", *datasets)]
        _, has_startpoints, *has_changed = call_in_threads(
            self._ask, *looks, at_once=self._watched.at_once
        )
        if self.ended:  # another run asks
            self._say(f"this run ends: {self.ended}")
            return False
        if has_startpoints:
            return False
        if not any(has_changed) and self._clock() < self._next_busy:
            return True
        goes_on = self._try_refresh()
        if goes_on is not None:
            return goes_on
        for name, is_new in zip(datasets, has_changed, strict=True):
            if is_new:
                self._seen.pop(name)  # it is looked at again
        return True

    def _try_refresh(self) -> bool | None:
        """Return the result of `refresh`; None if a store does not answer.

        Raises the store's error once that has lasted for _PATIENCE seconds.
        """
        now = self._clock()
        try:
            goes_on = self._watched.refresh()
        except TransientError as error:
            if self._failing_since is None:
                self._failing_since = now
            lasted = self._clock() - self._failing_since
            if isinstance(error, RunLeaseLostError) or lasted >= _PATIENCE:
                raise
            _log.warning("%s It is tried again.", error.problem)
            return None
        self._failing_since = None
        self._next_busy = self._clock() + _BUSY_EVERY
        return goes_on

    def _is_over(self) -> bool:
        """Whether the run is to end, because of its time or its memory; `ended` says why."""
        if not self.ended and self._clock() >= self._end:
            self.ended = f"it has stayed for {self._lasts}"
        used = self._machine.memory()
        if not self.ended and used > MAX_MEMORY:
            self.ended = (
                f"its process uses {used / 1024**3:.1f} GiB of memory, over"
                f" {MAX_MEMORY / 1024**3:.0f}"
            )
        return bool(self.ended)

    def _has_changed(self, name: str) -> bool:
        """Look at a stream or the startpoints; return whether it differs from what was seen
        last.
        """
        before = self._seen.get(name)
        self._seen[name] = self._look(name)
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
        try:
            who = self._watched.asked()
        except RunLeaseLostError:  # a TransientError, too
            raise
        except TransientError as error:
            _log.warning("%s It is looked at again.", error.problem)
            return
        if who:
            self.ended = f"{who} asks for the application"

    def _take_turns(self) -> Iterator[str | None]:
        """Yield the name of what to look at next, mostly a stream; None to check whether another
        run asks.
        """
        names = sorted(self._watched.streams)
        streams = cycle(names)
        for other in cycle(["startpoints", None]):
            if names:
                yield from islice(streams, _TURNS - 1)
            yield other


def follow_application(
    runtime: Runtime,
    app: Application,
    lasts: timedelta,
    asked: Callable[[], str],
    refresh: Callable[[], bool],
    say: Callable[[str], None],
    tick: Callable[[], None] = lambda: None,
) -> Following:
    """Return what a run that stays with this application for the time `lasts` waits for; `asked`
    and `refresh` are as in `Watched`, `say` and `tick` as in `Following`.
    """
    fed = {operator.spec.feeds for operator in app.operators}
    names = {*app.inputs, *app.restated}
    datasets = set()
    sources = False
    for dataset in app.datasets:
        if not is_advanced_by_runs(dataset):
            continue
        if dataset.stream is None:
            is_written_here = dataset.is_owned_by(app.name)  # a local table, which reads no source
            sources = sources or not is_written_here
            continue
        names.add(dataset.stream)
        if not advances_between_batches(dataset, fed):
            datasets.add(dataset.stream)

    def look_at(stream: str) -> str:
        system, name = split_stream_name(stream)
        try:
            return runtime.systems[system].fingerprint(name)
        except StreamNotFoundError:
            if stream in app.restated:  # the dataset has no version yet
                return ""
            raise

    watched = Watched(
        streams={name: partial(look_at, name) for name in names},
        startpoints=open_startpoints(runtime.lake, app).fingerprint,
        asked=asked,
        refresh=refresh,
        datasets=datasets,
        sources=sources,
        at_once=requests_at_once(runtime.lake.store),
    )
    return Following(lasts, watched, say=say, tick=tick)
