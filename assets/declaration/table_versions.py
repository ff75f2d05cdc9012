"""Versions of a bounded dataset that are states of an Iceberg or a Delta table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.files.tree import check_folder_url
from dagster_adjunct.resources.iceberg import IcebergTable
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.table_snapshots.delta import DeltaVersions as DeltaStates
from dagster_adjunct.resources.table_snapshots.iceberg import IcebergSnapshots
from dagster_adjunct.resources.validation import validated

Take = Literal["all", "newest"]
OnExpired = Literal["fail", "skip"]


@validated
@dataclass(frozen=True, slots=True)
class IcebergVersions:
    """Versions as snapshots of an Iceberg table, or as its tags.

    With `tags`, a pattern such as "v*" or "*", each tag is a version of its name, in the order of
    their snapshots; a tag that is moved later does not change what was published. Without it, each
    snapshot of the branch main is a version named by its id, except those that only rewrite files
    ("all"), or the newest one at each advance ("newest").

    `on_expired` says what happens if snapshots expired before they were versions, or another table
    has the name now: an error, or the dataset goes on with those that there are. `schema` are the
    columns to read, by the names that the table has now; they may be fewer than the table's. A
    snapshot without rows rejects the version, unless `allow_empty`. A version is valid from the
    time of its commit (valid_from="marker").
    """

    table: IcebergTable
    schema: Schema
    tags: str | None = None
    take: Take = "all"
    on_expired: OnExpired = "fail"
    allow_empty: bool = False

    def __post_init__(self) -> None:
        if self.tags is not None and (not self.tags or self.take != "all"):
            raise argument_error(
                f"IcebergVersions has tags={self.tags!r} and take={self.take!r}",
                'a pattern of the names of tags, such as "v*", and take="all"',
                argument="tags",
            )

    def __str__(self) -> str:
        return f"Iceberg table {self.table.identifier} of catalogue {self.table.catalog}"

    def open(self) -> IcebergSnapshots:
        """Return the table."""
        return IcebergSnapshots(self.table)


@validated
@dataclass(frozen=True, slots=True)
class DeltaVersions:
    """Versions of a dataset as versions of the Delta table at `url`, a folder or
    `s3://BUCKET/PREFIX`, each named by its number.

    Each version of the table is one, except those that change no row ("all"), or the newest one at
    each advance ("newest"). For the other arguments see IcebergVersions.
    """

    url: str
    schema: Schema
    take: Take = "all"
    on_expired: OnExpired = "fail"
    allow_empty: bool = False

    def __post_init__(self) -> None:
        if not self.url:
            raise argument_error(
                f"DeltaVersions has url={self.url!r}",
                "a folder, file:///… or s3://BUCKET/PREFIX",
                argument="url",
            )
        check_folder_url(self.url)

    @property
    def tags(self) -> None:
        """Delta tables have no tags."""
        return

    def __str__(self) -> str:
        return f"Delta table {self.url}"

    def open(self) -> DeltaStates:
        """Return the table."""
        return DeltaStates(self.url)


TableVersions = IcebergVersions | DeltaVersions
