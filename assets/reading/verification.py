"""Verifies the stored objects of a version against its manifest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from dagster_adjunct.assets.reading.stored_file import StoredFile, list_stored_files
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.resources.bucketing.files import BucketLayout, columns_problem
from dagster_adjunct.resources.errors import ManifestMismatchError, ObjectNotFoundError
from dagster_adjunct.resources.lazy_modules import np, pa, pc
from dagster_adjunct.resources.reports import to_json_value
from dagster_adjunct.resources.threads import map_in_threads


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
        if self.ok:
            outcome = "all as listed"
        else:
            first = "; ".join(map(str, self.damaged[:3]))
            outcome = f"{len(self.damaged)} damaged: {first}"
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
    damaged = []
    for damages in map_in_threads(check, files):
        damaged += damages
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
    for folder in sorted(view.sealed.folders):
        for item in view.store.list(f"{folder}/"):
            _, _, name = item.key.rpartition("/")
            if item.key in listed or name.startswith("_"):
                continue
            problem = "the manifest does not list it; Spark can't read the version while it exists"
            yield Damage(item.key, problem)


def _verify_file(stored: StoredFile, *, layout: BucketLayout, deep: bool) -> list[Damage]:
    """Return what is wrong with a file: nothing, or its first problem."""
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
    """Return what is wrong with the rows of a file: nothing, or its first problem. Raises
    ManifestMismatchError for a file that can't be read.
    """
    opened = stored.open()
    file = stored.file
    if opened.metadata.num_rows != file.rows:
        return [f"it has {opened.metadata.num_rows:,} rows, the manifest lists {file.rows:,}"]
    problem = columns_problem(opened.schema_arrow, layout)
    if problem:
        return [problem]
    layout = layout.stored
    if not layout.key:
        return []
    last_row: pa.Table | None = None  # the key of the last row of the row group before
    first: list[Any] | None = None
    for group in range(opened.num_row_groups):
        keys = stored.reading(partial(opened.read_row_group, group, columns=list(layout.key)))
        if first is None:
            first = _encoded_key(keys, layout.key, 0)
        problem = _bucket_problem(keys, layout, file.bucket)
        if not problem:
            in_order = keys if last_row is None else pa.concat_tables([last_row, keys])
            problem = _order_problem(in_order, layout.key)
        if problem:
            return [f"row group {group}: {problem}"]
        last_row = keys.slice(keys.num_rows - 1)
    last = None
    if last_row is not None:
        last = _encoded_key(last_row, layout.key, 0)
    if (first, last) != (file.min_key, file.max_key):
        return [
            f"its keys go from {first} to {last}, the manifest lists {file.min_key} to"
            f" {file.max_key}"
        ]
    return []


def _encoded_key(table: pa.Table, key: Sequence[str], row: int) -> list[Any]:
    """Return the key of a row as manifests store it."""
    return [to_json_value(table.column(name)[row].as_py()) for name in key]


def _bucket_problem(keys: pa.Table, layout: BucketLayout, bucket: int) -> str:
    """Return in words which keys do not belong to this bucket, "" if all do."""
    if not layout.bucket_by:
        return ""

    from dagster_adjunct.resources.bucketing.hashing import assign_buckets

    by_row = assign_buckets(keys.select(layout.bucket_by).columns, layout.partitions)
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
    # Compared with the key before: whether it is greater, and whether it is equal so far.
    rises = pa.array(np.zeros(count, np.bool_))
    equal = pa.array(np.ones(count, np.bool_))
    for name in key:
        before = keys.column(name).slice(0, count)
        after = keys.column(name).slice(1)
        rises = pc.or_(rises, pc.and_(equal, pc.greater(after, before)))
        equal = pc.and_(equal, pc.equal(after, before))
    wrong = pc.index(pc.fill_null(rises, False), False).as_py()
    if wrong < 0:
        return ""
    before = _encoded_key(keys, key, wrong)
    after = _encoded_key(keys, key, wrong + 1)
    if before == after:
        return f"the key {after} comes twice"
    return f"the key {after} comes after {before}"
