"""What a dataset's commit holds: its declaration, its current version, how far its input was read.

The body of each commit below `datasets/<name>` is one manifest. Offsets stand in the same document as the version
that was made from them, so there is no second place to disagree with. It is a `BoundedManifest` or an
`UnboundedManifest`: what only the one kind has is in that, and which of them it is says the kind. What is asked of
either is an attribute of both, with the answer of its kind; this file is for who handles one of them alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import AwareDatetime, Field, ValidationError, model_validator

from dagster_adjunct.assets.declaration.dataset import DatasetKind
from dagster_adjunct.assets.versions.deliveries import Abandoned, Awaited, Delivered, Lost
from dagster_adjunct.assets.versions.version import (
    DatasetDeclaration,
    ManifestPart,
    Offset,
    SealedVersion,
    StoredGeneration,
    StoredSchema,
    VersionRef,
    check_declaration,
    version_number,
)
from dagster_adjunct.resources.bucketing.files import Generation
from dagster_adjunct.resources.common import first_validation_problem
from dagster_adjunct.resources.errors import AdjunctError, DatasetError, MalformedDocumentError, VersionDiscardedError

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.commit_log import Commit


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

    kind: ClassVar[DatasetKind]
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
    def may_need_doomed(self, version_id: str) -> bool:
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
    def fields_after_repartition(self, offsets: Mapping[str, Offset]) -> dict[str, Any]:
        """Return what else is another where the input was rewritten into other partitions, and begins at `offsets`."""

    @property
    @abstractmethod
    def stored_description(self) -> str:
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


class Bootstrap(ManifestPart):
    """A snapshot of a change stream: from where, up to which offsets, and whether it is reached.

    The target is each partition's upcoming offset, recorded before anything is read; records that arrive
    later do not extend the wait. `building` are the generations made so far: readers get them when the target is
    reached, and what was served before stays served until then. `columns` are theirs. `why` says what asked for it.
    """

    state: Literal["running", "done"]
    start: dict[str, Offset]
    target: dict[str, Offset]
    started_at: AwareDatetime
    finished_at: AwareDatetime | None = None
    building: tuple[StoredGeneration, ...] = ()
    columns: StoredSchema | None = None
    loaded: bool = False
    why: str = ""


class Retired(ManifestPart):
    """A generation that a compaction or rebuild replaced; versions before number `until` still read it."""

    generation: int
    folder: str
    until: int
    at: AwareDatetime


class SentToTable(ManifestPart):
    """What one operator of a batch has sent to a local table: the last record of each key, and what tells it again."""

    rows: int
    deleted: int
    digest: int


class Written(ManifestPart):
    """The last batch that has written a local table, with each of its `sends` in the order of the application.

    `before` is the version that it was begun with, None where there was none. `undone` says that the batch was given
    up, and the table is as it was before it: what is committed late of that batch changes nothing. `watermark` is, of a
    table of state, up to where rows have expired.
    """

    application: str
    batch: int
    sends: tuple[SentToTable, ...] = ()
    before: str | None = None
    undone: bool = False
    watermark: AwareDatetime | None = None


class Decision(ManifestPart):
    """What was decided about a change stream's table when a run began, and why (the recovery table)."""

    action: Literal["create", "bootstrap", "recreate", "continue", "serve-stale"]
    store: Literal["none", "building", "invalid", "valid"]
    reason: str
    at: AwareDatetime


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

    kind: ClassVar[DatasetKind] = "bounded"
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

    def may_need_doomed(self, version_id: str) -> bool:
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

    def fields_after_repartition(self, offsets: Mapping[str, Offset]) -> dict[str, Any]:
        awaited = self.awaited
        if awaited is not None:  # of its version set: this member has delivered nothing of it
            awaited = awaited.model_copy(update={"missing": tuple(offsets)})
        # The counts of its markers were those of the old partitions: they contradict nothing.
        delivered = tuple(done.model_copy(update={"markers": {}}) for done in self.delivered)
        return {"awaited": awaited, "delivered": delivered}

    @property
    def stored_description(self) -> str:
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

    def with_declared_policies(self, declared: DatasetDeclaration) -> BoundedManifest:
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

    kind: ClassVar[DatasetKind] = "unbounded"
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

    def may_need_doomed(self, version_id: str) -> bool:
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

    def fields_after_repartition(self, offsets: Mapping[str, Offset]) -> dict[str, Any]:
        return {"bootstrap": self.bootstrap.model_copy(update={"start": offsets, "target": offsets})}

    @property
    def stored_description(self) -> str:
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
            changes.setdefault("numbers", _add_number(self.numbers, version.number))
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


