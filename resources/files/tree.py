"""Reads external files below a local folder or an S3 prefix exactly as they were when they were
listed.

Unlike in a lake's object store, files may have any names, are never written here, and may be
replaced at any time. So each read compares the ETag with the listed one, and raises an error for a
file that was replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.objects.lake import LakeSettings, check_store_url
from dagster_adjunct.resources.objects.store import S3Options

if TYPE_CHECKING:
    from io import BufferedReader

    from mypy_boto3_s3 import S3Client

T = TypeVar("T")
_CHUNK = 1024 * 1024
_FIRST_TIME = datetime(1, 1, 2, tzinfo=UTC)
_LAST_TIME = datetime(9999, 12, 30, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file when it was listed: `path` is relative to the tree, `size` in bytes, `modified` by
    the store's clock.
    """

    path: str
    size: int
    etag: str
    modified: datetime


class FileTree(Protocol):
    """The files below a folder or prefix. Has only the address, and so is small and can be pickled.

    Every method that reads raises SourceChangedError for a file that has changed since it was
    listed.
    """

    @property
    def url(self) -> str: ...

    def __hash__(self) -> int: ...

    def list(self, folder: str = "", after: str = "") -> list[ListedFile]:
        """Return all files below `folder` ("" or "NAME/") whose path is after the path `after`,
        ordered by path; none if there is no such folder.

        On S3, the files up to `after` cost no request.
        """

    def find(self, path: str) -> ListedFile | None:
        """Return one file as it is now, None if there is no such file. One request."""

    def has_files(self) -> bool:
        """Return whether there is a file below the folder; lists no more than is needed for
        that.
        """

    def read(self, file: ListedFile) -> bytes:
        """Return the whole file."""

    def read_range(self, file: ListedFile, start: int, length: int) -> bytes:
        """Return `length` bytes of the file from the position `start`."""

    def on_disk(self, file: ListedFile) -> contextlib.AbstractContextManager[Path]:
        """Provide the file under a local path within the context."""

    def check(self, file: ListedFile) -> datetime:
        """Return when the file was modified, without reading it. Raises SourceChangedError if its
        contents are not those that were listed.
        """

    def absence(self) -> str:
        """Return why there are no files: that the folder does not exist, "" if it does."""

    def content_tag(self, file: ListedFile) -> str:
        """Return a text that is equal for files of equal content. A local file is read, to hash
        it.
        """

    def describe_difference(self, file: ListedFile, etag: str) -> str:
        """Return what tells a file from one with this other ETag of the same size, such as its
        inode.
        """

    def undo_touch(self, file: ListedFile, etag: str) -> str:
        """Return the command after which a file has this earlier ETag again, "" unless all that
        differs is the time when it was modified.
        """


def check_folder_url(url: str) -> None:
    """Raise ConfigurationError unless `url` can be that of a folder: a path, `file:///…` or
    `s3://BUCKET/PREFIX`, without a pattern.
    """
    check_store_url(url, "folder", ("s3", "s3a", "file"))
    if re.match(r"s3a?:///?(/|$)", url):
        problem = f"files at {url!r}: the URL has no bucket."
        raise errors.ConfigurationError(problem, "Write s3://BUCKET/PREFIX.", argument="url")
    if "*" in url or "?" in url:
        raise errors.ConfigurationError(
            f"files at {url!r}: expected a folder, found a pattern.",
            "Name the folder: all files in it and below it are read.",
            argument="url",
        )


def open_tree(url: str) -> FileTree:
    """Return the tree of files below a folder, `file:///…` or `s3://BUCKET/PREFIX`, without reading
    anything.

    S3 is accessed as for a lake: with the ADJUNCT_S3_… settings and boto3's credentials.
    """
    check_folder_url(url)
    scheme, _, rest = url.partition("://")
    if scheme in ("s3", "s3a"):
        bucket, _, prefix = rest.rstrip("/").partition("/")
        return S3Tree(bucket, f"{prefix}/" if prefix else "", LakeSettings().s3_options())
    if url.startswith("file:/"):
        return LocalTree(unquote(urlsplit(url).path))
    return LocalTree(str(Path(url).expanduser().absolute()))


