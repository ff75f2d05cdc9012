"""A sealed version: everything that is needed to read it, what validators said of it, and how it is listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import AwareDatetime, Field, model_validator

from dagster_adjunct.assets.declaration.changes.change_order import PositionType
from dagster_adjunct.assets.versions.document_base import ManifestPart, Offset, StoredGeneration, StoredSchema
from dagster_adjunct.assets.versions.kept_history import HISTORY, TOLD, VALID_FROM, KeptHistory, newest_valid_from
from dagster_adjunct.resources.bucketing.bucket_files import BucketLayout
from dagster_adjunct.resources.schemas.schema import Schema

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.resources.bucketing.bucket_files import Generation

POSITION = "__position"
TOMBSTONE = "__tombstone"


class Verdict(ManifestPart):
    """What one validator said of a version. `severity` "warn" never refuses one."""

    name: str
    passed: bool
    severity: Literal["error", "warn"] = "error"
    message: str = ""
    facts: dict[str, Any] = Field(default_factory=dict)
    without_values: str = Field(default="", exclude=True)  # the message as it is where values are not to be told


class SealedVersion(ManifestPart):
    """One version: everything that is needed to read it, and where it came from.

    A bounded version has one generation and the name that its markers gave it. An unbounded one has a base
    and the deltas after it, oldest first. `rows` is exact, and None where deltas have to be merged to know.
    `digest` is the sum of the rows' hashes modulo 2**64. `offsets` are the ranges [start, end) of the input
    that this version took in, by stream partition. `positioned` says that rows carry their position: their input
    offset or what `order_by` names, of the type `position_type`. `history` says that its rows are over time: of each
    key those of all times, told apart by `__valid_from`.
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
    order_by: tuple[str, ...] | None = None
    position_type: PositionType = "bigint"
    history: KeptHistory | None = None
    generations: tuple[StoredGeneration, ...] = Field(min_length=1)
    rows: int | None = Field(default=None, ge=0)
    digest: int | None = None
    offsets: dict[str, tuple[Offset, Offset]]
    counters: dict[str, int] = Field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()
    valid_from: AwareDatetime | None = None

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
        over_time = self.history is not None
        return layout_of(
            self.columns,
            self.key,
            self.partition_by,
            self.partitions,
            self.positioned,
            over_time,
            position_type=self.position_type,
        )

    @property
    def edge(self) -> int | None:
        """The earliest moment that a history is exact for, in microseconds since the epoch; None: there is none."""
        return None if self.history is None else self.history.edge(newest_valid_from(self.generations))

    @property
    def lacks_base(self) -> bool:
        """Whether the only rows are a delta's, which do not say what counts: an erasure left none of those below."""
        left = [generation for generation in self.generations if generation.files]
        if len(left) != 1:
            return False
        if self.history is not None:
            return any(file.stats.get(TOLD) is False for file in left[0].files)
        return self.rows is None and self.order_by is None

    @property
    def stored_rows(self) -> int:
        """Rows in all files, superseded ones and tombstones of deltas included."""
        return sum(generation.rows for generation in self.generations)


def layout_of(
    columns: Schema,
    key: tuple[str, ...],
    partition_by: tuple[str, ...],
    partitions: int | None,
    positioned: bool,
    over_time: bool = False,
    *,
    position_type: PositionType = "bigint",
) -> BucketLayout:
    """Return how a version's rows lie in files; `partitions` None is one file.

    Rows over time are unique by key and `__valid_from`, and sorted by them.
    """
    hidden = ((POSITION, position_type), (TOMBSTONE, "boolean")) if positioned else ()
    if over_time:
        return BucketLayout(columns, partition_by, partitions or 1, (*key, VALID_FROM), (*hidden, *HISTORY))
    return BucketLayout(columns, partition_by, partitions or 1, key, hidden)


def table_version(
    spec: AdjunctDataset,
    columns: Schema,
    generations: Sequence[Generation],
    *,
    id: str,
    number: int,
    now: datetime,
    rows: int | None,
    offsets: Mapping[str, tuple[str, str]],
    counters: Mapping[str, int],
    history: KeptHistory | None = None,
    position_type: PositionType = "bigint",
) -> SealedVersion:
    """Return a version of a table as it is declared: of these generations, oldest first, with a position in a row."""
    return SealedVersion(
        id=id,
        number=number,
        name=None,
        sealed_at=now,
        columns=columns,
        key=spec.key,
        partition_by=spec.partition_by,
        partitions=spec.partitions,
        positioned=True,
        order_by=spec.following.order,
        position_type=position_type,
        history=history,
        generations=tuple(generations),
        rows=rows,
        offsets=dict(offsets),
        counters=dict(counters),
    )


class VersionRef(ManifestPart):
    """A version that is retained: enough to list it, to find its document, and to know which files it needs.

    `document` is the object that holds its SealedVersion, None for a version that was refused before it was
    built. `folders` are those of its generations. `reason` says why it was rejected, withdrawn or forced.
    `replaced` is the version that the switch (or force) that made this one the head took the place of. `valid_from`
    is since when its entries are valid, where its dataset declares what tells that.
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
    valid_from: AwareDatetime | None = None


def version_id(number: int, attempt: str) -> str:
    """Return the id of a version: its number, and the attempt that made it; of a table these are its commit's."""
    return f"v{number:06d}-{attempt}"


def version_number(version: str) -> int:
    """Return the number in a version's id: an unbounded dataset's commit; 0 for what is no id."""
    digits = version.removeprefix("v").partition("-")[0]
    return int(digits) if version.startswith("v") and digits.isascii() and digits.isdecimal() else 0
