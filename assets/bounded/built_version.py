"""A version on its way: delivered and built, with what speaks against it. A frozen value, and its files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_adjunct.assets.versions.build_attempts import forget_attempt
from dagster_adjunct.assets.versions.sealed_version import version_id
from dagster_adjunct.resources.errors import CommitConflictError

if TYPE_CHECKING:
    from dagster_adjunct.assets.bounded.advancing_members import Member, Unit
    from dagster_adjunct.assets.sources.version_source import Delivery
    from dagster_adjunct.assets.versions.bounded_manifest import BoundedManifest
    from dagster_adjunct.assets.versions.dataset_log import Attempt
    from dagster_adjunct.assets.versions.sealed_version import SealedVersion, VersionRef


@dataclass(frozen=True, slots=True)
class Built:
    """A version on its way: built or not, and what speaks against it. `problem` "" means nothing does.

    `unchanged` is the id of the version that has the same content already, `withdrawn` the version of this name that
    had it and was withdrawn; `document` is the object that describes this one, None until it is written.
    """

    member: Member
    delivery: Delivery
    attempt: Attempt
    number: int
    version: SealedVersion | None
    problem: str = ""
    unchanged: str | None = None
    withdrawn: VersionRef | None = None
    warnings: tuple[str, ...] = ()
    document: str | None = None

    def of(self, unit: Unit) -> Built:
        """Return it for its member as that is now."""
        return replace(self, member=unit.member(self.member.name))

    @property
    def id(self) -> str:
        return version_id(self.number, self.attempt.id)

    @property
    def folder(self) -> str:
        return f"{self.attempt.folder}/{self.attempt.id}"

    @property
    def is_served(self) -> bool:
        """Whether it is what readers get, by the manifest of its member."""
        served = self.member.manifest.version
        return served is not None and served.id == self.id

    def described(self) -> Built:
        """Return it with its document written; what was not built has none."""
        return self if self.version is None else replace(self, document=self.member.log.write_version(self.version))

    def is_stored(self) -> bool:
        """Whether its document and all its files are still there: a discard may have taken them for garbage."""
        assert self.version is not None
        store = self.member.context.lake.store
        if self.document is not None and store.head(self.document) is None:
            return False
        stored = {item.key: item.size for item in store.list(f"{self.folder}/")}
        return all(
            stored.get(f"{generation.folder}/{file.name}") == file.size
            for generation in self.version.generations
            for file in generation.files
        )

    def is_nobodys(self, now: BoundedManifest) -> bool:
        """Whether nobody needs its files: by this manifest, its delivery was settled meanwhile by another build.

        Until then another writer may find this one finished, and publish it.
        """
        settled = self.delivery.version in now.taken - self.member.manifest.taken
        return settled and not any(self.folder in ref.folders for ref in now.versions)

    def forget_attempt(self, *, files: bool) -> None:
        """Drop the attempt's record, and its files where nothing can refer to them any more."""
        log = self.member.log
        forget_attempt(log.lake, log.name, self.attempt.id)
        if files and self.version is not None:
            log.drop(self.version.generations[0])

    def lost_as(self, what: str) -> CommitConflictError:
        """Return the error of a build that is lost by what another writer did."""
        return CommitConflictError(
            f"dataset {self.member.name!r}, version {self.delivery.version!r}: another writer {what} meanwhile.",
            "Nothing of this attempt is served. Advance again: it goes on from what the other one did.",
            dataset=self.member.name,
        )