@dataclass(frozen=True, slots=True)
class LocalTree:
    """Files below a local folder, with ETags made of size, inode and modification time."""

    root: str

    @property
    def url(self) -> str:
        return self.root

    def list(self, folder: str = "", after: str = "") -> list[ListedFile]:
        files = []
        for path, entry in self._scan(folder, after):
            facts = self._stat(entry)
            if facts is not None:
                files.append(_require_utf8_name(self.url, _listed_local_file(path, facts)))
        return sorted(files, key=lambda file: file.path)

    def _scan(self, folder: str, after: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield path and entry of the files below a folder whose path is after the path `after`, in
        any order.
        """
        folders = [folder]
        while folders:
            folder = folders.pop()
            for entry in self._entries(folder):
                path = folder + entry.name
                if self._is_folder(entry):
                    if _may_follow(f"{path}/", after) and not entry.is_symlink():
                        folders.append(f"{path}/")
                elif path > after:
                    yield path, entry

    def _is_folder(self, entry: os.DirEntry[str]) -> bool:
        """Return whether an entry is a folder."""
        try:
            return entry.is_dir()
        except OSError as error:
            raise errors.file_error(error, entry.path, f"files in {self.url}") from error

    def _entries(self, folder: str) -> Iterator[os.DirEntry[str]]:
        """Yield what is directly in a folder."""
        try:
            with os.scandir(f"{self.root}/{folder}".rstrip("/")) as entries:
                yield from entries
        except OSError as error:
            self._raise_list_error(error)

    def _stat(self, entry: os.DirEntry[str]) -> os.stat_result | None:
        """Return the facts of an entry, None if it was deleted since it was listed, or is a link
        that leads nowhere.
        """
        try:
            return entry.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise errors.file_error(error, entry.path, f"files in {self.url}") from error

    def listed(self, path: str) -> ListedFile:
        """Return one file as it is now, without listing the others. Raises FileNotFoundError."""
        return _require_utf8_name(
            self.url, _listed_local_file(path, (Path(self.root) / path).stat())
        )

    def find(self, path: str) -> ListedFile | None:
        whole = Path(self.root) / path
        try:
            with self._translate(whole):
                facts = whole.stat()
                if stat.S_ISDIR(facts.st_mode):
                    return None
                return _require_utf8_name(self.url, _listed_local_file(path, facts))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def has_files(self) -> bool:
        return any(names for _, _, names in os.walk(self.root, onerror=self._raise_list_error))

    def read(self, file: ListedFile) -> bytes:
        with self._opened(file) as opened:
            return opened.read()

    def read_range(self, file: ListedFile, start: int, length: int) -> bytes:
        with self._opened(file) as opened:
            opened.seek(start)
            return opened.read(length)

    @contextlib.contextmanager
    def on_disk(self, file: ListedFile) -> Iterator[Path]:
        self.check(file)
        try:
            yield Path(self.root) / file.path
        finally:
            # Also after an error: a file that looks damaged may have been overwritten.
            self.check(file)

    def absence(self) -> str:
        root = Path(self.root)
        if root.is_dir():
            return ""
        if root.exists():
            return "it is a file"
        return "there is no such folder"

    def content_tag(self, file: ListedFile) -> str:
        with self._opened(file) as opened:
            return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()

    def describe_difference(self, file: ListedFile, etag: str) -> str:
        _, inode, modified = file.etag.split("-", 2)
        _, other_inode, other_modified = etag.split("-", 2)
        differences = []
        if inode != other_inode:
            differences.append(f"its inode is {int(inode, 16)}, and was {int(other_inode, 16)}")
        if modified != other_modified:
            later = int(modified, 16) - int(other_modified, 16)
            differences.append(f"its time of modification differs by {later / 1e9:+.9f} seconds")
        return ", and ".join(differences)

    def undo_touch(self, file: ListedFile, etag: str) -> str:
        *size_and_inode, _ = file.etag.split("-", 2)
        *earlier_size_and_inode, modified = etag.split("-", 2)
        seconds, nanoseconds = divmod(int(modified, 16), 10**9)
        has_changed = size_and_inode != earlier_size_and_inode
        if has_changed or not 0 <= seconds < _LAST_TIME.timestamp():
            return ""
        at = f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{nanoseconds:09}Z"
        return f"touch -d {at} {shlex.quote(f'{self.root}/{file.path}')}"

    @contextlib.contextmanager
    def _opened(self, file: ListedFile) -> Iterator[BufferedReader]:
        """Open a file. Raises SourceChangedError, also at the end."""
        with self.on_disk(file) as path, self._translate(path), path.open("rb") as opened:
            yield opened

    @contextlib.contextmanager
    def _translate(self, path: Path) -> Iterator[None]:
        """Raise errors of the file system, except for a missing file, as errors that
        name the tree. The file is missing, too, if there is a file in the place of its folder.
        """
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            raise errors.file_error(error, path, f"files in {self.url}") from error

    def _raise_list_error(self, error: OSError) -> None:
        """Raise the error of a folder that can't be listed, whose files would be left out
        silently.
        """
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise errors.file_error(
                error, error.filename or self.url, f"files in {self.url}"
            ) from error

    def check(self, file: ListedFile) -> datetime:
        path = Path(self.root) / file.path
        try:
            with self._translate(path):
                now = _listed_local_file(file.path, path.stat())
        except (FileNotFoundError, NotADirectoryError):
            raise source_changed_error(self, file, "is gone") from None
        if now.etag != file.etag:
            raise source_changed_error(self, file, "was overwritten")
        return now.modified


@dataclass(frozen=True, slots=True)
class S3Tree:
    """Objects below a prefix of a bucket. Every read sends the listed ETag, which the server
    compares.
    """

    bucket: str
    prefix: str
    options: S3Options

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def list(self, folder: str = "", after: str = "") -> list[ListedFile]:
        from dagster_adjunct.resources.objects.s3_store import list_objects

        files = []
        start = ""
        if after:
            start = self.prefix + after
        ask = partial(self._ask, "LIST", folder)
        for item in list_objects(self._client(), self.bucket, self.prefix + folder, ask, start):
            path = item["Key"].removeprefix(self.prefix)
            if path and not path.endswith("/"):  # consoles create empty objects as folders
                files.append(
                    ListedFile(path, item["Size"], item["ETag"].strip('"'), item["LastModified"])
                )
        return sorted(files, key=lambda file: file.path)

    def find(self, path: str) -> ListedFile | None:
        from dagster_adjunct.resources.objects.s3_store import head_object

        def request() -> ListedFile:
            found = head_object(self._client(), Bucket=self.bucket, Key=self.prefix + path)
            etag = found["ETag"].strip('"')
            return ListedFile(path, found["ContentLength"], etag, found["LastModified"])

        try:
            return self._ask("HEAD", path, request)
        except errors.ObjectNotFoundError:
            return None

    def has_files(self) -> bool:
        from dagster_adjunct.resources.objects.s3_store import list_objects

        objects = list_objects(
            self._client(), self.bucket, self.prefix, partial(self._ask, "LIST", "")
        )
        return any(not item["Key"].endswith("/") for item in objects)

    def read(self, file: ListedFile) -> bytes:
        return self._get(file, lambda body: bytes(body.read()))

    def read_range(self, file: ListedFile, start: int, length: int) -> bytes:
        if length <= 0:
            return b""
        return self._get(
            file, lambda body: bytes(body.read()), Range=f"bytes={start}-{start + length - 1}"
        )

    @contextlib.contextmanager
    def on_disk(self, file: ListedFile) -> Iterator[Path]:
        with contextlib.ExitStack() as stack:
            with errors.translate_file_errors(
                tempfile.gettempdir(), f"a copy of {self.url}/{file.path}"
            ):
                path = (
                    Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="adjunct-")))
                    / "file"
                )

                def save(body: Any) -> None:
                    with path.open("wb") as target:
                        shutil.copyfileobj(body, target, _CHUNK)

                self._get(file, save)
            yield path

    def check(self, file: ListedFile) -> datetime:
        def request() -> Any:
            return self._client().head_object(Bucket=self.bucket, Key=self.prefix + file.path)

        try:
            now = self._ask("HEAD", file.path, request)
        except errors.ObjectNotFoundError:
            raise source_changed_error(self, file, "is gone") from None
        if now["ETag"].strip('"') != file.etag:
            raise source_changed_error(self, file, "was replaced")
        modified: datetime = now["LastModified"]
        return modified

    def absence(self) -> str:
        from dagster_adjunct.resources.objects.s3_store import list_objects

        ask = partial(self._ask, "LIST", "")
        found = next(iter(list_objects(self._client(), self.bucket, self.prefix, ask)), None)
        if found is None:
            return "no object's key begins with it"
        return ""

    def content_tag(self, file: ListedFile) -> str:
        return file.etag

    def describe_difference(self, file: ListedFile, etag: str) -> str:
        return f"its ETag is {file.etag}, and was {etag}"

    def undo_touch(self, file: ListedFile, etag: str) -> str:
        return ""

    def _get(self, file: ListedFile, take: Callable[[Any], T], **more: Any) -> T:
        """Return `take(body)` for an object, whose ETag is the listed one. Raises
        SourceChangedError.
        """

        def request() -> T:
            answer = self._client().get_object(
                Bucket=self.bucket, Key=self.prefix + file.path, IfMatch=f'"{file.etag}"', **more
            )
            if answer["ETag"].strip('"') != file.etag:  # for servers that ignore the condition
                raise source_changed_error(self, file, "was replaced")
            return take(answer["Body"])

        try:
            return self._ask("GET", file.path, request)
        except errors.PreconditionFailedError:
            raise source_changed_error(self, file, "was replaced") from None
        except errors.ObjectNotFoundError:
            raise source_changed_error(self, file, "is gone") from None

    def _ask(self, action: str, path: str, send: Callable[[], T]) -> T:
        """Return the result of `send`, which is called again after transient errors. Raises the
        others as Adjunct's.
        """
        from dagster_adjunct.resources.objects.s3_store import S3Request, retry_request

        return retry_request(S3Request(action, self.url, path), send, self.options.attempts)

    def _client(self) -> S3Client:
        """Return this process's client of S3."""
        return _client_of(os.getpid(), self.options)


@lru_cache(maxsize=8)
def _client_of(process: int, options: S3Options) -> S3Client:
    """Return this process's client: a forked worker must not share its parent's sockets."""
    from dagster_adjunct.resources.objects.s3_store import S3Request, create_s3_client

    return create_s3_client(options, S3Request("opening S3"))


def source_changed_error(tree: FileTree, file: ListedFile, what: str) -> errors.SourceChangedError:
    """Return the error for a file that has changed since it was listed; `what` says how, such as
    "is gone".
    """
    place = f"{tree.url}/{file.path}"
    problem = (
        f"{place} {what} after it was listed with {file.size:,} bytes, modified"
        f" {file.modified:%F %T}."
    )
    step = (
        "Run it again. Write the completion object when all files are complete, and remove it"
        " before replacing any."
    )
    return errors.SourceChangedError(problem, step, file=place)


def _may_follow(folder: str, after: str) -> bool:
    """Return whether a file in this folder ("NAME/") may have a path after the path `after`."""
    return folder > after or after.startswith(folder)


def _listed_local_file(path: str, facts: os.stat_result) -> ListedFile:
    """Return a local file as listed; its ETag is made of size, inode and modification time."""
    etag = f"{facts.st_size:x}-{facts.st_ino:x}-{facts.st_mtime_ns:x}"
    return ListedFile(path, facts.st_size, etag, _time_of(facts))


def _time_of(facts: os.stat_result) -> datetime:
    """Return when a file was modified; the nearest time that Python has for one that it has not."""
    try:
        return datetime.fromtimestamp(facts.st_mtime, UTC)
    except (ValueError, OverflowError):
        return _FIRST_TIME if facts.st_mtime < 0 else _LAST_TIME


def _require_utf8_name(url: str, file: ListedFile) -> ListedFile:
    """Return the file. Raises ConfigurationError if its name is not UTF-8."""
    try:
        file.path.encode()
    except UnicodeEncodeError:
        problem = f"{url} has a file whose name is not UTF-8: {file.path!r}."
        raise errors.ConfigurationError(problem, "Rename or move it.", url=url) from None
    return file
