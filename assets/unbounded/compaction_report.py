"""What one compaction did, as plain values: for run metadata, the CLI and tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from dagster_adjunct.assets.unbounded.compaction_plan import Level


@dataclass(frozen=True, slots=True)
class CompactionReport:
    """What one compaction did.

    `action` "compacted" made `version` (an id); "nothing" found nothing to do; "superseded" met another compaction,
    rebuild or erasure that replaced its inputs first, and left nothing behind. `note` says why. `generations` are how
    many a reader merges before and after, `rows` and `bytes` what the inputs and the output hold. `counters` are the
    rows that later ones superseded, and the tombstones that went. `horizon` is how far deletions are forgotten.
    """

    dataset: str
    action: Literal["compacted", "nothing", "superseded"]
    note: str
    level: Level | None = None
    version: str | None = None
    generations: tuple[int, int] = (0, 0)
    rows: tuple[int, int] = (0, 0)
    bytes: tuple[int, int] = (0, 0)
    counters: dict[str, int] = field(default_factory=dict)
    horizon: int | None = None
    seconds: float = 0.0

    @property
    def changed(self) -> bool:
        """Whether a version was made."""
        return self.action == "compacted"

    def summary(self) -> str:
        """Return the outcome in one line, for logs."""
        if not self.changed:
            return f"dataset {self.dataset}: {self.note}"
        return (
            f"dataset {self.dataset}: {self.level} compaction, version {self.version}; "
            f"{self.generations[0]} -> {self.generations[1]} generations; {self.rows[0]:,} -> {self.rows[1]:,} rows; "
            f"{self.bytes[0]:,} -> {self.bytes[1]:,} bytes; {self.seconds:.2f} s ({self.note})"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        values = {name: getattr(self, name) for name in self.__slots__}
        pairs = {name: list(values[name]) for name in ("generations", "rows", "bytes")}
        return values | pairs | {"seconds": round(self.seconds, 3)}
