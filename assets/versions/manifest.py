"""Manifests: a dataset's declaration, its current version, and how far its input was read.

The body of each commit below `datasets/<name>` is one manifest. Offsets are stored in the same
document as the version made from them, so the two can't disagree. A manifest is a `BoundedManifest`
or an `UnboundedManifest`, depending on the kind of the dataset. Attributes that callers use for
either kind are defined on both. What a version is made of, files included, is in version.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, Literal, Self

from pydantic import AwareDatetime, Field, ValidationError, model_validator

from dagster_adjunct.assets.declaration.dataset import DatasetKind
from dagster_adjunct.assets.versions.version import (
    DatasetDeclaration,
    ManifestPart,
    Offset,
    SealedVersion,
    StoredGeneration,
    StoredSchema,
    VersionRef,
    version_number,
)
from dagster_adjunct.resources.bucketing.files import Generation
from dagster_adjunct.resources.documents import first_validation_problem
from dagster_adjunct.resources.errors import (
    AdjunctError,
    DatasetError,
    MalformedDocumentError,
    VersionDiscardedError,
)
from dagster_adjunct.resources.objects.commit_log import Commit
from dagster_adjunct.resources.schemas.schema import AS_NAMED, StoredNamesField
from dagster_adjunct.resources.schemas.version_columns import NamedColumns
from dagster_adjunct.resources.streams.system import FIRST_OFFSET, StreamInfo

MAX_DELIVERIES = 100
MAX_NAMES = 10_000


class MarkerFacts(ManifestPart):
    """The facts of one marker: the number of rows before it, a checksum and a valid-from time,
    where it states them.

    A marker is a partition's end-of-dataset marker, or the completion object of a folder of files
    (offset 0). If a stream's marker states no rows, `rows` is the counted number. For a folder,
    `checksum` is that of the completion object, `completed` the time it was written, and `contents`
    a digest of the data files' names and contents. `listing` is a digest of names, sizes and ETags,
    which needs no reading; a copy of the files has a different one.
    """

    offset: int
    rows: int | None = None
    checksum: str | None = None
    listing: str | None = None
    contents: str | None = None
    completed: AwareDatetime | None = None
    valid_from: AwareDatetime | None = None


class Awaited(ManifestPart):
    """The version that a dataset waits for: the missing markers, and since when it is awaited.

    `version` is None if records have arrived, but no marker that names their version.
    """

    version: str | None
    missing: tuple[str, ...]
    since: AwareDatetime


class Delivered(ManifestPart):
    """A completely delivered version: its name, its markers, and the id of the version that holds
    its content.

    That is the previous version for a delivery with the same content. `freed` is the time since
    when the name can be delivered again as a new version: the time of the rejection for a version
    rejected and then dropped, or the time of the revocation.
    """

    name: str
    version: str
    markers: dict[str, MarkerFacts]
    freed: AwareDatetime | None = None


class Abandoned(ManifestPart):
    """A version that an operator abandoned: the records before its markers are dropped."""

    name: str
    reason: str
    by: str
    at: AwareDatetime


class Lost(ManifestPart):
    """The ranges of offsets that retention removed before they were read, by stream partition, and
    the lost versions.

    `versions` are those whose markers are left in some partition; others that ended in these ranges
    are unknown.
    """

    versions: tuple[str, ...]
    ranges: dict[str, tuple[Offset, Offset]]
    at: AwareDatetime

    def summary(self) -> str:
        """Return the loss as a sentence without a period."""
        ranges = []
        for ssp, (start, end) in self.ranges.items():
            ranges.append(f"offsets {start} to {int(end) - 1} of {ssp}")
        listed = ", ".join(ranges[:3])
        if len(ranges) > 3:
            listed += f" and of {len(ranges) - 3} more partitions"
        if self.versions:
            lost = f"not whole any more, and left out: {', '.join(map(repr, self.versions))}"
        else:
            lost = "versions that ended there are lost"
        return f"retention took {listed} before they were read; {lost}"


class Change(ManifestPart):
    """The action of one commit, its version and the reason; the commit itself stores author and
    time.
    """

    action: str
    version: str | None = None
    reason: str = ""


class Repartitioned(ManifestPart):
    """The last repartitioning of a dataset.

    `partitions` is the number of partitions before. `commit` is the last commit before that changed
    entries: readers of the dataset's changes that have read it have read everything.
    """

    partitions: int = Field(ge=1)
    commit: int = Field(ge=0)


class CommonManifest(ManifestPart):
    """The part of a manifest that both kinds of dataset have.

    `version` is the version served. `offsets` is the next offset to read of each input partition
    ({} for files and queries), `stream` the identity of their stream, and `positions_from` is added
    to offsets to make positions: the offsets of a repartitioned stream restart, and its records
    must still come after all earlier ones. `doomed` are the folders and documents being deleted: no
    reader may start to use them.
    """

    kind: ClassVar[DatasetKind]
    versions_are_commits: ClassVar[bool]
    """Whether each commit is a version, found by the commit's number; else the manifest lists
    the versions.
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
    repartitioned: Repartitioned | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.declaration.kind != self.kind:
            raise ValueError(f"a {type(self).__name__} is declared {self.declaration.kind}")
        if len(self.offsets) != self.declaration.input_partitions:
            raise ValueError(
                f"it has offsets of {len(self.offsets)} partitions of {self.declaration.input}:"
                f" expected {self.declaration.input_partitions}"
            )
        # Generations are numbered in rising order.
        if self.version is not None and self.version.generations[-1].id >= self.next_generation:
            raise ValueError(
                f"next_generation is {self.next_generation}, which the current version uses"
            )
        return self

    def kept_elsewhere(self) -> list[str]:
        """Return, in words, the places that an erasure can't reach and that may hold the
        dataset's entries.
        """
        return [
            f"the input: {self.declaration.input}",
            "outputs of applications that joined this dataset, or follow its changes",
        ]

    def marks(self, version_id: str) -> list[str]:
        """Return, in words, why readers get a version now or later: "served", "pinned", "next when
        unpinned"; [] if they don't.
        """
        if self.served_id != version_id:
            return []
        return ["served"]

    def _with_doomed(
        self, entries: Sequence[str], garbage: Sequence[str], what: str, **fields: Any
    ) -> Self:
        """Return the manifest with these folders and documents doomed, and with these fields.

        `entries` are those of versions or generations, which `what` names in the history; `garbage`
        belongs to none.
        """
        doomed = tuple(dict.fromkeys([*self.doomed, *entries, *garbage]))
        change = Change(action="expire", reason=f"{what}, {len(garbage)} leftovers")
        return self.after(**fields, doomed=doomed, change=change)

    @property
    def served_id(self) -> str | None:
        """The id of the version served, None without one."""
        if self.version is None:
            return None
        return self.version.id

    @property
    def served_generations(self) -> tuple[Generation, ...]:
        """The generations of the version served, oldest first."""
        if self.version is None:
            return ()
        return self.version.generations

    def _served_folders(self) -> set[str]:
        return {generation.folder for generation in self.served_generations}


