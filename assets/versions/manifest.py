"""What a dataset's commit holds: its declaration, its current version, how far its input was read.

The body of each commit below `datasets/<name>` is one `DatasetManifest`. Offsets stand in the same document
as the version that was made from them, so there is no second place to disagree with.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AwareDatetime,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.resources.bucketing.files import BucketLayout, Generation
from dagster_adjunct.resources.errors import AdjunctError, MalformedDocumentError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.stored_documents import StoredDocument, first_problem

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.following import DeltaCompaction
    from dagster_adjunct.resources.objects.commit import Commit

KIND = "dataset"
_RANGES = 200
# Ids of startpoints: one is written again soon or in vain, so few others can have come between.
_REMEMBERED = 20
POSITION = "__position"
TOMBSTONE = "__tombstone"
FACTS_KEPT = 100
NAMES_KEPT = 10_000


def _schema(value: Any) -> Any:
    return value if isinstance(value, Schema) else Schema.from_json(value)


def _generation(value: Any) -> Any:
    return value if isinstance(value, Generation) else Generation.from_json(value)


StoredSchema = Annotated[Schema, BeforeValidator(_schema), PlainSerializer(Schema.to_json)]
StoredGeneration = Annotated[Generation, BeforeValidator(_generation), PlainSerializer(Generation.to_json)]
Offset = Annotated[str, Field(min_length=1)]
# One alone is how earlier manifests hold them.
AppliedIds = Annotated[tuple[str, ...], BeforeValidator(lambda found: (found,) if isinstance(found, str) else found)]


class _Document(StoredDocument):
    # The schema's columns are called `schema` everywhere else; pydantic's own method of that name is deprecated.
    model_config = ConfigDict(arbitrary_types_allowed=True)


class Declaration(_Document):
    """What must not change while a dataset's entries live: read back to refuse a changed declaration by name.

    `partitions` None is a broadcast copy. `columns` are what new versions store, None for all of the input's.
    `input_partitions` is how many partitions the input had when the dataset was made (0: files or a query).
    `order` says whether versions follow each other as they arrive, or by name (version partitions). `keep` and
    `grace_seconds` are the discard policy; of an unbounded dataset `compact_…` are the compaction policy, and
    `keep_tombstones` is how far below the newest position deletions are remembered. Order and policies may change:
    they are those of the last advance.
    """

    kind: Literal["bounded", "unbounded"]
    input: str
    key: tuple[str, ...] = Field(min_length=1)
    key_types: tuple[str, ...]
    partition_by: tuple[str, ...]
    partitions: int | None = Field(default=None, ge=1)
    input_partitions: int = Field(ge=0)
    columns: tuple[str, ...] | None = None
    bootstrap: bool = True
    order: Literal["arrival", "name"] = "arrival"
    keep: int | None = Field(default=3, ge=1)
    grace_seconds: float = Field(default=86_400.0, ge=0)
    keep_tombstones: int | None = Field(default=None, ge=0)
    compact_deltas: int = Field(default=8, ge=2)
    compact_fraction: float = Field(default=0.2, gt=0)
    compact_rows: int = Field(default=2_000_000, ge=1)

    @property
    def discard(self) -> DiscardPolicy:
        """The discard policy that was declared last."""
        return DiscardPolicy(self.keep, timedelta(seconds=self.grace_seconds))

    @property
    def compaction(self) -> DeltaCompaction:
        """The compaction policy that was declared last."""
        from dagster_adjunct.assets.declaration.following import DeltaCompaction

        return DeltaCompaction(self.compact_deltas, self.compact_fraction, self.compact_rows)


class MarkerFacts(_Document):
    """What one marker said: rows before it and a checksum, where it gave them.

    A marker is a partition's end-of-dataset marker, or the completion object of a folder of files (offset 0). Where a
    stream's marker gave no rows, they are those that were counted. Of a folder, `checksum` is of the completion object,
    `completed` is when that was written, and `contents` is of the data files' names and contents. `listing` tells these
    files from others without reading them: a copy has another one.
    """

    offset: int
    rows: int | None = None
    checksum: str | None = None
    listing: str | None = None
    contents: str | None = None
    completed: AwareDatetime | None = None


class Verdict(_Document):
    """What one validator said of a version. `severity` "warn" never refuses one."""

    name: str
    passed: bool
    severity: Literal["error", "warn"] = "error"
    message: str = ""
    facts: dict[str, Any] = Field(default_factory=dict)


class SealedVersion(_Document):
    """One version: everything that is needed to read it, and where it came from.

    A bounded version has one generation and the name that its markers gave it. An unbounded one has a base
    and the deltas after it, oldest first. `rows` is exact, and None where deltas have to be merged to know.
    `digest` is the sum of the rows' hashes modulo 2**64. `offsets` are the ranges [start, end) of the input
    that this version took in, by stream partition. `positioned` says that rows carry their position: their input
    offset or, with `order_by`, that column's value.
    """

    id: str = Field(pattern=r"^v\d{6,}-[A-Za-z0-9][A-Za-z0-9_-]*$")
    number: int = Field(ge=1)
    name: str | None
    sealed_at: AwareDatetime
    columns: StoredSchema
    key: tuple[str, ...] = Field(min_length=1)
    partition_by: tuple[str, ...]
    partitions: int | None = Field(default=None, ge=1)
    positioned: bool
    order_by: str | None = None
    generations: tuple[StoredGeneration, ...] = Field(min_length=1)
    rows: int | None = Field(default=None, ge=0)
    digest: int | None = None
    offsets: dict[str, tuple[Offset, Offset]]
    counters: dict[str, int] = Field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        missing = [name for name in (*self.key, *self.partition_by) if name not in self.columns.names]
        if missing:
            raise ValueError(f"key column {missing[0]!r} is not among the columns {', '.join(self.columns.names)}")
        ids = [generation.id for generation in self.generations]
        if ids != sorted(set(ids)):
            raise ValueError(f"generations are numbered {ids}: expected rising numbers")
        for generation in self.generations:
            buckets = [file.bucket for file in generation.files]
            if len(set(buckets)) != len(buckets) or any(not 0 <= b < self.layout.partitions for b in buckets):
                raise ValueError(
                    f"generation {generation.id} has files for buckets {buckets}: expected each of "
                    f"0 to {self.layout.partitions - 1} at most once"
                )
        return self

    @property
    def layout(self) -> BucketLayout:
        """How the rows lie in files; a broadcast copy is one file."""
        return layout_of(self.columns, self.key, self.partition_by, self.partitions, self.positioned)

    @property
    def stored_rows(self) -> int:
        """Rows in all files, superseded ones and tombstones of deltas included."""
        return sum(generation.rows for generation in self.generations)


def layout_of(
    columns: Schema, key: tuple[str, ...], partition_by: tuple[str, ...], partitions: int | None, positioned: bool
) -> BucketLayout:
    """Return how a version's rows lie in files; `partitions` None is one file."""
    hidden = ((POSITION, "bigint"), (TOMBSTONE, "boolean")) if positioned else ()
    return BucketLayout(columns, partition_by, partitions or 1, key, hidden)


