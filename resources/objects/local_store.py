"""An object store in a local folder, with the promises of `ObjectStore`: atomic writes, races
with one winner.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.objects import store
from dagster_adjunct.resources.objects.store import (
    LAKE_DOCUMENT,
    PROBE_PREFIX,
    ObjectInfo,
    ObjectStore,
    StoreDescriptor,
    StoredObject,
)

if TYPE_CHECKING:
    from io import BufferedReader


_INTERNAL = ".adjunct-store"
_LOCKS = 64
_HASHED_SIZE = 1024 * 1024
_STALE_SECONDS = 24 * 3600
# How file systems that have no hard links refuse them.
_NO_LINKS = {
    errno.EPERM,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.EXDEV,
    errno.EMLINK,
    errno.EINVAL,
}

P = ParamSpec("P")
T = TypeVar("T")


def _translates_os_errors(
    request: Callable[Concatenate[LocalStore, P], T],
) -> Callable[Concatenate[LocalStore, P], T]:
    """Translate errors of the file system into Adjunct's."""

    @functools.wraps(request)
    def asked(self: LocalStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return request(self, *args, **kwargs)
        except OSError as error:
            key = next((given for given in args if isinstance(given, str)), "")
            raise self._translate_os_error(error, f"object {key!r}") from error

    return asked


class LocalStore(ObjectStore):
    """Objects as files below `root`.

    Create: the bytes go to a synced temporary file inside the root, which is then hard-linked to
    its name. Linking fails if the name exists, so exactly one creator wins and nobody sees a
    partial file. Replace: the ETag is compared and the file renamed under an OS lock, which ends
    with its process. Once an object has its name, no error of what follows but its sync denies it:
    cleaning up may fail. A link or rename that a file system of the network has repeated, so that
    it met itself, is recognized by the inode.

    The ETag of up to 1 MiB (pointers and manifests are smaller) is a hash of the content. The ETag
    of a larger file consists of its size, inode and time, so that listing does not read it. Works
    on local file systems, and on NFSv4 if all machines mount it with locks. If the folder is
    deleted while the store is in use, the probe of a new lake (PROBE_PREFIX) creates it again.
    """

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root).expanduser().absolute()
        self._internal = self._root / _INTERNAL
        self._staging = self._internal / "staging"
        self._ready = False

    @property
    def url(self) -> str:
        return str(self._root)

    @property
    def descriptor(self) -> StoreDescriptor:
        return LocalDescriptor(self.url)

    @_translates_os_errors
    def get(self, key: str) -> StoredObject:
        with self._open(key) as file:
            data = file.read()
            return StoredObject(data, _etag(data, os.fstat(file.fileno())))

    @_translates_os_errors
    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._open(key) as file:
            file.seek(start)
            return file.read(length)

    @_translates_os_errors
    def head(self, key: str) -> ObjectInfo | None:
        return _object_info(key, self._path(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        infos = map(self._object_info, self._keys(store.check_prefix(prefix)))
        yield from (info for info in infos if info is not None)

    @_translates_os_errors
    def _object_info(self, key: str) -> ObjectInfo | None:
        """Return the metadata of a listed file; None if it was deleted since."""
        # Files with other names than `check_key` accepts too.
        return _object_info(key, self._root / key)

    def _keys(self, prefix: str) -> tuple[str, ...]:
        """Return all keys that begin with the prefix, sorted."""
        folder = self._root / prefix.rpartition("/")[0]
        keys = []
        for parent, folders, files in os.walk(folder, onerror=self._raise_unless_missing):
            # Names that begin with a dot, such as the internal folder, are never objects.
            folders[:] = [name for name in folders if not name.startswith(".")]
            base = Path(parent).relative_to(self._root)
            keys += [(base / name).as_posix() for name in files if not name.startswith(".")]
        return tuple(sorted(key for key in keys if key.startswith(prefix)))

    @_translates_os_errors
    def download(self, key: str, path: Path) -> None:
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
        try:
            with self._open(key) as source, temporary.open("wb") as target:
                shutil.copyfileobj(source, target, 1024 * 1024)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @_translates_os_errors
    def put(self, key: str, data: bytes) -> str:
        path = self._path(key)
        with self._temporary_file(key, data) as temporary, self._lock(key):
            return self._replace(temporary, path, key)

    @_translates_os_errors
    def put_if_absent(self, key: str, data: bytes) -> str:
        path = self._path(key)
        with self._temporary_file(key, data) as temporary:
            return self._create(temporary, path, key)

    @_translates_os_errors
    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        path = self._path(key)
        with self._temporary_file(key, data) as temporary, self._lock(key):
            found = _object_info(key, path)
            if found is None or found.etag != etag:
                raise store.etag_error(self.url, key, found, etag)
            return self._replace(temporary, path, key)

    @_translates_os_errors
    def upload(self, path: Path, key: str) -> str:
        target = self._path(key)
        is_staged = path.absolute().parent == self.staging_dir()
        copy = path.absolute() if is_staged else self._new_temporary(key)
        try:
            if not is_staged:
                # A link would let later writes to the caller's file change the object.
                shutil.copyfile(path, copy)
            with copy.open("rb") as file:
                os.fsync(file.fileno())
            return self._create(copy, target, key)
        finally:
            if not is_staged:
                with contextlib.suppress(OSError):
                    copy.unlink()

    @_translates_os_errors
    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return  # don't create the folders of a lock in an empty place
        self._prepare(key)
        with self._lock(key):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError):
                path.unlink()
            with contextlib.suppress(OSError):  # stops at the first folder that is not empty
                for folder in path.parents:
                    if folder == self._root:
                        break
                    folder.rmdir()

    def spark_uri(self, key: str) -> str:
        # Hadoop's Path escapes the path after the scheme itself, so it must be plain.
        # Spark expands patterns in it, and has no escape that works for both reads and tables.
        path = str(self._path(key))
        if set(path) & set("*[{\\"):
            problem = (
                f"Spark can't read {path!r}: it treats '*', '[', '{{' and '\\' in a path as a"
                " pattern."
            )
            step = "Move the lake to a folder without these characters."
            raise errors.ConfigurationError(problem, step, url=self.url, key=key)
        return f"file:{path}"

    def staging_dir(self) -> Path:
        self._prepare("")
        return self._staging

    def _path(self, key: str) -> Path:
        """Return the path of an object. Raises InvalidNameError for an unsafe key."""
        return self._root / store.check_key(key)

    def _raise_unless_missing(self, error: OSError) -> None:
        """Raise the error of a folder that can't be listed, whose objects would be left out
        silently.

        Ignores that a folder is missing.
        """
        is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        if not is_missing or self._root.is_file():
            raise self._translate_os_error(error, "what is below it") from error

    def _translate_os_error(self, error: OSError, what: str) -> errors.AdjunctError:
        """Return Adjunct's error for an error of the file system; `what` names the object.

        In this order: the root is a file; too many files are open; the root is missing, or may not
        be used; anything else, which may pass.
        """
        # Path.exists() raises where this user may not look.
        exists = os.path.exists(self._root)  # noqa: PTH110
        if exists and not self._root.is_dir():
            problem = f"{self.url} can't hold a lake: it is not a folder."
            return errors.ConfigurationError(
                problem, "Use a folder or s3://BUCKET/PREFIX.", argument="url"
            )
        reason, step = errors.describe_file_error(error, self.url)
        if error.errno == errno.EMFILE:
            return errors.ConfigurationError(
                f"{what} of {self.url} can't be opened: {reason}.", step, url=self.url
            )
        if error.errno in errors.REFUSED_ERRNOS or not exists:
            problem = f"folder {self.url} can't hold a lake: {reason} ({what})."
            return errors.ConfigurationError(
                problem, "Use a folder that this user may read and write.", argument="url"
            )
        problem = f"the file system of {self.url} failed at {what}: {reason}."
        # An object is made by the link or the rename at the end of a request, which need room
        # themselves.
        is_full = errors.needs_room(error)
        return errors.StoreUnavailableError(
            problem, step, url=self.url, without_effect=is_full, needs_action=is_full
        )

    def _open(self, key: str) -> BufferedReader:
        """Open the file of an object. Raises ObjectNotFoundError."""
        try:
            return self._path(key).open("rb")
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            if self._root.is_file():
                raise
            raise store.object_missing_error(self.url, key) from None

    def _prepare(self, key: str) -> None:
        """Make the internal folders before the object `key` is written. Raises LakeNotFoundError if
        the lake was deleted while the store was in use.
        """
        if self._ready and self._staging.is_dir():
            return
        may_create = not self._ready or key.startswith(PROBE_PREFIX)
        if not may_create and not (self._root / LAKE_DOCUMENT).exists():
            problem = f"the lake at {self.url} was deleted since it was opened."
            raise errors.LakeNotFoundError(
                problem, "Open it again: the first write creates a new lake.", url=self.url
            )
        try:
            self._staging.mkdir(parents=True, exist_ok=True)
            (self._internal / "locks").mkdir(exist_ok=True)
        except OSError as error:
            raise self._translate_os_error(error, "making it") from error
        self._delete_stale_files()
        self._ready = True

    def _delete_stale_files(self) -> None:
        """Delete temporary files that are older than a day, so not being written: those of
        killed processes.
        """
        oldest = time.time() - _STALE_SECONDS
        for path in self._staging.iterdir():
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < oldest:
                    path.unlink()

    def _new_temporary(self, key: str) -> Path:
        """Return the path of a new temporary file for the object `key`."""
        self._prepare(key)
        return self._staging / f"{uuid.uuid4().hex}.tmp"

    @contextlib.contextmanager
    def _temporary_file(self, key: str, data: bytes) -> Iterator[Path]:
        """Provide a synced temporary file with this data within the context."""
        path = self._new_temporary(key)
        try:
            with path.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield path
        finally:
            with contextlib.suppress(OSError):  # it is deleted when it is a day old
                path.unlink()

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        """Hold the key's OS lock against other threads and processes; the kernel releases it if
        we are killed.
        """
        name = f"{zlib.crc32(key.encode()) % _LOCKS:02d}"
        with (self._internal / "locks" / name).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # closing the file unlocks it, too
                    fcntl.flock(file, fcntl.LOCK_UN)

    def _create(self, temporary: Path, path: Path, key: str) -> str:
        """Give a temporary file its name, unless that exists, and return its ETag."""
        etag = _etag_of(temporary)
        while True:
            try:
                with self._folder_of(path, key) as folder:
                    self._link(temporary, path, key)
                    self._sync_folder(folder, path)
                    return etag
            except FileNotFoundError:
                if not temporary.exists():
                    raise
                # Otherwise a delete removed the empty folder that we had just created: try again.

    def _link(self, temporary: Path, path: Path, key: str) -> None:
        """Link a temporary file to its name. Raises ObjectExistsError if that exists."""
        links = temporary.stat().st_nlink
        try:
            os.link(temporary, path)
        except FileNotFoundError:
            raise
        except FileExistsError:
            if temporary.stat().st_nlink > links and _has_inode(path, temporary.stat()):
                return
            self._raise_if_folder(path, key)
            raise store.object_exists_error(self.url, key) from None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise errors.ConditionalWritesUnsupportedError(
                f"the file system of {self.url} can't create files atomically: hard links fail"
                f" ({error.strerror}).",
                "Put the lake on a local disk, NFSv4 or s3://.",
                url=self.url,
            ) from error

    def _replace(self, temporary: Path, path: Path, key: str) -> str:
        """Give a temporary file its name, in place of an existing file, and return its ETag."""
        etag = _etag_of(temporary)
        written = temporary.stat()
        while True:
            try:
                with self._folder_of(path, key) as folder:
                    self._raise_if_folder(path, key)
                    self._rename(temporary, path, written)
                    self._sync_folder(folder, path)
                    return etag
            except FileNotFoundError:
                if not temporary.exists():
                    raise
                # As in `_create`: try again.

    def _rename(self, temporary: Path, path: Path, written: os.stat_result) -> None:
        """Rename a temporary file, which was `written` so. Raises FileNotFoundError if its folder
        is gone.
        """
        try:
            temporary.replace(path)
        except FileNotFoundError:
            if not _has_inode(path, written):
                raise

    @contextlib.contextmanager
    def _folder_of(self, path: Path, key: str) -> Iterator[int]:
        """Make the folder of an object and open it, before the object gets its name: what fails
        here has no effect.
        """
        self._make_folder(path, key)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            yield folder
        finally:
            with contextlib.suppress(OSError):
                os.close(folder)

    def _make_folder(self, path: Path, key: str) -> None:
        """Make the folder of an object. Raises ConfigurationError if a part of its path
        is a file.
        """
        while True:
            try:
                return path.parent.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                if any(os.path.lexists(folder) and not folder.is_dir() for folder in path.parents):
                    raise self._folder_error(key, "a part of its key is an object there") from None
                # Otherwise a delete removed the empty folder between its creation and the check
                # that it is one.

    def _raise_if_folder(self, path: Path, key: str) -> None:
        """Raise ConfigurationError if there is a folder where the object would be."""
        if path.is_dir():
            raise self._folder_error(key, "it is the folder of other objects")

    def _folder_error(self, key: str, reason: str) -> errors.ConfigurationError:
        """Return the error for a key whose place is taken by a folder, or whose folder
        by a file.
        """
        problem = f"object {key!r} can't be stored in {self.url}: {reason}."
        step = "Use keys of which none is the folder of another."
        return errors.ConfigurationError(problem, step, url=self.url, key=key)

    def _sync_folder(self, folder: int, path: Path) -> None:
        """Sync the open folder, so that the file in it survives a power cut.

        Raises StoreUnavailableError where that fails: the file has its name, so that the outcome
        has to be read.
        """
        try:
            os.fsync(folder)
        except OSError as error:
            reason, step = errors.describe_file_error(error, self.url)
            problem = (
                f"the file system of {self.url} failed to sync {path.parent.name!r}: {reason}."
            )
            raise errors.StoreUnavailableError(problem, step, url=self.url) from error


def _object_info(key: str, path: Path) -> ObjectInfo | None:
    """Return the metadata of a file as those of an object; None if there is no such file."""
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            data = b""
            if stat.st_size <= _HASHED_SIZE:
                data = file.read()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    return ObjectInfo(
        key, stat.st_size, _etag(data, stat), datetime.fromtimestamp(stat.st_mtime, UTC)
    )


def _has_inode(path: Path, of: os.stat_result) -> bool:
    """Return whether a file is the one that has, or had, this status."""
    try:
        return os.path.samestat(path.stat(), of)
    except OSError:
        return False


def _etag_of(path: Path) -> str:
    """Return the ETag of a file that no one else writes; it is the same under another name. Raises
    FileNotFoundError.
    """
    info = _object_info("", path)
    if info is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return info.etag


def _etag(data: bytes, stat: os.stat_result) -> str:
    """Return the ETag of a file; `data` is its content, which is ignored for a large one."""
    if stat.st_size <= _HASHED_SIZE:
        return hashlib.blake2b(data, digest_size=16).hexdigest()
    return f"{stat.st_size:x}-{stat.st_ino:x}-{stat.st_mtime_ns:x}"


@dataclass(frozen=True, slots=True)
class LocalDescriptor(StoreDescriptor):
    """The folder of a store."""

    def connect(self) -> ObjectStore:
        return LocalStore(self.url)
