"""What the commits of datasets of both kinds hold, and what is asked of either: each kind gives its own answer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from dagster_adjunct.assets.declaration.dataset import Kind
from dagster_adjunct.assets.versions.document_base import ManifestPart, Offset
from dagster_adjunct.assets.versions.sealed_version import SealedVersion, VersionRef
from dagster_adjunct.assets.versions.stored_declaration import DatasetDeclaration
from dagster_adjunct.resources.bucketing.bucket_files import Generation


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

    kind: ClassVar[Kind]
    versions_are_commits: ClassVar[bool]
    """Whether a version stands nowhere but in its commit, and is found by the number of that; else it is listed."""

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
        if self.declaration.kind != self.kind:
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
    def check_kept(self, version_id: str) -> None:
        """Raise VersionDiscardedError for a version that is not kept, or that is being deleted."""

    @abstractmethod
    def reachable(self) -> set[str]:
        """Return the folders and documents that the retained versions need, and a bootstrap that is not done."""

    @abstractmethod
    def may_have_needed(self, version_id: str) -> bool:
        """Whether a version that is held, and gone, may need anything that is doomed: nothing says any more what."""

    @abstractmethod
    def generations_without_document(self) -> list[tuple[str, Sequence[Generation]]]:
        """Return the generations that stand in no version's document, by what they are of."""

    @abstractmethod
    def without(self, gone: Sequence[str], garbage: Sequence[str]) -> Self:
        """Return the manifest without what a discard lets go, which is doomed with the `garbage` that nothing reaches.

        What goes are versions by id or, where versions are commits, generations by folder.
        """

    @property
    @abstractmethod
    def versions_over_time(self) -> tuple[str, ...] | None:
        """The versions that together tell of all times; None where the one that is served does that alone."""

    @property
    @abstractmethod
    def is_settled(self) -> bool:
        """Whether nothing is under way that offsets do not tell."""

    @property
    @abstractmethod
    def unfinished(self) -> str:
        """Why the table is being built that readers are to get; "" where none is."""

    @abstractmethod
    def carried_to(self, offsets: Mapping[str, Offset]) -> dict[str, Any]:
        """Return what else is another where the input was rewritten into other partitions, and begins at `offsets`."""

    @property
    @abstractmethod
    def stored_in_words(self) -> str:
        """What an erasure looks through, for people."""

    def kept_elsewhere(self) -> list[str]:
        """Return what may hold entries and is not the dataset's, so that an erasure can't reach it; for people."""
        return [f"the input: {self.declaration.input}", "outputs of applications that joined this dataset"]

    def marks(self, version_id: str) -> list[str]:
        """Return what a version is to readers now, for people."""
        return ["served"] if self.version is not None and self.version.id == version_id else []

    def _without(self, entries: Sequence[str], garbage: Sequence[str], what: str, **left: Any) -> Self:
        doomed = tuple(dict.fromkeys([*self.doomed, *entries, *garbage]))
        change = Change(action="discard", reason=f"{what}, {len(garbage)} leftovers")
        return self.after(**left, doomed=doomed, change=change)

    def _served_folders(self) -> set[str]:
        return {generation.folder for generation in self.version.generations} if self.version is not None else set()