class VersionRef(_Document):
    """A version that is retained: enough to list it, to find its document, and to know which files it needs.

    `document` is the object that holds its SealedVersion, None for a version that was refused before it was
    built. `folders` are those of its generations. `reason` says why it was rejected, withdrawn or forced.
    `replaced` is the version that the switch (or force) that made this one the head took the place of.
    """

    id: str
    number: int
    name: str | None
    rows: int | None
    sealed_at: AwareDatetime
    state: Literal["sealed", "rejected", "withdrawn"] = "sealed"
    document: str | None
    folders: tuple[str, ...] = ()
    bytes: int = 0
    reason: str = ""
    verdicts: tuple[Verdict, ...] = ()
    replaced: str | None = None


class Pin(_Document):
    """Holds readers at a version, whatever seals meanwhile, until it is taken away or `expires_at` has passed."""

    version: str
    reason: str
    by: str
    at: AwareDatetime
    expires_at: AwareDatetime | None = None


class Change(_Document):
    """What one commit did to which version, and why; by whom and when stands in the commit."""

    action: str
    version: str | None = None
    reason: str = ""


class Awaited(_Document):
    """The version that some markers have been seen of, the markers that are missing, and since when."""

    version: str | None
    missing: tuple[str, ...]
    since: AwareDatetime


