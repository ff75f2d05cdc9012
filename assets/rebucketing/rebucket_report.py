"""What a rewriting into other partitions says of itself, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import ConfigurationError, DatasetError, StillReadError

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import Kind
    from dagster_adjunct.assets.versions.dataset_log import DatasetLog
    from dagster_adjunct.assets.versions.manifest import DatasetManifest


@dataclass(frozen=True, slots=True)
class RebucketReport:
    """What was, or (`dry_run`) would be, rewritten: versions by their old and new ids; the new ones are "" then.

    Of an unbounded dataset that is the served version alone: versions before it keep their partitions until they are
    discarded. `pending` are old copies that somebody still reads, and `holding` are those who need a version as it is,
    which refuses the rewriting.
    """

    dataset: str
    before: int
    partitions: int
    versions: dict[str, str]
    pending: tuple[str, ...] = ()
    follows_changes: bool = False
    rows: int = 0
    holding: tuple[str, ...] = ()
    dry_run: bool = False

    def summary(self) -> str:
        """Return the report in one line."""
        verb = "would be rewritten" if self.dry_run else "rewritten"
        what = "the served table" if self.follows_changes else f"{len(self.versions)} version(s)"
        return (
            f"dataset {self.dataset}: {what} of {self.rows:,} stored rows {verb} from {self.before} into "
            f"{self.partitions} partitions; declare partitions={self.partitions} where it is declared"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        facts = asdict(self)
        kind: Kind = "unbounded" if facts.pop("follows_changes") else "bounded"
        return {**facts, "kind": kind}


def check(log: DatasetLog, manifest: DatasetManifest, partitions: int, reason: str) -> int:
    """Return how many partitions the dataset has; refuse what can't be rewritten into this number of them."""
    declared, what = manifest.declaration, f"dataset {log.name!r}"
    if not reason.strip():
        raise ConfigurationError(
            f"{what} can't be repartitioned without a reason.",
            "Say why: it is kept.",
            argument="reason",
            dataset=log.name,
        )
    if declared.partitions is None:
        raise ConfigurationError(
            f"{what} is broadcast: one copy, in no partitions, and can't be rewritten into {partitions} of them.",
            "Declare it under a new name with the new count, which builds it from its input beside the old one; or "
            f"delete it and build it anew: adjunct dataset delete {log.name} --reason ….",
            dataset=log.name,
        )
    if not 1 <= partitions <= 100_000 or partitions == declared.partitions:
        raise ConfigurationError(
            f"{what} has {declared.partitions} partitions, and is to have {partitions}.",
            "Name another number, from 1 to 100,000.",
            argument="partitions",
            dataset=log.name,
        )
    if manifest.unfinished:
        raise DatasetError(
            f"{what} can't be repartitioned now: its bootstrap is not finished ({manifest.unfinished}).",
            f"Advance it until it is: adjunct dataset advance {log.name} MODULE:APP. Then repeat it.",
            dataset=log.name,
        )
    return declared.partitions


def check_unused(dataset: str, needed: Mapping[str, str]) -> None:
    """Refuse while an open batch needs a version as it lies: `needed` says which, and why."""
    if needed:
        raise StillReadError(
            f"dataset {dataset!r} can't be repartitioned now: {'; '.join(sorted(set(needed.values())))}.",
            "Let it end: run the application, or give its batch up (adjunct checkpoint abandon). Then repeat it.",
            dataset=dataset,
            readers=tuple(sorted(set(needed.values()))),
        )