def _add_number(numbers: tuple[tuple[int, int], ...], number: int) -> tuple[tuple[int, int], ...]:
    """Return the numbers of versions, as ranges, with the newest one's; of long histories the newest ranges only."""
    first = numbers[-1][0] if numbers and numbers[-1][1] + 1 == number else number
    return (*(span for span in numbers if span[0] != first), (first, number))[-_RANGES:]


KIND = "dataset"

DatasetManifest = BoundedManifest | UnboundedManifest
MANIFEST_TYPES: dict[str, type[BoundedManifest] | type[UnboundedManifest]] = {
    BoundedManifest.kind: BoundedManifest,
    UnboundedManifest.kind: UnboundedManifest,
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


def resume_bounded_manifest(stored: DatasetManifest, declared: DatasetDeclaration) -> BoundedManifest:
    """Return a stored manifest with order and policy as they are declared now; DatasetError where more was changed."""
    check_declaration(stored.name, stored.declaration, declared)
    return as_bounded(stored).with_declared_policies(declared)


def as_unbounded(manifest: DatasetManifest) -> UnboundedManifest:
    """Return the manifest of a dataset that follows a change stream. Raises DatasetError for one that does not."""
    if not isinstance(manifest, UnboundedManifest):
        raise DatasetError(
            f"dataset {manifest.name!r} arrives in versions: it follows no change stream, and has no table.",
            f"See adjunct dataset versions {manifest.name}.",
            dataset=manifest.name,
        )
    return manifest


def as_follower(manifest: DatasetManifest) -> UnboundedManifest | None:
    """Return the manifest of a table that follows a stream, and may be behind it; None for all else."""
    if isinstance(manifest, UnboundedManifest) and manifest.declaration.owner is None:
        return manifest
    return None


# In the order in which they are written. Where a field is of one kind only: what stands there for the other one.
_FIELDS: dict[str, Any] = {
    "format": 1,
    "name": None,
    "declaration": None,
    "version": None,
    "head": None,
    "pin": None,
    "versions": [],
    "delivered": [],
    "known": [],
    "abandoned": [],
    "awaited": None,
    "doomed": [],
    "lost": [],
    "stream": None,
    "offsets": {},
    "bootstrap": None,
    "retired": [],
    "retained_from": 1,
    "confirmed_at": None,
    "horizon": None,
    "first_ordered": None,
    "positions_from": 0,
    "quarantining": None,
    "applied": {},
    "decision": None,
    "next_number": 1,
    "next_generation": 1,
    "counters": {},
    "change": None,
    "numbers": [],
    "written": None,
}
_FIELDS_OF_OTHER_KIND: dict[type[DatasetManifest], set[str]] = {
    BoundedManifest: UnboundedManifest.model_fields.keys() - BoundedManifest.model_fields.keys(),
    UnboundedManifest: BoundedManifest.model_fields.keys() - UnboundedManifest.model_fields.keys(),
}


def manifest_to_body(manifest: DatasetManifest) -> dict[str, Any]:
    """Return a manifest as the JSON-able body of a commit."""
    own = manifest.model_dump(mode="json")
    return {name: own.get(name, empty) for name, empty in _FIELDS.items()}


def manifest_from_body(body: Mapping[str, Any]) -> DatasetManifest:
    """Return the manifest that a commit's body holds. Raises pydantic's ValidationError."""
    declared = body.get("declaration")
    declared_kind = str(declared.get("kind")) if isinstance(declared, Mapping) else ""
    kind = MANIFEST_TYPES.get(
        declared_kind, BoundedManifest
    )  # of what declares no kind, validating tells what is wrong
    # A bootstrap makes a bounded dataset's body malformed; whatever else is of the other kind never meant anything.
    others = _FIELDS_OF_OTHER_KIND[kind] - ({"bootstrap"} if body.get("bootstrap") is not None else set())
    return kind.model_validate({name: value for name, value in body.items() if name not in others})


def parse_manifest(name: str, commit: Commit) -> DatasetManifest:
    """Return the manifest in a dataset's commit, or raise MalformedDocumentError saying what is wrong where."""
    try:
        manifest = manifest_from_body(commit.body)
        if manifest.name != name:
            raise MalformedDocumentError(f"it describes the dataset {manifest.name!r}", dataset=manifest.name)
    except (ValidationError, AdjunctError) as error:
        raise MalformedDocumentError(
            f"dataset {name!r}: the manifest {commit.manifest_key} can't be read: {describe_document_problem(error)}.",
            "Restore that object from a backup; versions committed before it are untouched and can still be "
            "opened by their id.",
            document=commit.manifest_key,
        ) from error
    return manifest


def describe_document_problem(error: ValidationError | AdjunctError) -> str:
    """Return in words why a stored document can't be read."""
    return error.problem.rstrip(".") if isinstance(error, AdjunctError) else first_validation_problem(error)