class Delivered(_Document):
    """A version that was delivered whole: its name, its markers, and the sealed version that holds its content.

    A delivery whose content equals the version before it is held by that one. `freed` is set where its version was
    rejected and then dropped, to the time of the rejection: what is delivered under its name now is a new version.
    """

    name: str
    version: str
    markers: dict[str, MarkerFacts]
    freed: AwareDatetime | None = None


class Abandoned(_Document):
    """A version that an operator ended: its markers close nothing, and the records before them are dropped."""

    name: str
    reason: str
    by: str
    at: AwareDatetime


class Lost(_Document):
    """What retention took of the stream before it was read: the offsets, by partition, and whose they were.

    `versions` are those that had markers left; of others that ended there nothing is known any more.
    """

    versions: tuple[str, ...]
    ranges: dict[str, tuple[Offset, Offset]]
    at: AwareDatetime

    def summary(self) -> str:
        """Return it as a sentence without its period."""
        said = [f"offsets {start} to {int(end) - 1} of {ssp}" for ssp, (start, end) in self.ranges.items()]
        told = f"{', '.join(said[:3])}{f' and of {len(said) - 3} more partitions' if len(said) > 3 else ''}"
        named = ", ".join(map(repr, self.versions))
        lost = f"not whole any more, and left out: {named}" if named else "versions that ended there are lost"
        return f"retention took {told} before they were read; {lost}"


class Bootstrap(_Document):
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


class Retired(_Document):
    """A generation that a compaction or rebuild replaced; versions before number `until` still read it."""

    generation: int
    folder: str
    until: int
    at: AwareDatetime


class Decision(_Document):
    """What was decided about a change stream's table when a run began, and why (the recovery table)."""

    action: Literal["create", "bootstrap", "recreate", "continue", "serve-stale"]
    store: Literal["none", "building", "invalid", "valid"]
    reason: str
    at: AwareDatetime


