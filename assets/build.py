"""What bounded and unbounded datasets share when they advance: state, attempts, and the one commit."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assets.manifest import KIND, DatasetManifest, Declaration, parse_manifest
from resources.bucketing.files import BucketFile, BucketLayout, Generation
from resources.bucketing.write import write_buckets
from resources.bucketing.writer import WriteOptions
from resources.errors import AdjunctError, CommitConflict, DatasetError, ObjectExistsError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from resources.objects.commit import Commit, CommitLog
    from resources.objects.lake import Lake

NAMES = "datasets/_names"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a commit: `id` is the commit's, and names the folder that only this try writes to."""

    folder: str
    id: str

    def generation(self, number: int, files: Sequence[BucketFile] = ()) -> Generation:
        """Return the generation `number`, made of these files of this attempt."""
        return Generation(number, f"{self.folder}/{self.id}", tuple(files))


@dataclass(frozen=True, slots=True)
class DatasetLog:
    """A dataset's commits in a lake, as manifests."""

    lake: Lake
    name: str

    @property
    def prefix(self) -> str:
        return self.lake.dataset_prefix(self.name)

    @property
    def log(self) -> CommitLog:
        return self.lake.commit_log(self.prefix, KIND)

    def read(self) -> tuple[Commit | None, DatasetManifest | None]:
        """Return the current commit and its manifest, (None, None) before the first."""
        commit = self.log.current()
        return commit, None if commit is None else parse_manifest(self.name, commit)

    def read_at(self, number: int, commit_id: str) -> DatasetManifest:
        """Return the manifest of one commit, current or not. Raises ObjectNotFoundError."""
        return parse_manifest(self.name, self.log.read(self.log.manifest_key(number, commit_id)))

    def attempt(self) -> Attempt:
        return Attempt(f"{self.prefix}/data", uuid.uuid4().hex[:16])

    def commit(
        self,
        parent: Commit | None,
        manifest: DatasetManifest,
        attempt: Attempt,
        *,
        by: str,
        written: Generation | None = None,
    ) -> Commit:
        """Make `manifest` current, in one swap of the pointer.

        Raises CommitConflict when another writer committed meanwhile; what this attempt has `written` is then
        deleted, since nothing can refer to it.
        """
        if parent is None:
            # The name first: a dataset that is there is always listed; a name without a commit is left out.
            with contextlib.suppress(ObjectExistsError):
                self.lake.store.put_if_absent(f"{NAMES}/{self.name}", b"")
        try:
            return self.log.commit(parent, manifest.body(), by=by, commit_id=attempt.id)
        except CommitConflict as conflict:
            self.drop(written)
            raise CommitConflict(
                f"dataset {self.name!r}: another writer committed first ({conflict.problem})",
                "Nothing of this attempt is visible. Advance again: it goes on from what the other one did.",
            ) from conflict

    def drop(self, written: Generation | None) -> None:
        """Delete the files of a lost or needless attempt; what can't be deleted now is garbage for collection."""
        files = written.files if written is not None else ()
        with contextlib.suppress(AdjunctError):
            self.lake.store.delete_many([f"{written.folder}/{file.name}" for file in files if written])


def write_generation(
    lake: Lake,
    attempt: Attempt,
    number: int,
    layout: BucketLayout,
    rows: DataFrame,
    *,
    what: str,
    order_by: Sequence[str],
    keep_tombstones: bool,
    partitioned: bool,
) -> tuple[Generation, dict[str, int]]:
    """Write the last row of each key into one file a bucket; return the generation that they make, and counters.

    `order_by` puts the rows of one key next to each other, the one that counts last. Counted are the rows that a
    later one of their key superseded and, where tombstones are not kept, the keys that ended deleted.
    """
    empty = attempt.generation(number)
    options = WriteOptions(what, last_per_key=True, drop_tombstones=not keep_tombstones)
    files = write_buckets(rows, lake.store, empty.folder, layout, options, order_by=order_by, partitioned=partitioned)
    counters = {
        "superseded": sum(int(file.stats.get("superseded", 0)) for file in files),
        "deleted": sum(int(file.stats.get("deleted", 0)) for file in files),
    }
    return attempt.generation(number, [file for file in files if file.rows]), counters


def check_declaration(name: str, stored: Declaration, declared: Declaration) -> None:
    """Refuse a declaration under which the stored entries could not be found again, naming each difference."""
    changes = [
        f"{what} is {_told(new)}, was {_told(old)}"
        for what, old, new in (
            ("kind", stored.kind, declared.kind),
            ("input", stored.input, declared.input),
            ("key", stored.key, declared.key),
            ("type of the key", stored.key_types, declared.key_types),
            ("partition_by", stored.partition_by, declared.partition_by),
            ("partitions", stored.partitions or "broadcast", declared.partitions or "broadcast"),
            ("number of input partitions", stored.input_partitions, declared.input_partitions),
        )
        if old != new
    ]
    if changes:
        raise DatasetError(
            f"dataset {name!r} was built under another declaration: {'; '.join(changes)}. That needs a rebuild.",
            "Declare it under a new name, which builds it beside the old one, or restore the old declaration.",
        )


def _told(value: object) -> str:
    return f"({', '.join(map(str, value))})" if isinstance(value, tuple) else str(value)


def add(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
    """Return the sums of two sets of counters."""
    return {name: left.get(name, 0) + right.get(name, 0) for name in {**left, **right}}
