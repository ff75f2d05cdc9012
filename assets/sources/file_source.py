"""Versions that arrive as folders of files, each complete when its completion object is there.

    URL/v1/part-0.csv  URL/v1/_SUCCESS      one folder for each version, in the natural order of
                                            their names
    URL/part-0.csv     URL/_SUCCESS         one folder, rewritten in place

Files are listed once. A version is made from this list, with sizes and ETags: a file that has
changed when it is read makes the build fail, and so does a file added or removed before the build
starts.

A delivery is identified by the contents of its files and of the completion object, not by time or
place. A folder that is listed as before is unchanged; only one that was copied, restored or
completed again is read to compare it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from dagster_adjunct.assets.declaration.dataset import BoundedDataset, FileSource
from dagster_adjunct.assets.declaration.policies import MARKER, natural_sort_key
from dagster_adjunct.assets.sources.entries import derive_entry_schema, hides_values
from dagster_adjunct.assets.sources.version_source import (
    Awaiting,
    Delivery,
    VersionSource,
    contradiction_error,
)
from dagster_adjunct.assets.versions.manifest import BoundedManifest, Delivered, MarkerFacts
from dagster_adjunct.assets.versions.version import declaration_from_spec
from dagster_adjunct.resources.bucketing import hashing
from dagster_adjunct.resources.documents import RepeatedMemberError, unique_members
from dagster_adjunct.resources.errors import (
    DatasetError,
    EmptyVersionError,
    MarkerConflictError,
    SourceChangedError,
)
from dagster_adjunct.resources.files import formats
from dagster_adjunct.resources.files.formats import DeclaredFiles
from dagster_adjunct.resources.files.tree import FileTree, ListedFile, open_tree
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.schemas.texts import parse_moment
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.spark.tasks import translate_spark_errors
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder as listed. `path` is "" for the URL itself; `complete` is its completion object,
    None if the folder is not complete.
    """

    path: str
    files: tuple[ListedFile, ...]
    complete: ListedFile | None

    @property
    def marker(self) -> ListedFile:
        """The completion object of a complete folder."""
        assert self.complete is not None
        return self.complete


@dataclass(frozen=True, slots=True)
class Promise:
    """What a completion object states about the files: the number of their records, and a checksum
    of these, each None if it is not stated. `problem` is why it can't be parsed, "" if it can.

    `valid_from` is the time since when the version is valid; a time without a zone is UTC.
    """

    rows: int | None = None
    checksum: str | None = None
    problem: str = ""
    valid_from: datetime | None = None


class FolderContent(NamedTuple):
    """The `content` of a Delivery from files: the folder, and what its completion object states."""

    folder: Folder
    promise: Promise


def group_folders(files: list[ListedFile], complete: str) -> list[Folder]:
    """Return the folders that have files, with "" for files at the URL itself.

    `complete` is the name of completion objects. If one is at the URL itself, the folder "" comes
    first, with all data files below the URL. Files named `_…` or `.…`, and those in folders with
    such names, are no data.
    """
    by_name: dict[str, list[ListedFile]] = {}
    for file in files:
        folder_path, _, _ = file.path.rpartition("/")
        name, _, _ = folder_path.partition("/")  # the first step; files below it belong to it
        if not _hidden(name):
            by_name.setdefault(name, []).append(file)
    whole = _to_folder("", by_name.pop("", []), complete)
    folders = [_to_folder(name, inside, complete) for name, inside in by_name.items()]
    if whole.complete is not None:
        everything = chain(whole.files, *(folder.files for folder in folders))
        return [replace(whole, files=_by_name(everything)), *folders]
    if whole.files:
        return [whole, *folders]
    return folders


def _to_folder(name: str, inside: list[ListedFile], complete: str) -> Folder:
    """Return the folder of this name, with those of the files `inside` it that are data.

    `complete` is the name of completion objects.
    """
    completion_path = f"{name}/{complete}" if name else complete
    completion = None
    data = []
    for file in inside:
        if file.path == completion_path:
            completion = file
        elif not any(map(_hidden, file.path.split("/"))):
            data.append(file)
    return Folder(name, _by_name(data), completion)


