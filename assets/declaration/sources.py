"""What a dataset can be made from besides a stream: folders of files, queries, and what one application sends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.common import check_name
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.files.formats import FileFormat
from dagster_adjunct.resources.schemas.records import ArrowFrame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.resources.schemas.schema import Schema


@dataclass(frozen=True, slots=True)
class FileSource:
    """Versions as folders of files: each folder below `url` that holds the completion object is one version.

    `url` is a folder, `file:///…` or `s3://BUCKET/PREFIX`; a folder's name is its version's, and versions follow each
    other in the natural order of their names (v2 before v10). A folder without completion object holds back those
    after it. All files in a folder and below are its records, without those called `_…` or `.…`.

    Where the completion object lies in `url` itself, that folder is one version after another, written in place and
    named by when it was completed: remove the completion object, replace the files, write it again.

    `complete` is the completion object's name. It is written last; it may be empty, or a JSON object with `rows`, the
    number of records, and `checksum`, as `records_checksum` gives it. `schema` is what the files hold, checked
    strictly: see resources/files/formats.py for what each format may look like.
    """

    url: str
    format: FileFormat
    schema: Schema
    complete: str = "_SUCCESS"

    def __post_init__(self) -> None:
        if self.format not in ("parquet", "csv", "jsonl"):
            raise ConfigurationError(
                f"files at {self.url!r} have format {self.format!r}: expected parquet, csv or jsonl.",
                "Choose one.",
                argument="format",
            )
        if not self.url or not self.complete or "/" in self.complete:
            raise ConfigurationError(
                f"files at {self.url!r} are complete with the object {self.complete!r}: "
                "expected a URL and a plain name.",
                "Name the completion object as it lies in a version's folder.",
                argument="complete",
            )

    def __str__(self) -> str:
        return f"files in {self.url}"


@dataclass(frozen=True, slots=True)
class Computation:
    """What a query is asked for: the version's name, and the partition where Dagster materialises one."""

    version: str
    partition: str | None


@dataclass(frozen=True, slots=True)
class QuerySource:
    """Versions computed by Spark: each advance runs the query and publishes what it gives, if that is new.

    `query` is SQL, in which `{version}` and `{partition}` stand as quoted texts, or a function of the session
    and a Computation that returns a frame of Spark, pandas or Polars, or an Arrow table. `schema` is what it returns,
    checked strictly. Without Spark it has to be a function, which gets IN_PROCESS instead of a session, and returns
    another than Spark's frames.
    """

    query: str | Callable[[Any, Computation], DataFrame | ArrowFrame]
    schema: Schema
    name: str = "query"

    def __post_init__(self) -> None:
        check_name("query", self.name)

    def __str__(self) -> str:
        return f"query {self.name}"


@dataclass(frozen=True, slots=True)
class OwnedBy:
    """What the batches of one application send: the input of a local table, whose columns are `schema`.

    `expires` is the column, a timestamp, of a table of state that says when a row is gone; None where none ever is.
    `kept_for` says what an operator keeps it for, in words.
    """

    application: str
    schema: Schema
    expires: str | None = None
    kept_for: str = ""

    def __str__(self) -> str:
        return f"application {self.application}"


Input = str | FileSource | QuerySource | OwnedBy
