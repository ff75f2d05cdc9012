"""The stored files of a version: their bytes, rows and nulls, and whether they are those that its
manifest lists.

`verify_version` compares size and SHA-256, and finds objects that are not listed. With `deep` it
also reads the contents: the row count, the columns, and keys that are sorted, unique, in the listed
range and in their bucket. Nothing here needs Spark.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_adjunct.assets.versions.version import SealedVersion
from dagster_adjunct.resources.bucketing.files import (
    BucketFile,
    BucketLayout,
    columns_problem,
    conform_to_layout,
)
from dagster_adjunct.resources.errors import ManifestMismatchError, ObjectNotFoundError
from dagster_adjunct.resources.lazy_modules import np, pa, pc, pq
from dagster_adjunct.resources.objects.arrow_files import open_bytes, open_object
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.reports import to_json_value
from dagster_adjunct.resources.threads import map_in_threads

if TYPE_CHECKING:
    from dagster_adjunct.assets.reading.version_reader import VersionReader

T = TypeVar("T")
_CHUNK = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A Parquet file that the manifest of a version lists. `what` names the dataset and version
    in errors.
    """

    store: ObjectStore
    what: str
    folder: str
    file: BucketFile

    @property
    def key(self) -> str:
        """The object's key."""
        return f"{self.folder}/{self.file.name}"

    def sha256(self) -> str:
        """Return the SHA-256 of as many bytes as the manifest lists, read in ranges. Raises
        ObjectNotFoundError.
        """
        digest = hashlib.sha256()
        for start in range(0, self.file.size, _CHUNK):
            digest.update(
                self.store.get_range(self.key, start, min(_CHUNK, self.file.size - start))
            )
        return digest.hexdigest()

    def open(self) -> pq.ParquetFile:
        """Return the opened Parquet file. Raises ManifestMismatchError where it is missing or
        unreadable.
        """
        return self.reading(
            lambda: pq.ParquetFile(
                open_object(self.store, self.key, self.file.size),
                page_checksum_verification=True,
                pre_buffer=True,
            )
        )

    def row_groups(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the rows of the file, a row group at a time. Raises ManifestMismatchError."""
        file = self.open()
        for group in range(file.num_row_groups):
            yield self.reading(partial(file.read_row_group, group, columns=columns))

    def reading(self, read: Callable[[], T]) -> T:
        """Return `read()`, with errors about a missing or damaged file raised as
        ManifestMismatchError.
        """
        try:
            return read()
        except ObjectNotFoundError as error:
            raise self.damaged("it is missing") from error
        except (pa.ArrowException, OSError) as error:
            raise self.damaged(f"it can't be read: {str(error).partition(chr(10))[0]}") from error

    def damaged(self, problem: str) -> ManifestMismatchError:
        return ManifestMismatchError(
            f"{self.what}: the manifest lists {self.key} with {self.file.rows} rows in"
            f" {self.file.size} bytes, and {problem}.",
            "Restore that object from a backup (its SHA-256 is in the manifest), or open an earlier"
            " version; other versions are untouched.",
            key=self.key,
        )


def list_stored_files(store: ObjectStore, dataset: str, sealed: SealedVersion) -> list[StoredFile]:
    """Return all files of a version, as the manifest lists them; makes no request."""
    what = f"dataset {dataset!r}, version {sealed.id}"
    return [
        StoredFile(store, what, generation.folder, file)
        for generation in sealed.generations
        for file in generation.files
    ]


def count_nulls(files: Sequence[StoredFile], columns: Sequence[str]) -> dict[str, int]:
    """Return the number of nulls in each of these columns, over all files.

    They come from the statistics in the footers; row groups without statistics are read.
    """
    nulls = dict.fromkeys(columns, 0)
    for stored in files:
        file = stored.open()
        metadata = file.metadata
        places = {
            metadata.schema.column(index).path: index for index in range(metadata.num_columns)
        }
        for group, name in product(range(metadata.num_row_groups), columns):
            statistics = metadata.row_group(group).column(places[name]).statistics
            if statistics is None or not statistics.has_null_count:
                rows = stored.reading(partial(file.read_row_group, group, columns=[name]))
                nulls[name] += rows.column(0).null_count
            else:
                nulls[name] += statistics.null_count
    return nulls


def read_stored_file(stored: StoredFile, layout: BucketLayout, *, threads: bool = True) -> pa.Table:
    """Return all rows of a file with the columns of the layout, in one request. Raises
    ManifestMismatchError.
    """

    def read() -> pa.Table:
        file = pq.ParquetFile(open_bytes(stored.store.get(stored.key).data))
        if file.metadata.num_rows != stored.file.rows:
            raise stored.damaged(f"it has {file.metadata.num_rows} rows")
        if problem := columns_problem(file.schema_arrow, layout):
            raise stored.damaged(problem)
        return conform_to_layout(file.read(use_threads=threads).replace_schema_metadata(), layout)

    return stored.reading(read)


@dataclass(frozen=True, slots=True)
class Damage:
    """A stored object that differs from the manifest, and how."""

    object: str
    problem: str

    def __str__(self) -> str:
        return f"{self.object}: {self.problem}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of verifying one version. `objects`, `rows` and `bytes` are those that the
    manifest lists.
    """

    dataset: str
    version: str
    deep: bool
    objects: int
    rows: int
    bytes: int
    damaged: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        """Whether every object is as the manifest lists it."""
        return not self.damaged

    def summary(self) -> str:
        """Return the outcome in one line, for logs."""
        first = "; ".join(map(str, self.damaged[:3]))
        outcome = "all as listed" if self.ok else f"{len(self.damaged)} damaged: {first}"
        size = f"{self.objects:,} objects, {self.bytes:,} bytes"
        return f"dataset {self.dataset}, version {self.version}: {size}, {outcome}"

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        return asdict(self) | {
            "damaged": [asdict(damage) for damage in self.damaged],
            "ok": self.ok,
        }


def verify_version(view: VersionReader, *, deep: bool = False) -> VerifyReport:
    """Read all objects of a version; report which are missing, damaged or unlisted, without raising
    for these.

    Reads all bytes once, in ranges and several objects at a time; with `deep` the key columns once
    more.
    """
    files = list_stored_files(view.store, view.dataset, view.sealed)
    check = partial(_verify_file, layout=view.sealed.layout, deep=deep)
    damaged = [damage for damages in map_in_threads(check, files) for damage in damages]
    damaged += _unlisted_objects(view, {stored.key for stored in files})
    return VerifyReport(
        dataset=view.dataset,
        version=view.version,
        deep=deep,
        objects=len(files),
        rows=sum(stored.file.rows for stored in files),
        bytes=sum(stored.file.size for stored in files),
        damaged=tuple(damaged),
    )


def _unlisted_objects(view: VersionReader, listed: set[str]) -> Iterator[Damage]:
    """Yield objects in the version's folders that the manifest does not list: Spark can't read a
    folder with them.

    Objects whose names begin with "_" are left out, as Spark skips them.
    """
    for folder in sorted({generation.folder for generation in view.sealed.generations}):
        for item in view.store.list(f"{folder}/"):
            if item.key not in listed and not item.key.rpartition("/")[2].startswith("_"):
                yield Damage(
                    item.key,
                    "the manifest does not list it; Spark can't read the version while it exists",
                )


def _verify_file(stored: StoredFile, *, layout: BucketLayout, deep: bool) -> list[Damage]:
    file = stored.file
    info = stored.store.head(stored.key)
    if info is None:
        return [Damage(stored.key, "it is missing")]
    if info.size != file.size:
        return [Damage(stored.key, f"it has {info.size:,} bytes, the manifest lists {file.size:,}")]
    try:
        sha256 = stored.sha256()
    except ObjectNotFoundError:
        return [Damage(stored.key, "it is missing")]
    if sha256 != file.sha256:
        return [Damage(stored.key, f"its SHA-256 is {sha256}, the manifest lists {file.sha256}")]
    if not deep:
        return []
    try:
        return [Damage(stored.key, problem) for problem in _content_problems(stored, layout)]
    except ManifestMismatchError as error:
        return [Damage(stored.key, error.problem)]


def _content_problems(stored: StoredFile, layout: BucketLayout) -> list[str]:
    opened = stored.open()
    file = stored.file
    if opened.metadata.num_rows != file.rows:
        return [f"it has {opened.metadata.num_rows:,} rows, the manifest lists {file.rows:,}"]
    if problem := columns_problem(opened.schema_arrow, layout):
        return [problem]
    if not layout.key:
        return []
    last: pa.Table | None = None
    first: list[Any] | None = None
    for group in range(opened.num_row_groups):
        keys = stored.reading(partial(opened.read_row_group, group, columns=list(layout.key)))
        first = first or _encoded_key(keys, layout.key, 0)
        problem = _bucket_problem(keys, layout, file.bucket)
        joined = keys if last is None else pa.concat_tables([last, keys])
        problem = problem or _order_problem(joined, layout.key)
        if problem:
            return [f"row group {group}: {problem}"]
        last = keys.slice(keys.num_rows - 1)
    greatest = None if last is None else _encoded_key(last, layout.key, 0)
    if (first, greatest) != (file.min_key, file.max_key):
        return [
            f"its keys go from {first} to {greatest}, the manifest lists {file.min_key} to"
            f" {file.max_key}"
        ]
    return []


def _encoded_key(table: pa.Table, key: Sequence[str], row: int) -> list[Any]:
    return [to_json_value(table.column(name)[row].as_py()) for name in key]


def _bucket_problem(keys: pa.Table, layout: BucketLayout, bucket: int) -> str:
    if not layout.bucket_by:
        return ""

    from dagster_adjunct.resources.bucketing.hashing import assign_buckets

    by_row = assign_buckets([keys.column(name) for name in layout.bucket_by], layout.partitions)
    wrong = np.nonzero(by_row != bucket)[0]
    if not wrong.size:
        return ""
    key = _encoded_key(keys, layout.key, int(wrong[0]))
    return (
        f"{wrong.size:,} keys belong to another bucket, such as {key}, of bucket"
        f" {by_row[wrong[0]]} (file: {bucket})"
    )


def _order_problem(keys: pa.Table, key: Sequence[str]) -> str:
    """Return in words where the keys are not strictly ascending, "" if they are."""
    count = keys.num_rows - 1
    if count < 1:
        return ""
    rises = equal = None
    for name in key:
        before = keys.column(name).slice(0, count)
        after = keys.column(name).slice(1)
        greater = pc.greater(after, before)
        same = pc.equal(after, before)
        rises = greater if rises is None else pc.or_(rises, pc.and_(equal, greater))
        equal = same if equal is None else pc.and_(equal, same)
    wrong = pc.index(pc.fill_null(rises, False), False).as_py()
    if wrong < 0:
        return ""
    pair = _encoded_key(keys, key, wrong), _encoded_key(keys, key, wrong + 1)
    return f"the key {pair[1]} comes " + ("twice" if pair[0] == pair[1] else f"after {pair[0]}")
