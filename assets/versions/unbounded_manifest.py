"""The manifest of a dataset that follows a change stream, or of a local table: it serves one table, and each commit is
a version of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import AwareDatetime, Field

from dagster_adjunct.assets.declaration.dataset import Kind
from dagster_adjunct.assets.versions.common_manifest import CommonManifest
from dagster_adjunct.assets.versions.deliveries import Lost
from dagster_adjunct.assets.versions.document_base import Offset
from dagster_adjunct.assets.versions.sealed_version import SealedVersion, version_number
from dagster_adjunct.assets.versions.unbounded_state import Bootstrap, Decision, Retired, Written
from dagster_adjunct.resources.bucketing.bucket_files import Generation
from dagster_adjunct.resources.errors import VersionDiscardedError

_RANGES = 200
# Ids of startpoints: one is written again soon or in vain, so few others can have come between.
_REMEMBERED = 20


class UnboundedManifest(CommonManifest):
    """What the commit of a dataset holds that follows a change stream: it has a version a commit, found by its number.

    `retired` are the generations that its current version does not read any more and earlier ones do; versions before
    number `retained_from` are gone. `confirmed_at` is when all changes up to the stream's end were last known to be in.
    Changes at or below `horizon` come too late (ordering columns only). `first_ordered` are the values that its first
    change was ordered by, which later ones are compared with; None before it. `quarantining` are the ranges whose bad
    changes are on their way to the dead letters: they are read again as they are. `applied` are the ids of the
    startpoints that were applied last, by stream partition, newest last. `decision` is the last decision about
    recovery. `numbers` are those of its versions so far, as ranges (first, last), newest last.
    """

    bootstrap: Bootstrap
    retired: tuple[Retired, ...] = ()
    retained_from: int = Field(default=1, ge=1)
    confirmed_at: AwareDatetime | None = None
    horizon: int | None = None
    first_ordered: tuple[str | None, ...] | None = None
    quarantining: dict[str, tuple[Offset, Offset]] | None = None
    applied: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    decision: Decision | None = None
    numbers: tuple[tuple[int, int], ...] = ()
    written: Written | None = None

    kind: ClassVar[Kind] = "unbounded"
    versions_are_commits: ClassVar[bool] = True

    @property
    def is_settled(self) -> bool:
        """Whether neither a bootstrap is running nor a quarantine on its way."""
        return self.bootstrap.state == "done" and self.quarantining is None

    @property
    def unfinished(self) -> str:
        if self.bootstrap.state == "done" and self.version is not None:
            return ""
        return self.bootstrap.why or "the first one"

    def retains(self, version_id: str) -> bool:
        return version_number(version_id) >= self.retained_from

    def reachable(self) -> set[str]:
        building = {generation.folder for generation in self.bootstrap.building}
        return self._served_folders() | {retired.folder for retired in self.retired} | building

    def check_kept(self, version_id: str) -> None:
        if not self.retains(version_id):
            raise VersionDiscardedError(
                f"dataset {self.name!r}: version {version_id} has been discarded; those from number "
                f"{self.retained_from} on can be read.",
                f"See adjunct dataset history {self.name}. A policy that keeps more keeps earlier versions longer: "
                "discard=DiscardPolicy(keep=…, grace=…).",
                dataset=self.name,
                version=version_id,
            )

    def may_have_needed(self, version_id: str) -> bool:
        return not self.retains(version_id)

    def generations_without_document(self) -> list[tuple[str, Sequence[Generation]]]:
        version = self.version
        served = [] if version is None else [(f"version {version.id}", version.generations)]
        return [*served, ("the table that is being built", self.bootstrap.building)]

    def without(self, gone: Sequence[str], garbage: Sequence[str]) -> Self:
        untils = [retired.until for retired in self.retired if retired.folder in gone]
        left = tuple(retired for retired in self.retired if retired.folder not in gone)
        return self._without(
            gone, garbage, f"{len(gone)} generations", retired=left, retained_from=max([self.retained_from, *untils])
        )

    @property
    def versions_over_time(self) -> None:
        return None

    def carried_to(self, offsets: Mapping[str, Offset]) -> dict[str, Any]:
        return {"bootstrap": self.bootstrap.model_copy(update={"start": offsets, "target": offsets})}

    @property
    def stored_in_words(self) -> str:
        return "every generation"

    def kept_elsewhere(self) -> list[str]:
        declared, (_, outputs) = self.declaration, super().kept_elsewhere()
        if declared.owner is not None:
            streams = f"the input streams of application {declared.owner}"
            return [f"{streams}: records of these keys that are read later bring them back", outputs]
        left = [
            f"the input: {declared.input}, whose records hold the keys until its retention drops them; a rebuild "
            "brings the keys back, unless tombstones for them were sent or their records are gone",
            outputs,
        ]
        if self.bootstrap.loaded:
            left.append("the bulk snapshot that the dataset was loaded from")
        if self.counters.get("quarantined"):
            left.append(f"dead letters: {self.counters['quarantined']:,} changes were sent there")
        return left

    def has_applied(self, ssp: str, startpoint_id: str) -> bool:
        """Whether a commit has applied this startpoint of a partition: it is applied once, whatever came between."""
        return startpoint_id in self.applied.get(ssp, ())

    def with_applied(self, ids: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
        """Return `applied` as it is after a commit that applies these startpoints (id by partition)."""
        newest = {ssp: (*self.applied.get(ssp, ()), applied)[-_REMEMBERED:] for ssp, applied in ids.items()}
        return {**self.applied, **newest}

    def after(self, **changes: Any) -> Self:
        """Return this manifest with some fields replaced, checked again as a whole; a new version's number is noted."""
        version: SealedVersion | None = changes.get("version")
        if version is not None and (self.version is None or self.version.number != version.number):
            changes.setdefault("numbers", _numbered(self.numbers, version.number))
        return super().after(**changes)

    # What only a dataset has that arrives in versions, and is asked of either kind.

    @property
    def head(self) -> None:
        return None

    @property
    def pin(self) -> None:
        return None

    @property
    def awaited(self) -> None:
        return None

    @property
    def lost(self) -> tuple[Lost, ...]:
        return ()


def _numbered(numbers: tuple[tuple[int, int], ...], number: int) -> tuple[tuple[int, int], ...]:
    """Return the numbers of versions, as ranges, with the newest one's; of long histories the newest ranges only."""
    first = numbers[-1][0] if numbers and numbers[-1][1] + 1 == number else number
    return (*(span for span in numbers if span[0] != first), (first, number))[-_RANGES:]
