"""What a dataset's commit holds: its declaration, its current version, how far its input was read.

The body of each commit below `datasets/<name>` is one manifest. Offsets stand in the same document as the version
that was made from them, so there is no second place to disagree with. It is a `BoundedManifest` or an
`UnboundedManifest`: what only the one kind has is in that, and which of them it is says the kind.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, BeforeValidator, Field, model_validator

from dagster_adjunct.assets.versions.deliveries import Abandoned, Awaited, Delivered, Lost
from dagster_adjunct.assets.versions.document_base import ManifestPart, Offset
from dagster_adjunct.assets.versions.sealed_version import SealedVersion, VersionRef, version_number
from dagster_adjunct.assets.versions.stored_declaration import DatasetDeclaration, check_declaration
from dagster_adjunct.assets.versions.unbounded_state import Bootstrap, Decision, Retired, Written
from dagster_adjunct.resources.errors import DatasetError

KIND = "dataset"
_RANGES = 200
# Ids of startpoints: one is written again soon or in vain, so few others can have come between.
_REMEMBERED = 20
# One alone is how earlier manifests hold them.
AppliedIds = Annotated[
    tuple[str, ...], BeforeValidator(lambda stored: (stored,) if isinstance(stored, str) else stored)
]


class Pin(ManifestPart):
    """Holds readers at a version, whatever seals meanwhile, until it is taken away or `expires_at` has passed."""

    version: str
    reason: str
    by: str
    at: AwareDatetime
    expires_at: AwareDatetime | None = None


class Change(ManifestPart):
    """What one commit did to which version, and why; by whom and when stands in the commit."""

    action: str
    version: str | None = None
    reason: str = ""


class CommonManifest(ManifestPart):
    """What every dataset's commit holds.

    `version` is what is served. `offsets` is the next offset to read of each input partition ({} for files and
    queries), `stream` the identity of the stream that they are of, and `positions_from` is added to offsets to make
    positions: where a stream was repartitioned offsets began anew, and what comes must win. `doomed` are the folders
    and documents that are being deleted: nobody may begin to use them.
    """

    format: Literal[1] = 1
    name: str
    declaration: DatasetDeclaration
    version: SealedVersion | None = None
    doomed: tuple[str, ...] = ()
    stream: str | None = None
    offsets: dict[str, Offset]
    positions_from: int = Field(default=0, ge=0)
    next_generation: int = Field(default=1, ge=1)
    counters: dict[str, int] = Field(default_factory=dict)
    change: Change | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not isinstance(self, MANIFEST_OF[self.declaration.kind]):
            raise ValueError(f"a {type(self).__name__} is declared {self.declaration.kind}")
        if len(self.offsets) != self.declaration.input_partitions:
            raise ValueError(
                f"offsets stand for {len(self.offsets)} partitions of {self.declaration.input}: expected "
                f"{self.declaration.input_partitions}"
            )
        version = self.version
        if version and any(generation.id >= self.next_generation for generation in version.generations):
            raise ValueError(f"next_generation is {self.next_generation}, which the current version uses")
        return self

    @property
    def listed(self) -> tuple[VersionRef, ...]:
        """The retained versions by number; none of an unbounded dataset, whose commits are its versions."""
        return ()

    def ref(self, version_id: str) -> VersionRef | None:
        """Return the listed version of this id."""
        return next((ref for ref in self.listed if ref.id == version_id), None)

    @abstractmethod
    def retains(self, version_id: str) -> bool:
        """Whether a version that was served once can be read."""

    @abstractmethod
    def reachable(self) -> set[str]:
        """Return the folders and documents that the retained versions need, and a bootstrap that is not done."""

    def _served_folders(self) -> set[str]:
        return {generation.folder for generation in self.version.generations} if self.version is not None else set()


class BoundedManifest(CommonManifest):
    """What the commit of a dataset holds that arrives in versions.

    `version` is the pinned one, else `head`, the one that the last switch chose. `versions` lists all retained ones by
    number. `delivered` remembers the newest deliveries and `known` the names of older ones, so that a marker that comes
    again is known; the markers of `abandoned` versions close nothing. `lost` is what retention took of the stream
    before it was read, newest last.
    """

    head: str | None = None
    pin: Pin | None = None
    versions: tuple[VersionRef, ...] = ()
    delivered: tuple[Delivered, ...] = ()
    known: tuple[str, ...] = ()
    abandoned: tuple[Abandoned, ...] = ()
    awaited: Awaited | None = None
    lost: tuple[Lost, ...] = ()
    next_number: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _serves_what_is_chosen(self) -> Self:
        sealed = {ref.id for ref in self.versions if ref.state == "sealed"}
        wanted = self.pin.version if self.pin else self.head
        served = self.version.id if self.version else None
        if served != wanted:
            raise ValueError(f"the version served is {served}, and {wanted} is pinned or chosen")
        for named in {served, self.head} - {None}:
            if named not in sealed:
                raise ValueError(f"the version {named} is not among the retained, sealed versions")
        return self

    @property
    def listed(self) -> tuple[VersionRef, ...]:
        return self.versions

    def retains(self, version_id: str) -> bool:
        ref = self.ref(version_id)
        return ref is not None and ref.state == "sealed"

    def reachable(self) -> set[str]:
        folders = {folder for ref in self.versions for folder in ref.folders}
        return self._served_folders() | folders | {ref.document for ref in self.versions if ref.document is not None}

    def declared_as(self, declared: DatasetDeclaration) -> BoundedManifest:
        """Return this manifest with what may change in a declaration, order and policy, as it is declared now."""
        now = self.declaration.with_policies_of(declared)
        return self if now == self.declaration else self.after(declaration=now)

    @property
    def taken(self) -> set[str]:
        """The names of the versions that were delivered: what comes under one of them again is a re-delivery."""
        return {*self.known, *(done.name for done in self.delivered if done.freed is None)}


class UnboundedManifest(CommonManifest):
    """What the commit of a dataset holds that follows a change stream: it has a version a commit, found by its number.

    `retired` are the generations that its current version does not read any more and earlier ones do; versions before
    number `retained_from` are gone. `confirmed_at` is when all changes up to the stream's end were last known to be in.
    Changes at or below `horizon` come too late (ordering columns only). `quarantining` are the ranges whose bad changes
    are on their way to the dead letters: they are read again as they are. `applied` are the ids of the startpoints that
    were applied last, by stream partition, newest last. `decision` is the last decision about recovery. `numbers` are
    those of its versions so far, as ranges (first, last), newest last.
    """

    bootstrap: Bootstrap
    retired: tuple[Retired, ...] = ()
    retained_from: int = Field(default=1, ge=1)
    confirmed_at: AwareDatetime | None = None
    horizon: int | None = None
    quarantining: dict[str, tuple[Offset, Offset]] | None = None
    applied: dict[str, AppliedIds] = Field(default_factory=dict)
    decision: Decision | None = None
    numbers: tuple[tuple[int, int], ...] = ()
    written: Written | None = None

    @property
    def is_settled(self) -> bool:
        """Whether neither a bootstrap is running nor a quarantine on its way."""
        return self.bootstrap.state == "done" and self.quarantining is None

    def retains(self, version_id: str) -> bool:
        return version_number(version_id) >= self.retained_from

    def reachable(self) -> set[str]:
        building = {generation.folder for generation in self.bootstrap.building}
        return self._served_folders() | {retired.folder for retired in self.retired} | building

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


DatasetManifest = BoundedManifest | UnboundedManifest
MANIFEST_OF: dict[str, type[BoundedManifest] | type[UnboundedManifest]] = {
    "bounded": BoundedManifest,
    "unbounded": UnboundedManifest,
}


def as_bounded(manifest: DatasetManifest) -> BoundedManifest:
    """Return the manifest of a dataset that arrives in versions. Raises DatasetError for one that has none."""
    if not isinstance(manifest, BoundedManifest):
        raise DatasetError(
            f"dataset {manifest.name!r} follows a change stream: it has one table, and no versions that are delivered.",
            f"Its commits are versions of the table: adjunct dataset history {manifest.name}.",
            dataset=manifest.name,
        )
    return manifest


def taken_up(stored: DatasetManifest, declared: DatasetDeclaration) -> BoundedManifest:
    """Return a stored manifest with order and policy as they are declared now; DatasetError where more was changed."""
    check_declaration(stored.name, stored.declaration, declared)
    return as_bounded(stored).declared_as(declared)


def as_unbounded(manifest: DatasetManifest) -> UnboundedManifest:
    """Return the manifest of a dataset that follows a change stream. Raises DatasetError for one that does not."""
    if not isinstance(manifest, UnboundedManifest):
        raise DatasetError(
            f"dataset {manifest.name!r} arrives in versions: it follows no change stream, and has no table.",
            f"See adjunct dataset versions {manifest.name}.",
            dataset=manifest.name,
        )
    return manifest


def _numbered(numbers: tuple[tuple[int, int], ...], number: int) -> tuple[tuple[int, int], ...]:
    """Return the numbers of versions, as ranges, with the newest one's; of long histories the newest ranges only."""
    first = numbers[-1][0] if numbers and numbers[-1][1] + 1 == number else number
    return (*(span for span in numbers if span[0] != first), (first, number))[-_RANGES:]