class Bootstrap(ManifestPart):
    """The initial read of a change stream: its start and target offsets, and whether it is done.

    The target is each partition's upcoming offset, recorded before anything is read; records that
    arrive later do not extend it. `building` are the generations written so far, with these
    `columns`, which have the stored `names`: readers get them when the target is reached, and the
    previous version stays served until then. `loaded` is whether an initial snapshot was loaded
    first. `why` is the reason for the bootstrap.
    """

    state: Literal["running", "done"]
    start: dict[str, Offset]
    target: dict[str, Offset]
    started_at: AwareDatetime
    finished_at: AwareDatetime | None = None
    building: tuple[StoredGeneration, ...] = ()
    columns: StoredSchema | None = None
    names: StoredNamesField = AS_NAMED
    loaded: bool = False
    why: str = ""


class ChangeTimes(ManifestPart):
    """The times of the changes of one partition: the `newest`, None before a change that has one,
    and when changes were last read, by the clock.
    """

    newest: AwareDatetime | None = None
    read_at: AwareDatetime


class PassedMark(ManifestPart):
    """A watermark of earlier commits, which readers may have passed, and how many changes have come
    since with times before it.
    """

    until: AwareDatetime
    late: int = 0


class WatermarkState(ManifestPart):
    """What the watermark of a dataset is made of, the `times` of its changes by partition, and its
    last watermarks before this one (`passed`), oldest first.
    """

    times: dict[str, ChangeTimes] = Field(default_factory=dict)
    passed: tuple[PassedMark, ...] = ()

    def after_repartition(self, partitions: int, offsets: Iterable[str]) -> WatermarkState:
        """Return the state with the times of the new partitions, which begin at these `offsets`.
        Each may continue the slowest of the `partitions` old ones; its time is unknown if one of
        them has none.
        """
        if not self.times:
            return self
        read_at = max(times.read_at for times in self.times.values())
        known = [times.newest for times in self.times.values() if times.newest is not None]
        slowest = None
        if len(known) == partitions:
            slowest = min(known)
        times = dict.fromkeys(offsets, ChangeTimes(newest=slowest, read_at=read_at))
        return self.model_copy(update={"times": times})