_MEMBERS = ("rows", "checksum", "valid_from")


def parse_promise(data: bytes) -> Promise:
    """Parse a completion object: empty, or a JSON object with no other members than `_MEMBERS`,
    each at most once. Of any other, only the problem is returned.
    """
    if not data.strip():
        return Promise()
    try:
        promised = json.loads(data, object_pairs_hook=unique_members)
    except RepeatedMemberError as error:
        return Promise(problem=f"states {error} twice")
    except (ValueError, RecursionError):
        return Promise(problem="is neither empty nor JSON")
    if not isinstance(promised, dict):
        kind = type(promised).__name__
        return Promise(problem=f"holds a JSON {kind} where an object is expected")
    problem = _find_member_problem(promised)
    if problem:
        return Promise(problem=problem)
    rows = promised.get("rows")
    checksum = promised.get("checksum")
    if "valid_from" not in promised:
        return Promise(rows, checksum)
    valid_from = promised["valid_from"]
    try:
        return Promise(rows, checksum, valid_from=parse_moment(valid_from))
    except (ValueError, TypeError):
        expected = "a time such as 2026-01-31T00:00:00Z"
        return Promise(problem=f"states valid_from {valid_from!r}: expected {expected}")


def _find_member_problem(promised: Mapping[str, object]) -> str:
    """Return what is wrong with the members of a completion object, "" if nothing is."""
    for name in promised:
        if name not in _MEMBERS:
            return f"has the unknown member {name!r}: expected {', '.join(_MEMBERS)}"
    for name, value in promised.items():
        if value is None:
            return f"states {name} null: expected a value, or no such member"
    rows = promised.get("rows", 0)
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
        return f"states rows {rows!r}: expected an integer, 0 or more"
    checksum = promised.get("checksum", "")
    if not isinstance(checksum, str):
        return f"states checksum {checksum!r}: expected a text"
    return ""


def _by_name(files: Iterable[ListedFile]) -> tuple[ListedFile, ...]:
    """Return the files in the natural order of their paths ("part-2" before "part-10")."""
    return tuple(sorted(files, key=lambda file: natural_sort_key(file.path)))


def _hidden(name: str) -> bool:
    """Whether a file or folder of this name holds no data."""
    return name.startswith(("_", "."))


Markers = Mapping[str, MarkerFacts]
"""The facts of a delivery's completion object, by its path."""
Copies = Mapping[str, Markers]
"""The new marker facts of earlier deliveries that were copied unchanged, by version name."""


@lru_cache(maxsize=1024)  # sensors compare the same listed folders repeatedly
def _contents_digest(tree: FileTree, folder: Folder) -> str:
    """Return a digest of the folder's data files by name and contents. Reads local files."""
    prefix = f"{folder.path}/" if folder.path else ""
    facts = []
    for file in folder.files:
        facts.append((file.path.removeprefix(prefix), file.size, tree.content_tag(file)))
    return _digest(facts)


def _listing_digest(folder: Folder) -> str:
    """Return a digest of the folder's data files by name, size and ETag."""
    return _digest([(file.path, file.size, file.etag) for file in folder.files])


def _digest(facts: list[tuple[str, int, str]]) -> str:
    """Return a digest of files, each given by its name, size, and tag of its contents."""
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


# Text files up to this size in total are counted in this process: starting Spark would take longer.
_MAX_LOCAL_BYTES = 16 * 1024 * 1024


def describe_absent_files(tree: FileTree) -> str:
    """Return why no file was found in a tree: its folder does not exist, or is empty."""
    # The absolute path: a relative one depends on the working directory.
    reason = tree.absence() or "no file was found in it"
    return f"the folder {tree.url} is missing or empty: {reason}"


