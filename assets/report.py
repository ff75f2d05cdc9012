"""What one advance of a dataset did, as plain values: for run metadata, the CLI and tests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from resources.schema import Schema

Action = Literal["sealed", "unchanged", "waiting", "bootstrapped", "applied", "up-to-date"]


@dataclass(frozen=True, slots=True)
class AdvanceReport:
    """The outcome of `advance_bounded` or `advance_unbounded`.

    `version` is the id now served (None before the first), `sealed` the ids made by this call, oldest first.
    `rows` are the entries of the version served, None where deltas would have to be merged to know. `counters`
    are of this call: records read, superseded or redelivered, keys that ended deleted, changes applied.
    `offsets` are the next ones to read, by stream partition. `waiting` names the stream partitions without a
    marker for the next version. `seconds` is wall time by stage.
    """

    dataset: str
    kind: str
    action: Action
    version: str | None
    sealed: tuple[str, ...] = ()
    rows: int | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    offsets: Mapping[str, str] = field(default_factory=dict)
    waiting: tuple[str, ...] = ()
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
        said = [f"dataset {self.dataset}: {self.action}"]
        said += [f"version {self.version}"] if self.version else []
        said += [f"{self.rows:,} rows"] if self.rows is not None else []
        said += [part for part in (counted, self.note) if part]
        return "; ".join(said)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        values = {name: getattr(self, name) for name in self.__slots__}
        values["schema"] = None if self.schema is None else self.schema.to_json()
        values["seconds"] = {stage: round(seconds, 3) for stage, seconds in self.seconds.items()}
        for name in ("counters", "offsets"):
            values[name] = dict(values[name])
        for name in ("sealed", "waiting"):
            values[name] = list(values[name])
        return values


class Stages:
    """Wall time by stage; a stage that runs twice adds up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - began