class Retired(ManifestPart):
    """A generation replaced by a compaction or rebuild; versions before number `until` still
    need it.
    """

    generation: int
    folder: str
    until: int
    at: AwareDatetime


class SentToTable(ManifestPart):
    """What one operator of a batch sent to a local table: numbers of rows and deletions, and their
    digest.

    Only the last record of each key counts.
    """

    rows: int
    deleted: int
    digest: int


class Written(ManifestPart):
    """The last batch that wrote a local table; `sends` has what each operator sent, in the
    application's order.

    `before` is the version that it started from, None if there was none. `undone` means that the
    batch was abandoned and the table restored: a late commit of that batch changes nothing.
    `watermark` is the time up to which rows of a state table have expired.
    """

    application: str
    batch: int
    sends: tuple[SentToTable, ...] = ()
    before: str | None = None
    undone: bool = False
    watermark: AwareDatetime | None = None


class Decision(ManifestPart):
    """The recovery decision for a change stream's table at the start of a run, its state in
    store, and the reason.
    """

    action: Literal["create", "bootstrap", "recreate", "continue", "serve-stale"]
    store: Literal["none", "building", "invalid", "valid"]
    reason: str
    at: AwareDatetime


class Pin(ManifestPart):
    """Keeps a version served, even when newer ones are sealed, until a commit removes it. The first
    advance or expire after `expires_at` does.

    A clock alone ends no pin: what is served is what the commits say, so that a batch that is
    repeated, and joins with what a table served at a time, read the same.
    """

    version: str
    reason: str
    by: str
    at: AwareDatetime
    expires_at: AwareDatetime | None = None

    def has_expired(self, now: datetime) -> bool:
        """Whether the pin has expired at this time."""
        return self.expires_at is not None and self.expires_at <= now


class KnownColumns(ManifestPart):
    """All columns that the versions of a bounded dataset have had, except dropped ones, with their
    stored names.

    `input_names` are those that the input of the last version had for its columns.
    """

    columns: StoredSchema
    names: StoredNamesField = AS_NAMED
    input_names: StoredNamesField = AS_NAMED

    @property
    def named_columns(self) -> NamedColumns:
        """The columns with their stored names."""
        return NamedColumns(self.columns, self.names)