class FileVersions(VersionSource):
    """The versions in the folders of a FileSource, as listed by the first call of `next`.

    With `partition`, only the version in the folder of that name is looked for. It is delivered
    unless a sealed version of that name is retained which was made of the same completion object
    and files.
    """

    def __init__(
        self, spec: BoundedDataset, files: FileSource, partition: str | None = None
    ) -> None:
        schema = derive_entry_schema(spec, files.schema)
        # Of one key, the last record in the last file is kept.
        super().__init__(spec, schema, declaration_from_spec(spec, schema), (PARTITION, OFFSET))
        self._source = files
        self._partition = partition
        self._tree = open_tree(files.url)
        self._seen: list[Folder] | None = None
        self._notes: tuple[str, ...] = ()
        self._given: set[str] = set()

    def next(self, manifest: BoundedManifest) -> Delivery | Awaiting:
        """Return the version in the first complete folder that is not settled, or the one to wait
        for.

        Notes name delivered folders with changed contents; unchanged copies count as delivered.
        Once all others are delivered, raises MarkerConflictError for a folder that sorts before a
        delivered one. Raises DatasetError if both the URL itself and a folder have a completion
        object.
        """
        answer = self._next(manifest)
        if isinstance(answer, Delivery) or not answer.missing:
            return answer
        if self._notes:
            missing = f"files, but {self._notes[0]}"
        else:
            missing = f"the completion object {answer.missing[0]}"
        return replace(answer, files=missing)

    def _list(self) -> list[Folder]:
        """Return the folders, as listed first."""
        if self._seen is None:
            files = self._tree.list()
            self._seen = group_folders(files, self._source.complete)
            if not files:
                self._notes = (describe_absent_files(self._tree),)
        return self._seen

    def _next(self, manifest: BoundedManifest) -> Delivery | Awaiting:
        """Return what `next` returns, but say what is missing only by its URL.

        Files are one folder that is rewritten in place if a completion object is at the URL itself.
        Otherwise each folder is a version: the requested one, or the next one of all.
        """
        named = {folder.path: folder for folder in self._list()}
        at_url = named.pop("", None)
        if at_url is not None and at_url.complete is not None:
            self._check_in_place(named.values())
            return self._next_in_place(manifest, at_url)
        if self._partition is not None:
            return self._find_partition(manifest, named.get(self._partition), self._partition)
        if not named:
            has_arrived = at_url is not None  # files at the URL, which is not complete
            missing = self._place("" if has_arrived else "*", self._source.complete)
            return Awaiting(None, (missing,), idle=not has_arrived, notes=self._notes)
        # A published version stays one, also if partitions are declared otherwise since then.
        left_out = self.outside(named) - manifest.names
        outside = []
        inside = []
        for name, folder in named.items():
            if name not in left_out:
                inside.append(folder)
            elif folder.complete is not None:
                outside.append(name)
        outside.sort(key=natural_sort_key)
        answer = self._next_folder(manifest, inside)
        notes = (*answer.notes, *self.describe_outside(outside))
        return replace(answer, outside=tuple(outside), notes=notes)

    def _next_folder(self, manifest: BoundedManifest, folders: list[Folder]) -> Delivery | Awaiting:
        """Return the version in the first of these folders that is neither settled nor late; or,
        if that folder is not complete, that it is awaited.
        """
        copies, changed = self._compare_delivered_folders(manifest, folders)
        notes = (*self._notes, *map(self._describe_changed_folder, changed))
        settled = manifest.names - self._find_completed_again(manifest, folders)
        unsettled = [folder for folder in folders if folder.path not in settled]
        late, rest = self._split_late_folders(manifest, unsettled)
        first = next(iter(rest), None)
        if first is not None and first.complete is not None:
            return replace(self._delivery(first.path, first), notes=notes, copies=copies)
        # Late folders are an error only once nothing else can be delivered.
        notes += self._report_late_folders(manifest, late)
        if first is not None:
            return Awaiting(first.path, (self._marker(first),), notes=notes, copies=copies)
        missing = self._place("*", self._source.complete)
        return Awaiting(None, (missing,), idle=True, notes=notes, copies=copies)

    def check(self, delivery: Delivery, spark: Callable[[], SparkSession]) -> int | None:
        """Return the number of records in the files, None if that needs reading large text files.

        Parquet is counted by its footers, which also give columns and types. Text files are read if
        they are small or if the completion object states a number. Raises MarkerConflictError if
        the completion object can't be parsed or states another number or checksum,
        SchemaMismatchError for files that are not as declared, and SourceChangedError for files
        that have changed.
        """
        folder, promise = _content_of(delivery)
        what = self._what(delivery)
        self._check_same(what, folder)
        if promise.problem:
            problem = f"the completion object {self._marker(folder)} {promise.problem}."
            raise MarkerConflictError(
                f"{what}: {problem}",
                "Write it empty, or as JSON with rows, checksum and valid_from, and deliver under a"
                " new version name.",
                dataset=self.spec.name,
                version=delivery.version,
            )
        if not folder.files:
            self.reject_empty(delivery)
        expected = hashing.parse_records_checksum(promise.checksum)
        rows = self._count(delivery, spark, must=promise.rows is not None)
        if promise.rows is not None and rows != promise.rows:
            raise self._promise_error(delivery, f"{promise.rows} records", f"{rows} records")
        if expected is not None:
            checksum = hashing.EMPTY_CHECKSUM if rows == 0 else self._checksum(delivery, spark)
            if checksum != expected:
                raise self._promise_error(delivery, f"checksum {expected}", f"checksum {checksum}")
        return rows

    def _checksum(self, delivery: Delivery, spark: Callable[[], SparkSession]) -> str:
        """Return the checksum of all records in the files."""
        if spark is IN_PROCESS:
            return hashing.arrow_checksum(self.records_in_arrow(delivery), self._source.schema)
        return hashing.records_checksum(
            self.records_in_spark(delivery, spark()), self._source.schema
        )

    def reject_empty(self, delivery: Delivery) -> None:
        """Raise EmptyVersionError for a folder without records, unless its completion object states
        rows 0.
        """
        folder, promise = _content_of(delivery)
        if promise.rows == 0:
            return
        if folder.files:
            found = f"{len(folder.files)} data file(s) without a record"
        else:
            found = "no data file"
        raise EmptyVersionError(
            f"{self._what(delivery)}: the folder {self._place(folder.path)} is complete and holds"
            f" {found}: expected {self._source.format} files below it, not called _… or .…, or a"
            " completion object that states rows 0.",
            'Deliver the files and complete it again; for an empty version, write {"rows": 0} into'
            " that object.",
            dataset=self.spec.name,
            version=delivery.version,
        )

    def _count(
        self, delivery: Delivery, spark: Callable[[], SparkSession], *, must: bool
    ) -> int | None:
        """Return the number of records; None if that needs reading large text files and `must`
        is false.
        """
        declared = self._declared(delivery)
        files = _content_of(delivery).folder.files
        if declared.format == "parquet" or sum(file.size for file in files) <= _MAX_LOCAL_BYTES:
            return formats.count_file_records(declared, files)
        if not must:
            return None
        if spark is IN_PROCESS:
            return int(self.records_in_arrow(delivery).num_rows)
        with translate_spark_errors():
            return self.records_in_spark(delivery, spark()).count()

    def _promise_error(self, delivery: Delivery, expected: str, found: str) -> MarkerConflictError:
        """Return the error for files whose number or checksum is not the one that is promised."""
        folder = _content_of(delivery).folder
        promise = f"the completion object {self._marker(folder)} expects {expected}"
        return contradiction_error(
            f"{self._what(delivery)}: {promise}, the files hold {found}.",
            self.spec.name,
            delivery.version,
            expected,
            found,
            "The version is not published and what is served stays. Deliver the right content under"
            " a new name.",
        )

    def records_in_arrow(self, delivery: Delivery) -> pa.Table:
        """Return the records of the files with the columns of META: `__partition` is the file's
        index, by name.
        """
        files = _content_of(delivery).folder.files
        return formats.read_files(self._declared(delivery), files)

    def records_in_spark(self, delivery: Delivery, spark: SparkSession) -> DataFrame:
        """Return what `records_in_arrow` returns, as a Spark frame."""
        files = _content_of(delivery).folder.files
        return formats.read_files_with_spark(spark, self._declared(delivery), files)

    def place(self, delivery: Delivery, partition: int, offset: int) -> str:
        """Return the file and the line (for Parquet, the row) of the record."""
        file = _content_of(delivery).folder.files[partition]
        record = formats.record_place(self._source.format, 0, offset)
        return f"{self._place(file.path)}, {record.text}"

    # -- which version

    def _find_partition(
        self, manifest: BoundedManifest, folder: Folder | None, name: str
    ) -> Delivery | Awaiting:
        """Return the requested version `name` if its folder is complete and is not what is
        published; otherwise what is awaited. `folder` is None if there is no such folder.
        """
        if folder is None or folder.complete is None:
            missing = self._place(name, self._source.complete)
            return Awaiting(name, (missing,), notes=self._notes)
        done = manifest.newest_deliveries.get(name)
        if done is None or not manifest.retains(done.version):
            return self._delivery(name, folder)
        if self._differs(done.markers, folder, asked=True):
            return self._delivery(name, folder)
        return Awaiting(None, (self._marker(folder),), idle=True)

    def _check_in_place(self, folders: Iterable[Folder]) -> None:
        """Raise DatasetError if a folder that is written in place can't be one: it has complete
        folders in it, or one version is requested.
        """
        url = self._source.url
        for folder in folders:
            if folder.complete is not None:
                raise DatasetError(
                    f"dataset {self.spec.name!r}: {url} holds {self._source.complete} itself and so"
                    f" does its folder {folder.path!r}: either everything below the URL is one"
                    " version, or each folder is.",
                    "Remove one of the two completion objects.",
                    dataset=self.spec.name,
                )
        if self._partition is not None:
            raise DatasetError(
                f"dataset {self.spec.name!r}: version {self._partition!r} was requested, but"
                f" {url} is one folder that is written in place, whose versions are"
                " named by their completion time.",
                "Put each version into a folder of its own, or advance the dataset without a"
                " partition.",
                dataset=self.spec.name,
                version=self._partition,
            )

    def _find_delivered_in_place(
        self, manifest: BoundedManifest, folder: Folder, last: Delivered
    ) -> Awaiting | None:
        """Return that nothing is new, if the folder holds what was delivered `last`, or a copy of
        it; else None. A copy of files whose version is revoked is nothing new either.
        """
        was_removed = last.freed is not None and manifest.ref(last.version) is None
        if was_removed:  # so that it can be delivered again, even unchanged
            return None
        copies = {}
        if self._is_copy(last.markers, folder):
            copies = {last.name: self._current_markers(folder, last.markers)}
        else:
            before = last.markers.get(folder.marker.path)
            if before is None or before.completed != folder.marker.modified:
                return None
            if before.listing != _listing_digest(folder):
                return None
        return Awaiting(None, (self._marker(folder),), idle=True, copies=copies)

    def _next_in_place(self, manifest: BoundedManifest, folder: Folder) -> Delivery | Awaiting:
        """Return the version in the one folder that is rewritten in place, or what is awaited.

        The version is named by the time of completion and the completion object's content. It is
        not delivered if the folder is as it was delivered last, if files are newer than the
        completion object, if the name is no partition of the dataset, or if the name is taken.
        """
        completion = folder.marker
        url = self._marker(folder)
        last = manifest.delivered[-1] if manifest.delivered else None
        if last is not None:
            nothing_new = self._find_delivered_in_place(manifest, folder, last)
            if nothing_new is not None:
                return nothing_new
        newest = max((completion, *folder.files), key=lambda file: file.modified)
        if newest.modified > completion.modified:
            # Files are being replaced while the old completion object is still there.
            note = f"{newest.path} was written after {url}: write that last, after all files"
            return Awaiting(None, (url,), notes=(note,))
        tag = re.sub(r"[^A-Za-z0-9]", "", self._tree.content_tag(completion))[:8]
        name = f"{completion.modified:%Y%m%dT%H%M%SZ}-{tag}"
        outside = tuple(self.outside([name]))
        if outside:
            note = (
                f"{url} completes a folder that is written in place, whose versions are named by"
                " time"
            )
            notes = (note, *self.describe_outside(outside))
            return Awaiting(None, (), idle=True, outside=outside, notes=notes)
        if name in manifest.names:
            notes = self._describe_taken_name(name, url, last)
            return Awaiting(None, (url,), idle=True, notes=notes)
        delivery = self._delivery(name, folder)
        is_first = last is None
        if not is_first:
            return delivery
        note = (
            f"{url} is in the folder of the deliveries itself: all files below it"
            f" are one version, named {name!r} by the time of completion; for versions of its own"
            " name, put each into a folder of its own"
        )
        return replace(delivery, notes=(note,))

    def _describe_taken_name(self, name: str, url: str, last: Delivered | None) -> tuple[str, ...]:
        """Return a note if the last delivery has the name that the folder's version would get; none
        if an earlier one has it, or a version that was given up.

        `_find_delivered_in_place` has found that the contents differ.
        """
        if last is None or last.freed or last.name != name:
            return ()
        note = (
            f"{self._source.url} was completed twice in the second that names version"
            f" {name!r}, with other contents: write {url} again, and they are a version"
            " of their own"
        )
        return (note,)

    def _split_late_folders(
        self, manifest: BoundedManifest, folders: list[Folder]
    ) -> tuple[list[Folder], list[Folder]]:
        """Return the folders that are late, because they sort before a delivered version, and the
        others in order.

        No folder is late if versions are declared as partitions, which are ordered by name, or if
        none was delivered. If versions are ordered by time, a folder whose name is free again is
        not late either.
        """
        folders = sorted(folders, key=lambda folder: natural_sort_key(folder.path))
        if self.spec.versions is not None or not manifest.taken:
            return [], folders
        newest = max(map(natural_sort_key, manifest.taken))
        is_ordered_by_time = self.spec.valid_from is not None
        never_late = manifest.freed if is_ordered_by_time else set()
        late: list[Folder] = []
        rest: list[Folder] = []
        for folder in folders:
            if natural_sort_key(folder.path) < newest and folder.path not in never_late:
                late.append(folder)
            else:
                rest.append(folder)
        return late, rest

    def _report_late_folders(
        self, manifest: BoundedManifest, late: list[Folder]
    ) -> tuple[str, ...]:
        """Raise MarkerConflictError for a complete late folder; return a note for each that is a
        copy of a version.
        """
        notes = []
        for folder in late:
            if folder.complete is None:
                continue
            original = self._find_original(folder, manifest.delivered)
            if original is None:
                raise self._late_error(folder, max(manifest.taken, key=natural_sort_key))
            notes.append(
                f"the folder {folder.path!r} is left out: it is a copy of version {original!r}"
            )
        return tuple(notes)

    def _late_error(self, folder: Folder, newest: str) -> MarkerConflictError:
        """Return the error for a complete folder that sorts before the delivered `newest`."""
        # Where the name states the valid-from time, a new name would state a wrong one.
        if self.spec.valid_from in (None, MARKER):
            rename = "Rename it so that it comes after, or abandon"
        else:
            rename = "Abandon"
        return MarkerConflictError(
            f"dataset {self.spec.name!r}: the folder {folder.path!r} in {self._source.url} is"
            f" complete, and comes before version {newest!r}, which was delivered already.",
            f"{rename} it: abandon_version(lake, {self.spec.name!r}, {folder.path!r},"
            " reason=…, by=…). If older versions may arrive later, declare"
            " versions=VersionPartitions(…).",
            dataset=self.spec.name,
            version=newest,
        )

    def _may_be_tried_again(self, manifest: BoundedManifest, done: Delivered) -> bool:
        """Whether a version may be published under the name of `done`, the newest delivery of that
        name: the name is free, or its version was rejected and later versions don't matter.
        """
        if done.freed is not None:
            return True
        if done.version not in manifest.rejected:
            return False
        are_ordered_by_name = self.spec.versions is not None
        return are_ordered_by_name or done is manifest.delivered[-1]

    def _find_completed_again(self, manifest: BoundedManifest, folders: list[Folder]) -> set[str]:
        """Return the names of rejected and revoked versions whose folders were completed again
        since.

        They are tried again in their order. Later versions may have arrived if the name is free
        (revoked, or rejected and then dropped) or if versions are ordered by name; otherwise only
        the last delivery is tried again.
        """
        newest = manifest.newest_deliveries
        names = set()
        for folder in folders:
            done = newest.get(folder.path)
            if done is None or folder.complete is None:
                continue
            if not self._may_be_tried_again(manifest, done):
                continue
            if _is_completed_again(done, folder.complete) or self._differs(done.markers, folder):
                names.add(folder.path)
        return names - self._given - manifest.given_up

    def _compare_delivered_folders(
        self, manifest: BoundedManifest, folders: list[Folder]
    ) -> tuple[Copies, list[Folder]]:
        """Return the new marker facts of delivered folders that are unchanged copies, and the
        changed folders.

        Folders are compared with their recorded contents. Only published versions are: not rejected
        or revoked ones.
        """
        rejected = manifest.rejected
        published: dict[str, Markers] = {}
        for done in manifest.delivered:
            if done.version not in rejected and not done.freed:
                published[done.name] = done.markers
        # What was given is of this listing: it is as delivered.
        not_compared = manifest.given_up | self._given
        copies: dict[str, Markers] = {}
        changed: list[Folder] = []
        for folder in folders:
            markers = published.get(folder.path)
            if markers is None or folder.complete is None or folder.path in not_compared:
                continue
            if self._differs(markers, folder):
                changed.append(folder)
            elif self._is_copy(markers, folder):
                copies[folder.path] = self._current_markers(folder, markers)
        return copies, changed

    def _describe_changed_folder(self, folder: Folder) -> str:
        """Return a note on a delivered folder with changed contents, and how to publish them."""
        name = folder.path
        at = f"{folder.marker.modified:%F %T}"
        rebuild = ""
        if self.spec.versions is not None:
            rebuild = "rebuild it as a partition (partition=…), or "
        return (
            f"version {name!r} was delivered, and {self._marker(folder)} was written again at"
            f" {at} with other contents: what was published stays. To publish them,"
            f" {rebuild}deliver them under a new version name; to stop this note, abandon this one"
            f" (adjunct dataset abandon {self.spec.name} {name} --reason …)"
        )

    def _delivery(self, name: str, folder: Folder) -> Delivery:
        """Return the version that is in a complete folder, and remember it as given: folders that
        were given are not tried again, nor compared.

        Other deliveries are compared with it by the digest of its contents in the marker facts. Its
        `identity` is narrower, exactly these files as listed: only their build is reused.
        """
        self._given.add(name)
        if folder.marker.size:
            promise = parse_promise(self._tree.read(folder.marker))
        else:
            promise = Promise()  # an empty completion object promises nothing
        facts = MarkerFacts(
            offset=0, rows=promise.rows, contents=_contents_digest(self._tree, folder)
        )
        return Delivery(
            name,
            markers=self._current_markers(folder, {folder.marker.path: facts}),
            content=FolderContent(folder, promise),
            identity=repr((self._source, folder)),
            valid_from=() if promise.valid_from is None else (promise.valid_from,),
        )

    # -- compared with an earlier delivery

    def _current_markers(self, folder: Folder, before: Markers) -> dict[str, MarkerFacts]:
        """Return the marker facts `before` with the checksum of the completion object, the listing
        and the completion time that the folder has now.
        """
        complete = folder.marker
        now = {
            "checksum": self._tree.content_tag(complete),
            "listing": _listing_digest(folder),
            "completed": complete.modified,
        }
        return {complete.path: before[complete.path].model_copy(update=now)}

    def _differs(self, markers: Markers, folder: Folder, *, asked: bool = False) -> bool:
        """Whether a folder is another delivery than the one recorded in `markers`; False if nothing
        is recorded of its completion object.

        Replaced files make it one only once the completion object is rewritten, since more of them
        may be arriving until then; at once if the version is `asked` for.
        """
        before = markers.get(folder.marker.path)
        if before is None:
            return False
        if before.checksum != self._tree.content_tag(folder.marker):
            return True
        is_completed_again = before.completed != folder.marker.modified
        if not is_completed_again and not asked:
            return False
        if before.listing == _listing_digest(folder):  # spares reading the files
            return False
        return before.contents != _contents_digest(self._tree, folder)

    def _is_copy(self, markers: Markers, folder: Folder) -> bool:
        """Whether a folder was completed again, with the contents recorded in `markers`."""
        before = markers.get(folder.marker.path)
        if before is None or before.completed == folder.marker.modified:
            return False
        return not self._differs(markers, folder)

    def _find_original(self, folder: Folder, deliveries: Iterable[Delivered]) -> str | None:
        """Return the name of an earlier delivery with the same contents, None without one."""
        tag = self._tree.content_tag(folder.marker)
        for done in deliveries:
            for facts in done.markers.values():
                if facts.checksum != tag:
                    continue
                if facts.contents == _contents_digest(self._tree, folder):
                    return done.name
        return None

    # -- what is in it

    def _check_same(self, what: str, folder: Folder) -> None:
        """Raise SourceChangedError if files of the folder were added, removed or replaced since it
        was listed.
        """
        prefix = f"{folder.path}/" if folder.path else ""
        current = Folder(folder.path, (), None)
        for listed in group_folders(self._tree.list(prefix), self._source.complete):
            if listed.path == folder.path:
                current = listed
        before = {*folder.files, folder.complete}
        after = {*current.files, current.complete}
        changes = sorted({file.path for file in before ^ after if file is not None})
        if not changes:
            return
        named = ", ".join(changes[:3])
        if len(changes) > 3:
            named += " …"
        raise SourceChangedError(
            f"{what}: {len(changes)} file(s) in {self._source.url} changed after the version was"
            f" found complete: {named}.",
            "Run again: it uses the files as they are then. Write the completion object last.",
            dataset=self.spec.name,
            file=self._place(changes[0]),
        )

    def _declared(self, delivery: Delivery) -> DeclaredFiles:
        """Return how the files of a delivery are read."""
        source = self._source
        shows = not hides_values(self.spec)
        what = self._what(delivery)
        return DeclaredFiles(self._tree, source.format, source.schema, what, values=shows)

    def _what(self, delivery: Delivery) -> str:
        """Return the dataset and the version, for errors."""
        return f"dataset {self.spec.name!r}, version {delivery.version!r}"

    def _marker(self, folder: Folder) -> str:
        """Return the URL of a folder's completion object."""
        return self._place(folder.path, self._source.complete)

    def _place(self, *parts: str) -> str:
        """Return the URL of what has this path below the source."""
        return "/".join(filter(None, (self._source.url.rstrip("/"), *parts)))


def _content_of(delivery: Delivery) -> FolderContent:
    """Return the content that `FileVersions` gave this delivery."""
    content = delivery.content
    assert isinstance(content, FolderContent)
    return content


def _is_completed_again(done: Delivered, complete: ListedFile) -> bool:
    """Whether a folder was completed again since its delivery, by the clock of the store.

    The markers of a delivery of long ago are no longer recorded. Then it counts as completed again
    if that was after its name became free.
    """
    before = done.markers.get(complete.path)
    if before is not None:
        return before.completed != complete.modified
    return done.freed is not None and done.freed < complete.modified
