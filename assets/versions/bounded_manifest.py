"""The manifest of a dataset that arrives in versions, which it lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, Self

from pydantic import AwareDatetime, Field, model_validator

from dagster_adjunct.assets.declaration.dataset import Kind
from dagster_adjunct.assets.versions.common_manifest import CommonManifest
from dagster_adjunct.assets.versions.deliveries import Abandoned, Awaited, Delivered, Lost
from dagster_adjunct.assets.versions.document_base import ManifestPart, Offset
from dagster_adjunct.assets.versions.sealed_version import VersionRef
from dagster_adjunct.assets.versions.stored_declaration import DatasetDeclaration
from dagster_adjunct.assets.versions.unbounded_state import Retired
from dagster_adjunct.resources.bucketing.bucket_files import Generation
from dagster_adjunct.resources.errors import VersionDiscardedError


class Pin(ManifestPart):
    """Holds readers at a version, whatever seals meanwhile, until it is taken away or `expires_at` has passed."""

    version: str
    reason: str
    by: str
    at: AwareDatetime
    expires_at: AwareDatetime | None = None

    def has_expired(self, now: datetime) -> bool:
        """Whether it holds nobody any more at this time."""
        return self.expires_at is not None and self.expires_at <= now


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

    kind: ClassVar[Kind] = "bounded"
    versions_are_commits: ClassVar[bool] = False

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
        return self._served_folders() | folders | {str(ref.document) for ref in self.built}

    def check_kept(self, version_id: str) -> None:
        ref = self.ref(version_id)
        if ref is None or set(ref.folders) & set(self.doomed):
            served = self.version.id if self.version else "none"
            raise VersionDiscardedError(
                f"dataset {self.name!r}: version {version_id} has been discarded; the one served is {served}.",
                "Open the dataset again, or pin the versions that must stay: adjunct dataset pin.",
                dataset=self.name,
                version=version_id,
            )

    def may_have_needed(self, version_id: str) -> bool:
        return False  # the names of folders and documents say whose they were

    def generations_without_document(self) -> list[tuple[str, Sequence[Generation]]]:
        return []

    def without(self, gone: Sequence[str], garbage: Sequence[str]) -> Self:
        leaving = [ref for ref in self.versions if ref.id in gone]
        entries = [entry for ref in leaving for entry in (*ref.folders, ref.document) if entry is not None]
        left = tuple(ref for ref in self.versions if ref.id not in gone)
        return self._without(entries, garbage, f"{len(gone)} versions", versions=left)

    @property
    def versions_over_time(self) -> tuple[str, ...]:
        """Those that are sealed and say since when they are valid; withdrawn ones do not count."""
        dated = (ref for ref in self.versions if ref.state == "sealed" and ref.valid_from is not None)
        return tuple(ref.id for ref in dated if not set(self.doomed).intersection(ref.folders))

    @property
    def is_settled(self) -> bool:
        return True

    @property
    def unfinished(self) -> str:
        return ""

    def carried_to(self, offsets: Mapping[str, Offset]) -> dict[str, Any]:
        awaited = self.awaited
        if awaited is not None:  # of its version set: this member has delivered nothing of it
            awaited = awaited.model_copy(update={"missing": tuple(offsets)})
        # The counts of its markers were those of the old partitions: they contradict nothing.
        delivered = tuple(done.model_copy(update={"markers": {}}) for done in self.delivered)
        return {"awaited": awaited, "delivered": delivered}

    @property
    def stored_in_words(self) -> str:
        return f"{len(self.versions)} version(s)"

    def marks(self, version_id: str) -> list[str]:
        marks = super().marks(version_id)
        waits = self.head == version_id and "served" not in marks
        marks += ["pinned"] if self.pin is not None and self.pin.version == version_id else []
        return [*marks, *(["next when unpinned"] if waits else [])]

    @property
    def built(self) -> tuple[VersionRef, ...]:
        """The versions that were built, which have a document; of others there is nothing but why they were refused."""
        return tuple(ref for ref in self.versions if ref.document is not None)

    def declared_as(self, declared: DatasetDeclaration) -> BoundedManifest:
        """Return this manifest with what may change in a declaration, order and policy, as it is declared now."""
        now = self.declaration.with_policies_of(declared)
        return self if now == self.declaration else self.after(declaration=now)

    @property
    def taken(self) -> set[str]:
        """The names of the versions that were delivered: what comes under one of them again is a re-delivery."""
        return {*self.known, *(done.name for done in self.delivered if done.freed is None)}

    # What only a table has, and is asked of either kind.

    @property
    def retired(self) -> tuple[Retired, ...]:
        return ()

    @property
    def retained_from(self) -> None:
        return None

    @property
    def written(self) -> None:
        return None