class BoundedManifest(CommonManifest):
    """The manifest of a dataset that arrives in versions.

    `version` is the pinned one, else `head`, the one chosen by the last switch. `versions` lists
    all retained ones by number. `delivered` records the newest deliveries and `known` the names of
    older ones, so that repeated markers are recognised; records before markers of `abandoned`
    versions are dropped. `lost` is what retention removed from the stream before it was read,
    newest last. `known_columns` is None before the first version is built.
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
    known_columns: KnownColumns | None = None

    kind: ClassVar[DatasetKind] = "bounded"
    versions_are_commits: ClassVar[bool] = False
    # Attributes of an unbounded dataset's manifest that callers read from either kind.
    is_settled: ClassVar[bool] = True
    unfinished: ClassVar[str] = ""
    retired: ClassVar[tuple[Retired, ...]] = ()
    retained_from: ClassVar[None] = None
    written: ClassVar[None] = None

    @model_validator(mode="after")
    def _serves_what_is_chosen(self) -> Self:
        """Raise ValueError unless the version served is the chosen one, and it and the head are
        retained and sealed.
        """
        if self.served_id != self.chosen:
            raise ValueError(
                f"the version served is {self.served_id}: expected {self.chosen}, which is pinned"
                " or the head"
            )
        for named in {self.served_id, self.head} - {None}:
            if not self.retains(str(named)):
                raise ValueError(f"the version {named} is not among the retained, sealed versions")
        return self

    @property
    def named_columns(self) -> NamedColumns | None:
        """The columns that the dataset has had, with their names of now; None without a version."""
        if self.known_columns is None:
            return None
        return self.known_columns.named_columns

    @property
    def chosen(self) -> str | None:
        """The id of the version to serve: the pinned one, else the head."""
        if self.pin is not None:
            return self.pin.version
        return self.head

    @property
    def head_ref(self) -> VersionRef | None:
        """The version chosen by the last switch, None before the first."""
        return self.ref(self.head)

    @property
    def sealed(self) -> tuple[VersionRef, ...]:
        """The retained versions that are sealed, by number."""
        return tuple(ref for ref in self.versions if ref.state == "sealed")

    @property
    def listed(self) -> tuple[VersionRef, ...]:
        """The retained versions by number."""
        return self.versions

    def ref(self, version_id: str | None) -> VersionRef | None:
        """Return the retained version of this id, whatever its state; None if there is none."""
        for ref in self.versions:
            if ref.id == version_id:
                return ref
        return None

    def retains(self, version_id: str) -> bool:
        """Whether a version that was once served can be read."""
        ref = self.ref(version_id)
        return ref is not None and ref.state == "sealed"

    def reachable(self) -> set[str]:
        """Return the folders and documents that the retained versions need."""
        return self._served_folders().union(*(ref.objects for ref in self.versions))

    def check_kept(self, version_id: str) -> None:
        """Raise VersionDiscardedError for a version that is not retained or is being deleted."""
        ref = self.ref(version_id)
        if ref is None or set(ref.folders) & set(self.doomed):
            raise VersionDiscardedError(
                f"dataset {self.name!r}: version {version_id} has been discarded; the one served is"
                f" {self.served_id or 'none'}.",
                "Open the dataset again. To keep a version: adjunct dataset pin"
                f" {self.name} VERSION --reason ….",
                dataset=self.name,
                version=version_id,
            )

    def without(self, removed: Sequence[str], garbage: Sequence[str]) -> Self:
        """Return the manifest without these versions: they and the unreferenced `garbage` become
        doomed.
        """
        entries: list[str] = []
        remaining = []
        for ref in self.versions:
            if ref.id in removed:
                entries += ref.objects
            else:
                remaining.append(ref)
        return self._with_doomed(
            entries, garbage, f"{len(removed)} versions", versions=tuple(remaining)
        )

    @property
    def versions_over_time(self) -> tuple[str, ...]:
        """The ids of the versions that together cover all times: sealed, with a valid-from time,
        and not doomed.
        """
        doomed = set(self.doomed)
        together = []
        for ref in self.sealed:
            if ref.valid_from is not None and doomed.isdisjoint(ref.folders):
                together.append(ref.id)
        return tuple(together)

    def time_of(self, version: str) -> datetime:
        """Return since when a retained version is valid. It must state that."""
        ref = self.ref(version)
        assert ref is not None
        assert ref.valid_from is not None
        return ref.valid_from

    def fields_after_repartition(self, offsets: Mapping[str, Offset]) -> dict[str, Any]:
        """Return the fields, besides offsets, that change when the repartitioned input starts at
        these offsets.
        """
        awaited = self.awaited
        # Only other members of the version set have it: this one has read nothing of it.
        if awaited is not None:
            awaited = awaited.model_copy(update={"missing": tuple(offsets)})
        # The markers count records of the old partitions, so later markers can't be compared with
        # them.
        delivered = [done.model_copy(update={"markers": {}}) for done in self.delivered]
        return {"awaited": awaited, "delivered": tuple(delivered)}

    @property
    def stored_description(self) -> str:
        """In words, what an erasure searches for the keys."""
        return f"{len(self.versions)} version(s)"

    def marks(self, version_id: str) -> list[str]:
        marks = super().marks(version_id)
        if self.pin is not None and self.pin.version == version_id:
            marks.append("pinned")
        if version_id == self.head != self.served_id:
            marks.append("next when unpinned")
        return marks

    @property
    def built(self) -> tuple[VersionRef, ...]:
        """The retained versions that have a document; the others were rejected before they were
        built.
        """
        return tuple(ref for ref in self.versions if ref.document is not None)

    def with_declared_policies(self, declared: DatasetDeclaration) -> BoundedManifest:
        """Return this manifest with the order and policies of the current declaration."""
        policies = {name: getattr(declared, name) for name in ("order", "by_time", "discard")}
        now = self.declaration.model_copy(update=policies)
        if now == self.declaration:
            return self
        return self.after(declaration=now)

    @property
    def names(self) -> set[str]:
        """The names of all versions that were delivered or abandoned, also those that are free
        again.
        """
        return self.given_up.union(self.known, (done.name for done in self.delivered))

    @property
    def given_up(self) -> set[str]:
        """The names of the abandoned versions."""
        return {ended.name for ended in self.abandoned}

    @property
    def rejected(self) -> set[str]:
        """The ids of the rejected versions that are retained."""
        return {ref.id for ref in self.versions if ref.state == "rejected"}

    @property
    def taken(self) -> set[str]:
        """The names of the delivered versions that are not free again: a later delivery under one
        of them is a re-delivery.
        """
        return {done.name for done in self.delivered if done.freed is None}.union(self.known)

    @property
    def newest_deliveries(self) -> dict[str, Delivered]:
        """The last delivery under each name."""
        return {done.name: done for done in self.delivered}

    @property
    def freed(self) -> set[str]:
        """The names of delivered versions that are free to be delivered again."""
        return {done.name for done in self.delivered if done.freed is not None}


_MAX_RANGES = 200
# The number of startpoint ids kept by partition: a startpoint is retried soon or never.
_REMEMBERED = 20


class UnboundedManifest(CommonManifest):
    """The manifest of a dataset that follows a change stream: each commit is a version, found by
    its number.

    `retired` are generations that earlier versions need and the current one does not; versions
    before number `retained_from` are gone. `confirmed_at` is the last time at which all changes up
    to the stream's end were known to be applied. Deletions up to `horizon`, a position (with
    history, a time in microseconds), are forgotten, so changes at or below it are too late.
    `first_ordered` are the ordering values of the first change, whose formats later ones must have;
    None before it. `quarantining` are the ranges whose bad changes are being sent to the dead
    letters: after a crash the same ranges are read again. `applied` are the ids of the last applied
    startpoints, by stream partition, newest last. `decision` is the last recovery decision.
    `watermark` is empty unless the dataset declares one. `numbers` are the numbers of its versions
    so far, as ranges (first, last), newest last.
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
    watermark: WatermarkState = WatermarkState()
    numbers: tuple[tuple[int, int], ...] = ()
    written: Written | None = None

    kind: ClassVar[DatasetKind] = "unbounded"
    versions_are_commits: ClassVar[bool] = True
    # Attributes of a bounded dataset's manifest that callers read from either kind.
    listed: ClassVar[tuple[VersionRef, ...]] = ()
    versions_over_time: ClassVar[None] = None
    stored_description: ClassVar[str] = "every generation"
    head: ClassVar[None] = None
    pin: ClassVar[None] = None
    awaited: ClassVar[None] = None
    lost: ClassVar[tuple[Lost, ...]] = ()

    @property
    def named_columns(self) -> NamedColumns | None:
        """The columns of the table with their names of now; None without a version."""
        if self.version is None:
            return None
        return self.version.named_columns

    @property
    def is_settled(self) -> bool:
        """Whether neither a bootstrap nor a quarantine is in progress."""
        return self.bootstrap.state == "done" and self.quarantining is None

    @property
    def unfinished(self) -> str:
        """Why a first or new table is being built, for readers to get once it is finished; "" if
        none is.
        """
        if self.bootstrap.state == "done" and self.version is not None:
            return ""
        return self.bootstrap.why or "the first one"

    def ref(self, version_id: str | None) -> VersionRef | None:
        """Return None: versions are found by the number of their commit."""
        return None

    def retains(self, version_id: str) -> bool:
        """Whether a version that was once served can be read."""
        return version_number(version_id) >= self.retained_from

    def reachable(self) -> set[str]:
        """Return the folders needed by the retained versions and by a running bootstrap."""
        building = (generation.folder for generation in self.bootstrap.building)
        retired = (each.folder for each in self.retired)  # earlier versions need them
        return self._served_folders().union(building, retired)

    def check_kept(self, version_id: str) -> None:
        """Raise VersionDiscardedError for a version that is not retained."""
        if not self.retains(version_id):
            raise VersionDiscardedError(
                f"dataset {self.name!r}: version {version_id} has been discarded; those from number"
                f" {self.retained_from} on can be read.",
                f"See adjunct dataset history {self.name}. A policy that keeps more keeps earlier"
                " versions longer: discard=DiscardPolicy(keep=…, grace=…).",
                dataset=self.name,
                version=version_id,
            )

    def without(self, removed: Sequence[str], garbage: Sequence[str]) -> Self:
        """Return the manifest without these retired generations, by folder: they and `garbage`
        become doomed. Versions that needed one of them are no longer retained.
        """
        remaining = []
        retained_from = self.retained_from
        for retired in self.retired:
            if retired.folder in removed:
                retained_from = max(retained_from, retired.until)
            else:
                remaining.append(retired)
        return self._with_doomed(
            removed,
            garbage,
            f"{len(removed)} generations",
            retired=tuple(remaining),
            retained_from=retained_from,
        )

    def fields_after_repartition(self, offsets: Mapping[str, Offset]) -> dict[str, Any]:
        """Return the fields, besides offsets, that change when the repartitioned input starts at
        these offsets.
        """
        return {
            "bootstrap": self.bootstrap.model_copy(update={"start": offsets, "target": offsets}),
            "watermark": self.watermark.after_repartition(
                self.declaration.input_partitions, offsets
            ),
        }

    def kept_elsewhere(self) -> list[str]:
        declared = self.declaration
        outputs = super().kept_elsewhere()[-1]
        if declared.owner is not None:
            streams = f"the input streams of application {declared.owner}"
            return [
                f"{streams}: records of these keys that are read later bring them back",
                outputs,
            ]
        places = [
            (
                f"the input: {declared.input}, whose records hold the keys until its retention"
                " drops them; a rebuild brings the keys back, unless tombstones for them were sent"
                " or their records are gone"
            ),
            outputs,
        ]
        if self.bootstrap.loaded:
            places.append("the bulk snapshot that the dataset was loaded from")
        if self.counters.get("quarantined"):
            places.append(f"dead letters: {self.counters['quarantined']:,} changes were sent there")
        return places

    def has_applied(self, ssp: str, startpoint_id: str) -> bool:
        """Whether a commit has already applied this startpoint to a partition."""
        return startpoint_id in self.applied.get(ssp, ())

    def with_applied(self, ids: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
        """Return `applied` with these startpoints (id by partition) added; only the newest of a
        partition are kept.
        """
        applied = dict(self.applied)
        for ssp, startpoint_id in ids.items():
            applied[ssp] = (*applied.get(ssp, ()), startpoint_id)[-_REMEMBERED:]
        return applied

    def after(self, **changes: Any) -> Self:
        """Return this manifest with some fields replaced, validated again; a new version's
        number is recorded.
        """
        version: SealedVersion | None = changes.get("version")
        before = None
        if self.version is not None:
            before = self.version.number
        if version is not None and version.number != before:
            changes.setdefault("numbers", _add_number(self.numbers, version.number))
        return super().after(**changes)


def _add_number(numbers: tuple[tuple[int, int], ...], number: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges of version numbers with `number` added; only the newest ranges are kept."""
    first = number
    for start, end in numbers[-1:]:
        if end + 1 == number:  # the last range goes on
            first = start
    ranges = []
    for start, end in numbers:
        if start != first:
            ranges.append((start, end))
    ranges.append((first, number))
    return tuple(ranges[-_MAX_RANGES:])


KIND = "dataset"

DatasetManifest = BoundedManifest | UnboundedManifest


def as_bounded(manifest: DatasetManifest) -> BoundedManifest:
    """Return a bounded dataset's manifest. Raises DatasetError for one that follows a change
    stream.
    """
    if not isinstance(manifest, BoundedManifest):
        raise DatasetError(
            f"dataset {manifest.name!r} follows a change stream: it has one table, and no versions"
            " that are delivered.",
            f"Its commits are versions of the table: adjunct dataset history {manifest.name}.",
            dataset=manifest.name,
        )
    return manifest


def as_unbounded(manifest: DatasetManifest) -> UnboundedManifest:
    """Return an unbounded dataset's manifest. Raises DatasetError for one that arrives in
    versions.
    """
    if not isinstance(manifest, UnboundedManifest):
        raise DatasetError(
            f"dataset {manifest.name!r} is bounded: it arrives in versions, and this needs an"
            " unbounded dataset.",
            f"List its versions: adjunct dataset versions {manifest.name}.",
            dataset=manifest.name,
        )
    return manifest


def as_follower(manifest: DatasetManifest) -> UnboundedManifest | None:
    """Return the manifest if it is that of an unbounded dataset and not of a local table, else
    None.
    """
    if isinstance(manifest, UnboundedManifest) and manifest.declaration.owner is None:
        return manifest
    return None


def manifest_from_body(body: Mapping[str, Any]) -> DatasetManifest:
    """Return the manifest in a commit's body. Raises pydantic's ValidationError."""
    declared = body.get("declaration")
    if isinstance(declared, Mapping) and declared.get("kind") == UnboundedManifest.kind:
        return UnboundedManifest.model_validate(body)
    return BoundedManifest.model_validate(body)


def parse_manifest(name: str, commit: Commit) -> DatasetManifest:
    """Return the manifest in a dataset's commit. Raises MalformedDocumentError, naming document
    and problem.
    """
    try:
        manifest = manifest_from_body(commit.body)
        if manifest.name != name:
            raise MalformedDocumentError(
                f"it describes the dataset {manifest.name!r}", dataset=manifest.name
            )
    except (ValidationError, AdjunctError) as error:
        raise MalformedDocumentError(
            f"dataset {name!r}: the manifest {commit.manifest_key} can't be read:"
            f" {describe_document_problem(error)}.",
            "Restore that object from a backup; versions committed before it are untouched and can"
            " still be opened by their id.",
            document=commit.manifest_key,
        ) from error
    return manifest


def describe_document_problem(error: ValidationError | AdjunctError) -> str:
    """Return why a stored document can't be read."""
    if isinstance(error, AdjunctError):
        return error.problem.rstrip(".")
    return first_validation_problem(error)


# A dataset follows a repartitioned stream only if it had read all old partitions: then its
# remaining input is the same. Positions made of offsets continue above all stored ones, because the
# offsets of the new partitions restart.

CARRY_ACTION = "carry"


def follow_repartition(manifest: DatasetManifest, info: StreamInfo) -> DatasetManifest | None:
    """Return the manifest at the corresponding position of the repartitioned stream.

    None if the stream was not repartitioned since the dataset read it, or if the dataset had then
    not read all of the old partitions or had unfinished work.
    """
    rewritten = info.repartitioned
    stream = manifest.declaration.input
    if rewritten is None or info.identity is None:
        return None
    if not has_read_all(manifest, rewritten.identity, rewritten.ended):
        return None
    offsets = _by_partition(stream, rewritten.continued_at)
    return _with_input_partitions(
        manifest,
        info.partitions,
        offsets,
        f"{stream} was repartitioned into {info.partitions}: continues where it had read to",
        stream=info.identity,
        positions_from=manifest.positions_from + max(map(int, rewritten.ended), default=0),
        **manifest.fields_after_repartition(offsets),
    )


def follow_added_partitions(manifest: DatasetManifest, info: StreamInfo) -> DatasetManifest | None:
    """Return a bounded dataset's manifest with the partitions that were added to its stream; None
    if none were.

    Added partitions are read from their beginning: a version spans the partitions that the stream
    had when it was marked. Returns None if the stream may have been recreated.
    """
    had = manifest.declaration.input_partitions
    stream = manifest.declaration.input
    if info.identity is None or manifest.stream != info.identity:
        return None
    were_added = 0 < had < info.partitions
    if manifest.versions_are_commits or not were_added:
        return None
    added = {f"{stream}.{p}": FIRST_OFFSET for p in range(had, info.partitions)}
    return _with_input_partitions(
        manifest,
        info.partitions,
        {**manifest.offsets, **added},
        f"{stream} had {had} partitions and has {info.partitions}: those that were added are"
        " read, too",
    )


def _with_input_partitions(
    manifest: DatasetManifest,
    partitions: int,
    offsets: Mapping[str, Offset],
    reason: str,
    **fields: Any,
) -> DatasetManifest:
    """Return the manifest with this number of input partitions, whose next offsets are these."""
    declaration = manifest.declaration.model_copy(update={"input_partitions": partitions})
    change = Change(action=CARRY_ACTION, version=manifest.served_id, reason=reason)
    return manifest.after(declaration=declaration, offsets=offsets, change=change, **fields)


def has_read_all(manifest: DatasetManifest, identity: str, ends: tuple[str, ...]) -> bool:
    """Whether a dataset has read the stream of this identity up to these ends, and has no
    unfinished work.
    """
    if manifest.stream != identity or not manifest.is_settled:
        return False
    return manifest.offsets == _by_partition(manifest.declaration.input, ends)


def _by_partition(stream: str, offsets: Sequence[Offset]) -> dict[str, Offset]:
    """Return the offsets of a stream's partitions, which are in order, as manifests store them."""
    return {f"{stream}.{partition}": offset for partition, offset in enumerate(offsets)}
