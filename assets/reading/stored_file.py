"""The stored files of a version: their bytes, rows and nulls, and whether they are those that its
manifest lists.

`verify_version` compares size and SHA-256, and finds objects that are not listed. With `deep` it
also reads the contents: the row count, the columns, and keys that are sorted, unique, in the listed
range and in their bucket. Nothing here needs Spark.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TypeVar

from dagster_adjunct.assets.versions.version import SealedVersion
from dagster_adjunct.resources.bucketing.files import (
    BucketFile,
    BucketLayout,
    Generation,
    columns_problem,
    conform_to_layout,
)
from dagster_adjunct.resources.errors import ManifestMismatchError, ObjectNotFoundError, file_error
from dagster_adjunct.resources.lazy_modules import pa, pq
from dagster_adjunct.resources.objects.arrow_files import open_bytes, open_input
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.schemas.paths import read_path
from dagster_adjunct.resources.schemas.schema import Steps

T = TypeVar("T")
_CHUNK = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A Parquet file that the manifest of a version lists. `what` names the dataset and version
    in errors.
    """

    store: ObjectStore
    what: str
    generation: Generation
    file: BucketFile

    @property
    def key(self) -> str:
        """The object's key."""
        return f"{self.generation.folder}/{self.file.name}"

    def sha256(self) -> str:
        """Return the SHA-256 of as many bytes as the manifest lists, read in ranges. Raises
        ObjectNotFoundError.
        """
        digest = hashlib.sha256()
        for start in range(0, self.file.size, _CHUNK):
            length = min(_CHUNK, self.file.size - start)
            digest.update(self.store.get_range(self.key, start, length))
        return digest.hexdigest()

    def read_whole(self) -> bytes:
        """Return the bytes of the file. Raises ManifestMismatchError unless they have the listed
        SHA-256, and ObjectNotFoundError.
        """
        data = self.store.get(self.key).data
        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 != self.file.sha256:
            raise self.damaged(f"its SHA-256 is {sha256}, the manifest lists {self.file.sha256}")
        return data

    def open(self) -> pq.ParquetFile:
        """Return the opened Parquet file. Raises ManifestMismatchError where it is missing or
        unreadable.
        """
        return self.reading(
            lambda: pq.ParquetFile(
                open_input(
                    self.file.size, self.read_whole, partial(self.store.get_range, self.key)
                ),
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
        ManifestMismatchError. Errors of this process or machine say nothing about the file.
        """
        try:
            return read()
        except ObjectNotFoundError as error:
            raise self.damaged("it is missing") from error
        except pa.ArrowCancelled:
            raise
        except pa.ArrowMemoryError as error:
            # Damaged sizes ask for too much memory as well, so the bytes decide.
            if self.sha256() == self.file.sha256:
                raise
            raise self._unreadable(error) from error
        except OSError as error:
            if error.errno is not None:  # of the system: Arrow's own about contents have none
                raise file_error(error, self.store.url, self.what) from error
            raise self._unreadable(error) from error
        except pa.ArrowException as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> ManifestMismatchError:
        """Return the error for this file, which Arrow can't read."""
        return self.damaged(f"it can't be read: {str(error).partition(chr(10))[0]}")

    def damaged(self, problem: str) -> ManifestMismatchError:
        """Return the error for this file, which has this problem."""
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
    found: list[StoredFile] = []
    for generation in sealed.generations:
        found += list_generation_files(store, what, generation)
    return found


def list_generation_files(
    store: ObjectStore, what: str, generation: Generation
) -> list[StoredFile]:
    """Return the files of a generation, as a manifest lists them; makes no request."""
    return [StoredFile(store, what, generation, file) for file in generation.files]


def column_paths(metadata: pq.FileMetaData) -> list[str]:
    """Return the names of the columns of a Parquet file, in order; "" for a part of a nested
    column, whose path may be the name of another column.
    """
    paths = []
    for index in range(metadata.num_columns):
        leaf = metadata.schema.column(index)
        is_nested = leaf.max_definition_level > 1
        paths.append("" if is_nested else leaf.path)
    return paths


def _find_leaf(metadata: pq.FileMetaData, steps: Steps) -> int | None:
    """Return the index of the column of a Parquet file that has the values at these steps and no
    others; None if there is none, or if its path is ambiguous.
    """
    if len(steps) == 1:
        names = column_paths(metadata)
        if steps[0] not in names:
            return None
        return names.index(steps[0])
    is_ambiguous = any("." in step for step in steps)
    if is_ambiguous:
        return None
    for index in range(metadata.num_columns):
        leaf = metadata.schema.column(index)
        is_in_list = leaf.max_repetition_level > 0
        has_depth = leaf.max_definition_level == len(steps)
        if has_depth and not is_in_list and leaf.path == ".".join(steps):
            return index
    return None


def count_nulls(files: Sequence[StoredFile], values: Sequence[Steps]) -> list[int]:
    """Return the number of nulls at each of these stored steps, over all files. A value within a
    null struct is null.

    They come from the statistics in the footers; row groups without statistics are read.
    """
    nulls = [0] * len(values)
    for stored in files:
        file = stored.open()
        metadata = file.metadata
        leaves = [_find_leaf(metadata, steps) for steps in values]
        for group, number in product(range(metadata.num_row_groups), range(len(values))):
            leaf = leaves[number]
            statistics = None
            if leaf is not None:
                statistics = metadata.row_group(group).column(leaf).statistics
            if statistics is None or not statistics.has_null_count:
                steps = values[number]
                rows = stored.reading(partial(file.read_row_group, group, columns=[steps[0]]))
                nulls[number] += read_path(rows, steps).null_count
            else:
                nulls[number] += statistics.null_count
    return nulls


def read_stored_file(stored: StoredFile, layout: BucketLayout, *, threads: bool = True) -> pa.Table:
    """Return all rows of a file with the columns of the layout, in one request. Raises
    ManifestMismatchError.
    """

    def read() -> pa.Table:
        file = pq.ParquetFile(open_bytes(stored.read_whole()))
        if file.metadata.num_rows != stored.file.rows:
            raise stored.damaged(f"it has {file.metadata.num_rows} rows")
        problem = columns_problem(file.schema_arrow, layout)
        if problem:
            raise stored.damaged(problem)
        return conform_to_layout(file.read(use_threads=threads).replace_schema_metadata(), layout)

    return stored.reading(read)
