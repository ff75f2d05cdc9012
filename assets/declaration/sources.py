"""The inputs of datasets other than streams: folders of files, queries, and the output of an application."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.common import check_name
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.files.formats import FileFormat
from dagster_adjunct.resources.schemas.records import ArrowFrame
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@validated
@dataclass(frozen=True, slots=True)
class FileSource:
    """Versions as folders of files: each folder below `url` with a completion object is one version.

    `url` is a folder, `file:///…` or `s3://BUCKET/PREFIX`. A version has the name of its folder, and versions are in
    the natural order of their names (v2 before v10). A folder without completion object holds back those after it. All
    files in and below a folder are its records, except those named `_…` or `.…`.

    If the completion object is in `url` itself, that folder holds one version after the other, named by the time of
    completion: to replace it, remove the completion object, replace the files, and write the completion object again.

    `complete` is the completion object's name. It is written last. It may be empty, or a JSON object with `rows`, the
    number of records, and `checksum`, as `records_checksum` returns it. `schema` is the schema of the files, checked
    strictly: see resources/files/formats.py for each format.
    """

    url: str
    format: FileFormat
    schema: Schema
    complete: str = "_SUCCESS"

    def __post_init__(self) -> None:
        if not self.url or not self.complete or "/" in self.complete:
            raise ConfigurationError(
                f"files at {self.url!r} are complete with the object {self.complete!r}: "
                "expected a URL and a plain name.",
                "Give the completion object's name within a version's folder.",
                argument="complete",
            )

    def __str__(self) -> str:
        return f"files in {self.url}"


@dataclass(frozen=True, slots=True)
class Computation:
    """What a query computes: the version's name, and the partition if Dagster materializes one."""

    version: str
    partition: str | None


@validated
@dataclass(frozen=True, slots=True)
class QuerySource:
    """Versions computed by a query: each advance runs it and publishes the result if that is new.

    `query` is SQL, in which `{version}` and `{partition}` are replaced by string literals, or a function of the session
    and a Computation that returns a Spark, pandas or Polars frame or an Arrow table. `schema` is the schema of the
    result, checked strictly. Without Spark it must be a function, which gets IN_PROCESS instead of a session and
    returns no Spark frame.
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
    """The input of a local table: what the batches of one application send. `schema` are its columns.

    `expires` is the timestamp column of a state table after which a row is expired, None if rows never expire.
    `kept_for` describes the operator's purpose for a state table.
    """

    application: str
    schema: Schema
    expires: str | None = None
    kept_for: str = ""

    def __str__(self) -> str:
        return f"application {self.application}"


Input = str | FileSource | QuerySource | OwnedBy
