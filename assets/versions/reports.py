"""What one advance of a dataset did, as plain values: for run metadata, the CLI and tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from dagster_adjunct.assets.versions.manifest import Decision
from dagster_adjunct.assets.versions.version import Verdict

if TYPE_CHECKING:
    from dagster_adjunct.resources.schemas.schema import Schema

REJECT = "reject"
"""The stage in which a version that was refused is kept aside, in place of seal and switch."""

BUILDING = "building"
"""What is told when a build begins, whose end is told as "build"."""

Action = Literal[
    "sealed", "rejected", "unchanged", "waiting", "bootstrapped", "applied", "rewound", "up-to-date", "stale"
]


@dataclass(frozen=True, slots=True)
class StageEvent:
    """One stage of a dataset's advance has ended, or a build has begun (BUILDING).

    `version` is the delivered name, None where there is none yet.
    `detail` says how far a bootstrap is, what validators found, or why a version was rejected.
    """

    dataset: str
    version: str | None
    stage: str
    seconds: float
    detail: str = ""

    @property
    def is_notable(self) -> bool:
        """Whether somebody who waits wants to read of it: it took a while, or it has something to say."""
        return self.seconds >= 0.1 or bool(self.detail) or self.stage == BUILDING

    def summary(self) -> str:
        """Return the event in one line, for logs."""
        version = f", version {self.version}" if self.version else ""
        detail = f": {self.detail}" if self.detail else ""
        if self.stage == BUILDING:
            return f"dataset {self.dataset}{version}: building"
        verb = "rejected and kept aside" if self.stage == REJECT else self.stage
        return f"dataset {self.dataset}{version}: {verb} took {self.seconds:.2f} s{detail}"


OnStage = Callable[[StageEvent], None]


def ignore_stage(event: StageEvent) -> None:
    """Hear of a stage and do nothing."""


@dataclass(frozen=True, slots=True)
class AdvanceReport:
    """The outcome of advancing one dataset.

    `version` is the id now served (None before the first), `sealed` the ids made by this call, oldest first, and
    `rejected` those that it refused; `lost` names versions that retention had cut before they were read. `verdicts` are
    what the validators said of `evaluated`, the version looked at last. `warnings` say what should be looked at: what
    validators of severity "warn" found in any version of this call, what was dropped or lost, folders that changed.
    `rows` are the entries of the version served, None where deltas would have to be merged to know. `counters` are of
    this call: records read, superseded or redelivered, keys that ended deleted, changes applied. `offsets` are the next
    ones to read, by stream partition; of an unbounded dataset, `lag` is how many offsets of the stream, as this call
    found it, are still before it, and `decision` what was decided about recovery. `waiting` names the markers that the
    next version lacks, `waiting_since` when its first one was seen. `seconds` is wall time by stage.
    """

    dataset: str
    kind: str
    action: Action
    version: str | None
    sealed: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    evaluated: str | None = None
    verdicts: tuple[Verdict, ...] = ()
    warnings: tuple[str, ...] = ()
    rows: int | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    offsets: Mapping[str, str] = field(default_factory=dict)
    lag: Mapping[str, int] = field(default_factory=dict)
    decision: Decision | None = None
    waiting: tuple[str, ...] = ()
    waiting_since: datetime | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    schema: Schema | None = None
    note: str = ""

    @property
    def changed(self) -> bool:
        """Whether readers see anything new."""
        return bool(self.sealed)

    def summary(self) -> str:
        """Return the outcome in one line, for logs."""
        counted = ", ".join(f"{count:,} {what}" for what, count in self.counters.items() if count)
        parts = [f"dataset {self.dataset}: {self.action}"]
        parts += [f"version {self.version}"] if self.version else []
        parts += [f"{self.rows:,} rows"] if self.rows is not None else []
        parts += [part for part in (counted, self.note) if part]
        parts += [f"warning: {warning}" for warning in self.warnings]
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        values = {name: getattr(self, name) for name in self.__slots__}
        values["schema"] = None if self.schema is None else self.schema.to_json()
        values["seconds"] = {stage: round(seconds, 3) for stage, seconds in self.seconds.items()}
        values["verdicts"] = [verdict.model_dump(mode="json") for verdict in self.verdicts]
        values["waiting_since"] = None if self.waiting_since is None else self.waiting_since.isoformat()
        values["decision"] = None if self.decision is None else self.decision.model_dump(mode="json")
        for name in ("counters", "offsets", "lag"):
            values[name] = dict(values[name])
        for name in ("sealed", "rejected", "lost", "waiting", "warnings"):
            values[name] = list(values[name])
        return values


@dataclass(slots=True)
class Stage:
    """A stage that is under way: what it turns out to be, and what there is to say of it when it has ended."""

    name: str
    detail: str = ""


class Stages:
    """Wall time by stage; a stage that runs twice adds up. Each end of one is told to `on_stage`."""

    def __init__(self, dataset: str = "", on_stage: OnStage = ignore_stage) -> None:
        self.seconds: dict[str, float] = {}
        self._dataset, self._on_stage = dataset, on_stage

    @contextmanager
    def __call__(self, stage: str, version: str | None = None) -> Iterator[Stage]:
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
        """Tell that a build begins: it may take long, and Spark may have to start for it."""
        self._on_stage(StageEvent(self._dataset, version, BUILDING, 0.0))

    def tell(self, stage: str, seconds: float, detail: str) -> None:
        """Tell how far a stage is that other stages are part of."""
        self._on_stage(StageEvent(self._dataset, None, stage, seconds, detail))