class DatasetManifest(_Document):
    """The whole state of a dataset at one commit.

    `offsets` is the next offset to read of each input partition ({} for files and queries). `version` is what
    is served: the pinned version, else `head`, the one that the last switch chose. `versions` lists all
    retained versions of a bounded dataset by number; an unbounded one has a version a commit, found by its
    number. `delivered` remembers the newest deliveries and `known` the names of older ones, so that a marker
    that comes again is known. `doomed` are the folders and documents that are being deleted: nobody may begin
    to use them.

    `stream` is the identity of the stream that it was read from; `lost` is what retention took of that before it was
    read, newest last.

    Of an unbounded dataset only: `retired` are the
    generations that its current version does not read any more and earlier ones do; versions before number
    `retained_from` are gone. `confirmed_at` is when all changes up to the stream's end were last known to be in.
    Changes at or below `horizon` come too late (ordering columns only). `quarantining` are the ranges whose bad
    changes are on their way to the dead letters: they are read again as they are. `applied` are the ids of the
    startpoints that were applied last, by stream partition, newest last. `decision` is the last decision about
    recovery. `numbers` are those of its versions so far, as ranges (first, last), newest last. `positions_from` is
    added to offsets to make positions: where its stream was repartitioned offsets began anew, and what comes must win.
    """

    format: Literal[1] = 1
    name: str
    declaration: Declaration
    version: SealedVersion | None = None
    head: str | None = None
    pin: Pin | None = None
    versions: tuple[VersionRef, ...] = ()
    delivered: tuple[Delivered, ...] = ()
    known: tuple[str, ...] = ()
    abandoned: tuple[Abandoned, ...] = ()
    awaited: Awaited | None = None
    doomed: tuple[str, ...] = ()
    lost: tuple[Lost, ...] = ()
    stream: str | None = None
    offsets: dict[str, Offset]
    bootstrap: Bootstrap | None = None
    retired: tuple[Retired, ...] = ()
    retained_from: int = Field(default=1, ge=1)
    confirmed_at: AwareDatetime | None = None
    horizon: int | None = None
    positions_from: int = Field(default=0, ge=0)
    quarantining: dict[str, tuple[Offset, Offset]] | None = None
    applied: dict[str, AppliedIds] = Field(default_factory=dict)
    decision: Decision | None = None
    next_number: int = Field(default=1, ge=1)
    next_generation: int = Field(default=1, ge=1)
    counters: dict[str, int] = Field(default_factory=dict)
    change: Change | None = None
    numbers: tuple[tuple[int, int], ...] = ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len(self.offsets) != self.declaration.input_partitions:
            raise ValueError(
                f"offsets stand for {len(self.offsets)} partitions of {self.declaration.input}: expected "
                f"{self.declaration.input_partitions}"
            )
        if (self.bootstrap is None) != (self.declaration.kind == "bounded"):
            raise ValueError(f"a {self.declaration.kind} dataset has bootstrap {self.bootstrap!r}")
        if self.declaration.kind == "bounded":
            self._check_served()
        version = self.version
        if version and any(generation.id >= self.next_generation for generation in version.generations):
            raise ValueError(f"next_generation is {self.next_generation}, which the current version uses")
        return self

    def _check_served(self) -> None:
        sealed = {ref.id for ref in self.versions if ref.state == "sealed"}
        wanted = self.pin.version if self.pin else self.head
        served = self.version.id if self.version else None
        if served != wanted:
            raise ValueError(f"the version served is {served}, and {wanted} is pinned or chosen")
        for named in {served, self.head} - {None}:
            if named not in sealed:
                raise ValueError(f"the version {named} is not among the retained, sealed versions")

    def ref(self, version_id: str) -> VersionRef | None:
        """Return the retained version of this id."""
        return next((ref for ref in self.versions if ref.id == version_id), None)

    @property
    def taken(self) -> set[str]:
        """The names of the versions that were delivered: what comes under one of them again is a re-delivery."""
        return {*self.known, *(done.name for done in self.delivered if done.freed is None)}

    def body(self) -> dict[str, Any]:
        """Return the manifest as the JSON-able body of a commit."""
        return self.model_dump(mode="json")

    def has_applied(self, ssp: str, startpoint_id: str) -> bool:
        """Whether a commit has applied this startpoint of a partition: it is applied once, whatever came between."""
        return startpoint_id in self.applied.get(ssp, ())

    def with_applied(self, ids: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
        """Return `applied` as it is after a commit that applies these startpoints (id by partition)."""
        newest = {ssp: (*self.applied.get(ssp, ()), each)[-_REMEMBERED:] for ssp, each in ids.items()}
        return {**self.applied, **newest}

    def after(self, **changes: Any) -> DatasetManifest:
        """Return this manifest with some fields replaced, checked again as a whole."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        before, version = self.version, changes.get("version")
        if self.declaration.kind == "unbounded" and version and (before is None or before.number != version.number):
            fields["numbers"] = _numbered(self.numbers, version.number)
        return DatasetManifest(**{**fields, **changes})


def _numbered(numbers: tuple[tuple[int, int], ...], number: int) -> tuple[tuple[int, int], ...]:
    """Return the numbers of versions, as ranges, with the newest one's; of long histories the newest ranges only."""
    first = numbers[-1][0] if numbers and numbers[-1][1] + 1 == number else number
    return (*(each for each in numbers if each[0] != first), (first, number))[-_RANGES:]


def version_number(version: str) -> int:
    """Return the number in a version's id: an unbounded dataset's commit; 0 for what is no id."""
    digits = version.removeprefix("v").partition("-")[0]
    return int(digits) if version.startswith("v") and digits.isascii() and digits.isdecimal() else 0


def parse_manifest(name: str, commit: Commit) -> DatasetManifest:
    """Return the manifest in a dataset's commit, or raise MalformedDocumentError saying what is wrong where."""
    try:
        manifest = DatasetManifest.model_validate(commit.body)
        if manifest.name != name:
            raise MalformedDocumentError(f"it describes the dataset {manifest.name!r}")
    except (ValidationError, AdjunctError) as error:
        raise MalformedDocumentError(
            f"dataset {name!r}: the manifest {commit.manifest_key} can't be read: {problem_with_document(error)}.",
            "Restore that object from a backup; versions committed before it are untouched and can still be "
            "opened by their id.",
        ) from error
    return manifest


def problem_with_document(error: ValidationError | AdjunctError) -> str:
    """Return in words why a stored document can't be read."""
    return error.problem.rstrip(".") if isinstance(error, AdjunctError) else first_problem(error)
