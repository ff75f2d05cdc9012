"""The report of one advance of a dataset and its stages, as plain values for run metadata, the
CLI and tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from dagster_adjunct.assets.versions.manifest import Decision
from dagster_adjunct.assets.versions.version import Verdict
from dagster_adjunct.resources.reports import Report
from dagster_adjunct.resources.schemas.schema import Schema

REJECT = "reject"
"""The stage that stores a rejected version, instead of "seal" and "switch"."""

BUILDING = "building"
"""The event that reports the start of a build; the stage "build" reports its end."""

Action = Literal[
    "sealed",
    "rejected",
    "unchanged",
    "waiting",
    "bootstrapped",
    "applied",
    "rewound",
    "up-to-date",
    "stale",
]


@dataclass(frozen=True, slots=True)
class StageEvent:
    """The end of one stage of a dataset's advance, or the start of a build (BUILDING).

    `version` is the delivered name, None before it is known. `detail` is the progress of a
    bootstrap, the findings of validators, or the reason for a rejection.
    """

    dataset: str
    version: str | None
    stage: str
    seconds: float
    detail: str = ""

    @property
    def is_notable(self) -> bool:
        """Whether to show the event to a waiting user: it took at least 0.1 s, has a detail, or
        starts a build.
        """
        return self.seconds >= 0.1 or bool(self.detail) or self.stage == BUILDING

    def summary(self) -> str:
        """Return the event in one line, for logs."""
        event = f"dataset {self.dataset}"
        if self.version:
            event += f", version {self.version}"
        if self.stage == BUILDING:
            return f"{event}: building"
        if self.stage == REJECT:
            done = "rejected and stored"
        else:
            done = self.stage
        event += f": {done} took {self.seconds:.2f} s"
        if self.detail:
            event += f": {self.detail}"
        return event


OnStage = Callable[[StageEvent], None]


def ignore_stage(event: StageEvent) -> None:
    """Do nothing: the default for `on_stage`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputReport(Report):
    """What an advance has read of its dataset's input, and what it waits for.

    `lost` names versions that retention truncated before they were read. `counters` count within
    this call: records read, superseded or redelivered, keys deleted, changes applied. `offsets` are
    the next ones to read, by stream partition. For an unbounded dataset, `lag` is the number of
    unread offsets by partition at the time of this call, and `decision` the recovery decision.
    `waiting` names the missing markers of the next version, `waiting_since` the time when an
    advance first waited for it. `seconds` is wall time by stage.
    """

    lost: tuple[str, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    offsets: Mapping[str, str] = field(default_factory=dict)
    lag: Mapping[str, int] = field(default_factory=dict)
    decision: Decision | None = None
    waiting: tuple[str, ...] = ()
    waiting_since: datetime | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvanceReport(InputReport):
    """The outcome of advancing one dataset.

    `version` is the id now served (None before the first), `sealed` the ids sealed by this call,
    oldest first, and `rejected` the ids that it rejected. `verdicts` are the validators' results
    for `evaluated`, the version validated last, or for the changes that an unbounded dataset has
    read. `warnings` are findings of validators of severity "warn" in any version of this call, or
    of any in changes, dropped or lost records, and changed folders. `rows` is the
    number of entries served, None if only merging deltas would tell.
    """

    dataset: str
    kind: str
    action: Action
    version: str | None
    sealed: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    evaluated: str | None = None
    verdicts: tuple[Verdict, ...] = ()
    warnings: tuple[str, ...] = ()
    rows: int | None = None
    schema: Schema | None = None
    note: str = ""

    @property
    def changed(self) -> bool:
        """Whether this call sealed a version, served or not."""
        return bool(self.sealed)

    def summary(self) -> str:
        """Return the outcome in one line, for logs."""
        parts = [f"dataset {self.dataset}: {self.action}"]
        if self.version:
            parts.append(f"version {self.version}")
        if self.rows is not None:
            parts.append(f"{self.rows:,} rows")
        counted = [f"{count:,} {what}" for what, count in self.counters.items() if count]
        if counted:
            parts.append(", ".join(counted))
        if self.note:
            parts.append(self.note)
        parts += [f"warning: {warning}" for warning in self.warnings]
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        seconds = {stage: round(took, 3) for stage, took in self.seconds.items()}
        return Report.to_json(self) | {"seconds": seconds}


@dataclass(slots=True)
class Stage:
    """A running stage; its name and detail may be set until it ends."""

    name: str
    detail: str = ""


class Stages:
    """Measures stages: wall time by stage, summed if one is repeated. `on_stage` gets an event
    at each end.
    """

    def __init__(self, dataset: str = "", on_stage: OnStage = ignore_stage) -> None:
        self.seconds: dict[str, float] = {}
        self._dataset = dataset
        self._on_stage = on_stage

    @contextmanager
    def __call__(self, stage: str, version: str | None = None) -> Iterator[Stage]:
        """Measure a stage while the context lasts."""
        began = time.perf_counter()
        running = Stage(stage)
        try:
            yield running
        except BaseException as error:
            running.detail = f"it ended with {type(error).__name__}"
            raise
        finally:
            took = time.perf_counter() - began
            self.seconds[running.name] = self.seconds.get(running.name, 0.0) + took
            self._on_stage(StageEvent(self._dataset, version, running.name, took, running.detail))

    def begin_build(self, version: str | None = None) -> None:
        """Report the start of a build, which may take long and may have to start Spark."""
        self._on_stage(StageEvent(self._dataset, version, BUILDING, 0.0))

    def report_progress(self, stage: str, seconds: float, detail: str) -> None:
        """Report the progress of a stage that consists of other stages."""
        self._on_stage(StageEvent(self._dataset, None, stage, seconds, detail))
