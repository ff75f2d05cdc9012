"""The commit protocol: immutable manifests, and a pointer that is replaced by compare-and-swap.

    {prefix}/CURRENT                              pointer: number, commit id, manifest key, nonce
    {prefix}/manifests/{number:012d}-{id}.json    manifest: number, id, parent's id, time, author,
                                                  body, SHA-256 of all this
    {prefix}/pages/{uuid}.json                    page: part of a long list, shared by the manifests
                                                  that refer to it

Replacing `CURRENT` is the commit. A process that dies before leaves an unreachable manifest and
nothing else. Reading costs two GETs and committing two PUTs, however long the history is. Long
lists go to pages, so that a commit does not write the whole history again.

To delete a log, a last commit records the deletion; then the objects are deleted. That commit and
its pointer stay, so that a concurrent writer loses its race. An interrupted deletion is repeated.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import takewhile
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

from pydantic import AwareDatetime, Field, ValidationError

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.documents import StoredDocument, first_validation_problem
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.objects.store import (
    ObjectInfo,
    ObjectStore,
    check_key,
    requests_at_once,
)
from dagster_adjunct.resources.threads import call_in_threads
from dagster_adjunct.resources.times import utc_now

FORMAT: Final = 1
NonEmptyText = Annotated[str, Field(min_length=1)]


class VersionedDocument(StoredDocument):
    """A document that stores its format version; `format` changes whenever the fields do."""

    format: Literal[1] = 1


class Pointer(VersionedDocument):
    """The content of `CURRENT`, which names the current commit. `nonce` makes the bytes of every
    pointer unique.
    """

    kind: NonEmptyText
    number: int = Field(ge=1)
    commit: NonEmptyText
    manifest: NonEmptyText
    nonce: NonEmptyText


class Manifest(VersionedDocument):
    """A stored commit: author, time, id of its parent, and the body, whose form depends on
    `kind`.
    """

    kind: NonEmptyText
    number: int = Field(ge=1)
    commit: NonEmptyText
    parent: NonEmptyText | None
    created_at: AwareDatetime
    by: NonEmptyText
    body: dict[str, Any]


class LakeDocument(VersionedDocument):
    """The content of `_adjunct/lake.json`: the lake's id, and when its store passed the probe."""

    kind: Literal["lake"] = "lake"
    id: NonEmptyText
    probed_at: AwareDatetime


_SEAL = b',"sha256":"%s"}'
_SEAL_LENGTH = len(_SEAL % (b"0" * 64))


def seal_json(data: bytes) -> bytes:
    """Return a JSON object of at least one member with a last member `sha256`, the SHA-256 of the
    object without it. What one flipped bit makes of a number or a name is valid JSON, too.
    """
    return data[:-1] + _SEAL % hashlib.sha256(data).hexdigest().encode()


def unseal_json(data: bytes) -> bytes | None:
    """Return what `seal_json` was given, None if these bytes are not what it returned."""
    content = data[:-_SEAL_LENGTH] + b"}"
    if seal_json(content) != data:
        return None
    return content


D = TypeVar("D", bound=StoredDocument)


def encode_document(document: VersionedDocument) -> bytes:
    """Return the document as JSON. Raises `ConfigurationError` for a body that JSON can't hold
    exactly.
    """
    fields = {}
    for name, value in document:
        fields[name] = value.isoformat() if isinstance(value, datetime) else value
    try:
        text = json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        problem = f"a {type(document).__name__.lower()} can't be written as JSON: {error}."
        step = "Use strings, numbers, booleans, None, lists and dictionaries only."
        raise errors.ConfigurationError(problem, step, argument="body") from error
    return text.encode()


def decode_document(cls: type[D], data: bytes, where: str, next_step: str) -> D:
    """Return the document in `data`. Raises `MalformedDocumentError`, which names `where` it was
    read.
    """
    try:
        return cls.model_validate_json(data)
    except ValidationError as error:
        with suppress(ValueError):
            _check_format(json.loads(data), where)
        problem = (
            f"{where} is not a valid {cls.__name__.lower()} of format {FORMAT}:"
            f" {first_validation_problem(error)} ({len(data)} bytes found)."
        )
        raise errors.MalformedDocumentError(problem, next_step, document=where) from None


def decode_body(cls: type[D], body: object, where: str, problem: str, next_step: str) -> D:
    """Return the document in a commit's body.

    Raises `MalformedDocumentError`, whose text begins with `where` and `problem`, then has the
    reason.
    """
    _check_format(body, where)
    try:
        return cls.model_validate(body)
    except ValidationError as error:
        problem = f"{where} {problem}: {first_validation_problem(error)}."
        raise errors.MalformedDocumentError(problem, next_step, document=where) from error


def _check_format(body: object, where: str) -> None:
    """Raise `MalformedDocumentError` for a document that a newer release wrote."""
    found = None
    if isinstance(body, Mapping):
        found = body.get("format")
    if isinstance(found, int) and found > FORMAT:
        problem = f"{where} has format {found}; this release of Adjunct reads format {FORMAT}."
        step = "Upgrade dagster-adjunct: a newer version wrote this."
        raise errors.MalformedDocumentError(problem, step, document=where)


S = TypeVar("S")
T = TypeVar("T")

_SWAP_ATTEMPTS = 6
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0
_UNKNOWN_TIME = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit. `number` counts from 1 without gaps; `parent` is the id of the previous commit, or
    None.

    `etag` is that of the pointer. It is only known for a commit that was read as the current one or
    was just made.
    """

    number: int
    id: str
    parent: str | None
    manifest_key: str
    created_at: datetime
    by: str
    body: dict[str, Any]
    etag: str | None = field(default=None, compare=False)


_ATTEMPTS = 20


def retry_conflicts(decide: Callable[[], Callable[[], T]], *, attempts: int = _ATTEMPTS) -> T:
    """Call `decide`, then the function that it returns, which commits; return that function's
    result.

    After a conflict, pause and decide again. `decide` reads the current state and must be safe to
    repeat. Its own errors are raised at once, including a `CommitConflictError`. A conflict of the
    commit is raised after `attempts` (at least one).
    """
    return commit_with_rebase(
        decide(), lambda commit: commit(), lambda _: decide(), attempts=attempts
    )


def commit_with_rebase(
    seen: S,
    commit: Callable[[S], T],
    catch_up: Callable[[S], S | None],
    *,
    attempts: int = _ATTEMPTS,
) -> T:
    """Return the result of `commit(seen)`; after a conflict, pause and repeat it on the state that
    `catch_up` returns.

    If `catch_up(seen)` returns None, or after `attempts` (at least one), the conflict is raised.
    Errors of `catch_up` are raised at once.
    """
    for attempt in range(attempts - 1):
        try:
            return commit(seen)
        except errors.CommitConflictError:
            _back_off(attempt)
            current = catch_up(seen)
            if current is None:
                raise
        seen = current
    return commit(seen)


MANIFESTS_KEPT = 200
"""How many of a log's newest manifests `list_old_manifests` leaves out, whatever their age."""
_KEPT_BYTES = 64 * 1024 * 1024
_KEPT_COMMITS = 8


class ManifestCache:
    """A cache of the manifests that a process reads or writes in a `while_kept` block; threads may
    nest such blocks.

    So a run reads each manifest once. Manifests never change, except that an erasure takes keys out
    of those of earlier commits, which nobody needs. Thread-safe; pickles as an empty cache.
    """

    def __init__(self) -> None:
        # Only for entering and leaving blocks: a process may fork while another thread reads.
        self._lock = threading.Lock()
        self._open_blocks = 0
        self._size = 0  # in bytes
        self._kept: dict[str, bytes] = {}  # by key
        # The keys of the manifests that are kept of each log, oldest first, by their folder.
        self._of_log: dict[str, deque[str]] = {}

    def __reduce__(self) -> tuple[type[ManifestCache], tuple[()]]:
        return ManifestCache, ()

    @contextmanager
    def while_kept(self) -> Iterator[None]:
        """Keep manifests until all blocks have ended: of each log the last 8, about 64 MiB in
        total.
        """
        with self._lock:
            self._open_blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._open_blocks -= 1
                if not self._open_blocks:
                    self._clear()

    def find(self, key: str) -> bytes | None:
        """Return the manifest of this key, if it is kept."""
        return self._kept.get(key)

    def add(self, key: str, manifest: bytes) -> None:
        """Keep a manifest, if a block is open."""
        if not self._open_blocks or key in self._kept:
            return
        if self._size + len(manifest) > _KEPT_BYTES:
            self._clear()
        self._kept[key] = manifest
        self._size += len(manifest)
        of_log = self._of_log.setdefault(key.rpartition("/")[0], deque())
        of_log.append(key)
        if len(of_log) > _KEPT_COMMITS:
            self._size -= len(self._kept.pop(of_log.popleft(), b""))

    def _clear(self) -> None:
        """Forget all manifests."""
        self._kept = {}
        self._of_log = {}
        self._size = 0


class _StoredPointer(NamedTuple):
    """The pointer of a log, with the ETag of its object."""

    pointer: Pointer
    etag: str


class _Outcome(NamedTuple):
    """Whether a commit happened, and the pointer's ETag after it, None if others have committed
    since.
    """

    happened: bool
    etag: str | None = None


class CommitLog:
    """The commits of one stream, dataset or batch log below `prefix`.

    `kind` ("stream", "dataset", …) is stored, and checked when a commit is read. Thread-safe; has
    no state besides the store, and the cache of its lake.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        kind: str,
        *,
        clock: Callable[[], datetime] = utc_now,
        cache: ManifestCache | None = None,
    ) -> None:
        self.store = store
        self._cache = cache or ManifestCache()
        self.prefix = check_key(prefix)
        self.kind = check_name("kind", kind)
        self.now = clock

    @property
    def pointer_key(self) -> str:
        """The key of the pointer, `CURRENT`."""
        return f"{self.prefix}/CURRENT"

    def pointer_etag(self) -> str | None:
        """Return the ETag of the pointer, which changes with each commit; None before the first.
        One HEAD.
        """
        found = self.store.head(self.pointer_key)
        if found is None:
            return None
        return found.etag

    def current(self) -> Commit | None:
        """Return the current commit, or None if there is none. Two GETs; one if its manifest is
        kept.
        """
        found = self._read_pointer()
        if found is None:
            return None
        return self._read_current(found)

    def head(self) -> Commit | None:
        """Return the current commit from the pointer alone, to commit after one whose manifest is
        damaged.

        Its body, parent, time and author are empty. Raises MalformedDocumentError for a pointer
        that can't be read.
        """
        found = self._read_pointer()
        if found is None:
            return None
        at = found.pointer
        return Commit(at.number, at.commit, None, at.manifest, _UNKNOWN_TIME, "", {}, found.etag)

    def commits_before(self, number: int) -> Iterator[Commit]:
        """Yield the readable commits before this number, newest first, by listing the manifests.

        Leaves out manifests that can't be read, and numbers with several manifests: only one of
        these won the race, and only its successor tells which.
        """
        numbered: dict[int, list[str]] = defaultdict(list)  # the keys of manifests
        for item in self.store.list(f"{self.prefix}/manifests/"):
            text = item.key.rsplit("/", 1)[-1].partition("-")[0]
            if text.isdecimal() and int(text) < number:
                numbered[int(text)].append(item.key)
        for _, keys in sorted(numbered.items(), reverse=True):
            with suppress(errors.MalformedDocumentError, errors.ObjectNotFoundError):
                if len(keys) == 1:
                    yield self.read(keys[0])

    def read(self, manifest_key: str) -> Commit:
        """Return the commit of this manifest, whatever `CURRENT` contains.

        Raises `ObjectNotFoundError` and `MalformedDocumentError`.
        """
        data = self._read_manifest(manifest_key)
        step = (
            "Restore this object from a backup or an older object version; other commits of"
            f" {self.prefix} are intact."
        )
        where = f"manifest {manifest_key!r} in {self.store.url}"
        content = unseal_json(data)
        if content is None:
            with suppress(ValueError):
                _check_format(json.loads(data), where)
            problem = f"{where} differs from its own SHA-256 ({len(data)} bytes found)."
            raise errors.MalformedDocumentError(problem, step, document=where)
        manifest = decode_document(Manifest, content, where, step)
        expected = self.manifest_key(manifest.number, manifest.commit)
        if manifest.kind != self.kind or manifest_key != expected:
            problem = (
                f"manifest {manifest_key!r} in {self.store.url} is of kind {manifest.kind!r} and"
                f" belongs at {expected!r}; expected kind {self.kind!r} here."
            )
            step = "It may have been copied or renamed: restore the original object."
            raise errors.MalformedDocumentError(problem, step, document=manifest_key)
        self._cache.add(manifest_key, data)
        return _commit_of(manifest, manifest_key)

    def _read_manifest(self, manifest_key: str) -> bytes:
        """Return the bytes of a manifest, from the cache if it is kept."""
        return self._cache.find(manifest_key) or self.store.get(manifest_key).data

    def history(self, limit: int | None = None) -> Iterator[Commit]:
        """Yield the current commit, its parent and so on, until a manifest has been deleted by
        maintenance.
        """
        commit = self.current()
        while commit is not None and limit != 0:
            yield commit
            limit = None if limit is None else limit - 1
            commit = self._parent_of(commit)

    def list_old_manifests(self, limit: datetime) -> list[ObjectInfo]:
        """Return the manifests to delete: those stored before the time `limit`, except the
        newest MANIFESTS_KEPT.
        """
        found = self._read_pointer()
        if found is None:
            return []
        current = found.pointer.number
        if current <= MANIFESTS_KEPT:
            return []
        # With the id "0", the key sorts before all manifests of this number.
        first_kept = self.manifest_key(current - MANIFESTS_KEPT, "0")

        def is_old(item: ObjectInfo) -> bool:
            return item.key < first_kept and item.modified <= limit

        # Oldest first: of a long history, only the beginning is listed.
        return list(takewhile(is_old, self.store.list(f"{self.prefix}/manifests/")))

    def commit(
        self,
        parent: Commit | None,
        body: dict[str, Any],
        *,
        by: str,
        commit_id: str | None = None,
        checks: Sequence[Callable[[], object]] = (),
    ) -> Commit:
        """Commit `body` after `parent` (None: as the first commit) and return the commit.

        Raises `CommitConflictError` if another commit followed `parent`; then this one has no
        effect. Raises `CommitStateUnknownError` if the store did not report whether the commit
        happened, and `StoreUnavailableError` if it certainly did not. `commit_id` must be new for
        each attempt. `checks` are called before the pointer is replaced: what they raise prevents
        the commit.
        """
        return self._commit(parent, self._etag_of(parent), body, by, commit_id, checks)

    def continue_from(self, other: CommitLog, body: dict[str, Any], *, by: str) -> Commit:
        """Copy the history of another log into this one, commit `body` after it, and return the
        commit.

        The other log does not change. Safe to repeat until it returns. Raises CommitConflictError
        if this log has commits already.
        """
        newest = other.current()
        for commit in other.history():
            data = other._read_manifest(commit.manifest_key)
            with suppress(errors.ObjectExistsError):
                self.store.put_if_absent(self.manifest_key(commit.number, commit.id), data)
        return self._commit(newest, None, body, by)

    def _commit(
        self,
        parent: Commit | None,
        expected: str | None,
        body: dict[str, Any],
        by: str,
        commit_id: str | None = None,
        checks: Sequence[Callable[[], object]] = (),
    ) -> Commit:
        """Store a manifest that follows `parent`, and let the pointer name it if the pointer's ETag
        is still `expected` (None: there is no pointer).

        `checks` run while the manifest is stored; if one raises, nothing is committed.
        """
        at = self.now()
        number = 1
        parent_id = None
        if parent is not None:
            at = max(at, parent.created_at)  # times ascend: `as_of` bisects them
            number = parent.number + 1
            parent_id = parent.id
        new_id = check_name("commit", commit_id or uuid.uuid4().hex)
        key = self.manifest_key(number, new_id)
        if not by:
            raise errors.ConfigurationError(
                f"a commit to {self.prefix} has no author.", "Pass by=….", argument="by"
            )
        mine: Any = {"kind": self.kind, "number": number, "commit": new_id}
        manifest = Manifest(**mine, parent=parent_id, created_at=at, by=by, body=body)
        pointer = Pointer(**mine, manifest=key, nonce=uuid.uuid4().hex)
        data = seal_json(encode_document(manifest))

        def store_manifest() -> None:
            try:
                self.store.put_if_absent(key, data)
            except errors.ObjectExistsError:
                # Equal bytes, including the time, mean that it is our own: the request was repeated
                # on its way.
                if self.store.get(key).data != data:
                    problem = (
                        f"commit id {new_id!r} was used before in {self.prefix}, at number"
                        f" {number}."
                    )
                    step = "Use a new id for each attempt."
                    raise errors.ConfigurationError(problem, step, argument="commit_id") from None

        call_in_threads(*checks, store_manifest, at_once=requests_at_once(self.store))
        self._cache.add(key, data)
        etag = self._swap(expected, pointer)
        return replace(_commit_of(manifest, key), etag=etag)

    def transact(
        self,
        decide: Callable[[Commit | None], dict[str, Any] | None],
        *,
        by: str,
        attempts: int = _ATTEMPTS,
        seen: Commit | None = None,
    ) -> Commit | None:
        """Commit the body that `decide(current)` returns and return the commit; after a conflict,
        decide again.

        `decide` may be called several times, and only what its last call returns is committed: side
        effects of the others must do no harm. If it returns None nothing is committed, and the
        current commit is returned. It first decides over `seen`, a commit that was read as the
        current one; by default that is read now. Raises `CommitConflictError` after `attempts`, and
        what `commit` raises.
        """

        def decide_over(current: Commit | None) -> Callable[[], Commit | None]:
            body = decide(current)
            if body is None:
                return lambda: current
            return lambda: self.commit(current, body, by=by)

        return commit_with_rebase(
            decide_over(seen or self.current()),
            lambda commit: commit(),
            lambda _: decide_over(self.current()),
            attempts=attempts,
        )

    def _swap(self, expected: str | None, pointer: Pointer) -> str | None:
        """Replace the pointer and return its new ETag; None if that succeeded but others have
        committed since. Raises CommitConflictError, and CommitStateUnknownError if the outcome is
        unknown.
        """
        data = encode_document(pointer)
        problem: Exception | None = None
        for attempt in range(_SWAP_ATTEMPTS):
            try:
                return put_after(self.store, self.pointer_key, data, expected)
            except errors.RunLeaseLostError:  # nothing was sent; an earlier try may have committed
                outcome = self._resolve_earlier_try(expected, pointer, problem)
                if not outcome.happened:
                    raise
                return outcome.etag
            except (
                errors.ObjectExistsError,
                errors.PreconditionFailedError,
                errors.TransientError,
            ) as error:
                if problem is None and _had_no_effect(error):
                    raise
                # Even then our commit may have happened, if the request was repeated on its way.
                problem = error
            outcome = self._resolve_outcome(expected, pointer, problem)
            if outcome.happened:
                return outcome.etag
            _back_off(attempt)  # the pointer is still our parent's: repeat the same request
        raise self._unknown_error(pointer, problem)

    def _resolve_earlier_try(
        self, expected: str | None, pointer: Pointer, problem: Exception | None
    ) -> _Outcome:
        """Return whether an earlier try, which failed with `problem`, has committed; it has not if
        that is None, as there was none.
        """
        if problem is None:
            return _Outcome(happened=False)
        return self._resolve_outcome(expected, pointer, problem)

    def _resolve_outcome(
        self, expected: str | None, pointer: Pointer, problem: Exception
    ) -> _Outcome:
        """Return whether our commit, whose request failed with `problem`, happened; if not, it may
        be retried.

        Raises CommitConflictError if it did not happen and can't, CommitStateUnknownError if that
        is unknown.
        """
        try:
            found = self._read_pointer()
            if found is None:
                if expected is None:  # ours was to be the first commit, and still can be
                    return _Outcome(happened=False)
                raise self._conflict_error(pointer, "nothing")
            now = found.pointer
            if now.commit == pointer.commit and now.number == pointer.number:
                return _Outcome(happened=True, etag=found.etag)
            if found.etag == expected:
                return _Outcome(happened=False)
            is_later = now.number > pointer.number
            if is_later and self._descends_from(self._read_current(found), pointer):
                return _Outcome(happened=True)
        except (
            errors.TransientError,
            errors.ObjectNotFoundError,
            errors.MalformedDocumentError,
        ) as error:
            raise self._unknown_error(pointer, error) from problem
        raise self._conflict_error(pointer, f"number {now.number} ({now.commit})")

    def _descends_from(self, commit: Commit, pointer: Pointer) -> bool:
        """Whether a commit is, or follows, the one that the pointer names. Raises
        ObjectNotFoundError if the commits between them were deleted.
        """
        while commit.number > pointer.number:
            parent = self._parent_of(commit)
            if parent is None:
                problem = f"the commits before {commit.manifest_key!r} were deleted."
                raise errors.ObjectNotFoundError(problem, key=commit.manifest_key)
            commit = parent
        return commit.id == pointer.commit

    def _conflict_error(self, pointer: Pointer, found: str) -> errors.CommitConflictError:
        """Return the error for a commit that another one preceded; `found` is what the pointer
        names.
        """
        problem = (
            f"commit {pointer.number} of {self.prefix} lost a race: CURRENT is at {found}, expected"
            f" number {pointer.number - 1}."
        )
        return errors.CommitConflictError(
            problem, "Read the current commit and try again.", prefix=self.prefix
        )

    def _unknown_error(
        self, pointer: Pointer, error: Exception | None
    ) -> errors.CommitStateUnknownError:
        """Return the error for a commit of which nobody knows whether it happened."""
        problem = (
            f"commit {pointer.number} of {self.prefix} may or may not have happened:"
            f" {self.store.url} did not confirm it ({error})."
        )
        step = f"Check whether {pointer.commit!r} is in the history before you retry."
        return errors.CommitStateUnknownError(problem, step, prefix=self.prefix)

    def _read_pointer(self) -> _StoredPointer | None:
        """Return the pointer and its ETag, None before the first commit. Raises
        MalformedDocumentError.
        """
        try:
            stored = self.store.get(self.pointer_key)
        except errors.ObjectNotFoundError:
            return None
        where = f"pointer {self.pointer_key!r} in {self.store.url}"
        next_step = (
            "Restore this object from a backup or an older version. The commits in"
            f" {self.prefix}/manifests/ are intact: CommitLog.read(KEY) reads each of them."
        )
        pointer = decode_document(Pointer, stored.data, where, next_step)
        expected = self.manifest_key(pointer.number, pointer.commit)
        if pointer.kind != self.kind or pointer.manifest != expected:
            problem = (
                f"{where} is of kind {pointer.kind!r} and names {pointer.manifest!r}; expected kind"
                f" {self.kind!r} and {expected!r}."
            )
            raise errors.MalformedDocumentError(problem, next_step, document=where)
        return _StoredPointer(pointer, stored.etag)

    def _read_current(self, found: _StoredPointer) -> Commit:
        """Return the commit that this pointer names, or that the pointer names now if others have
        committed since. Raises MalformedDocumentError if its manifest is missing.
        """
        try:
            commit = self.read(found.pointer.manifest)
        except errors.ObjectNotFoundError:
            now = self._read_pointer()
            if now is not None and now.pointer != found.pointer:
                return self._read_current(now)  # the old manifest was deleted
            problem = (
                f"pointer {self.pointer_key!r} in {self.store.url} names"
                f" {found.pointer.manifest!r}, which is missing."
            )
            step = (
                "Restore that object from a backup or an older object version; older commits under"
                f" {self.prefix}/manifests/ are intact."
            )
            raise errors.MalformedDocumentError(problem, step, document=self.pointer_key) from None
        return replace(commit, etag=found.etag)

    def _parent_of(self, commit: Commit) -> Commit | None:
        """Return the commit before this one; None for the first, or if its manifest was deleted."""
        if commit.parent is None:
            return None
        try:
            return self.read(self.manifest_key(commit.number - 1, commit.parent))
        except errors.ObjectNotFoundError:
            return None

    def _etag_of(self, parent: Commit | None) -> str | None:
        """Return the ETag of the pointer to `parent`, None without a parent; reads the pointer if
        the commit has no ETag.

        Raises CommitConflictError if `parent` is no longer the current commit.
        """
        if parent is None:
            return None
        if parent.etag is not None:
            return parent.etag
        found = self._read_pointer()
        if found is not None:
            now = found.pointer
            if now.commit == parent.id and now.number == parent.number:
                return found.etag
        problem = (
            f"commit {parent.number} ({parent.id}) of {self.prefix} is no longer the current one."
        )
        raise errors.CommitConflictError(
            problem, "Read the current commit and try again.", prefix=self.prefix
        )

    def manifest_key(self, number: int, commit_id: str) -> str:
        """Return the key of this commit's manifest."""
        return f"{self.prefix}/manifests/{number:012d}-{commit_id}.json"


def _commit_of(manifest: Manifest, key: str) -> Commit:
    """Return the commit in a manifest with this key."""
    m = manifest
    return Commit(m.number, m.commit, m.parent, key, m.created_at, m.by, m.body)


def _had_no_effect(error: errors.AdjunctError) -> bool:
    """Whether the request that failed surely changed nothing."""
    return isinstance(error, errors.StoreUnavailableError) and bool(error.without_effect)


def commit_number(manifest_key: str) -> int:
    """Return the number of the commit whose manifest has this key."""
    return int(manifest_key.rsplit("/", 1)[1].partition("-")[0])


def put_after(store: ObjectStore, key: str, data: bytes, etag: str | None) -> str:
    """Replace the object that has this ETag (None: create it) and return the new ETag."""
    if etag is None:
        return store.put_if_absent(key, data)
    return store.put_if_match(key, data, etag)


def _back_off(attempt: int) -> None:
    """Sleep before the next attempt; the pause doubles with each, up to two seconds."""
    # With jitter, so that the same writers do not collide again.
    time.sleep(random.uniform(0.5, 1.0) * min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt))


@dataclass(frozen=True, slots=True)
class PageRef:
    """A reference to a page: its key, number of items, and the SHA-256 of its bytes."""

    key: str
    count: int
    sha256: str


def write_page(store: ObjectStore, prefix: str, items: Iterable[Any]) -> PageRef:
    """Store items as a new page below `{prefix}/pages/` and return its reference."""
    page = list(items)
    data = json.dumps(page, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    # Equal contents get a new key too, since the earlier page may be about to be deleted.
    key = f"{prefix}/pages/{uuid.uuid4().hex}.json"
    store.put_if_absent(key, data)
    return PageRef(key, len(page), hashlib.sha256(data).hexdigest())


def read_page(store: ObjectStore, ref: PageRef) -> list[Any]:
    """Return the page's items. Raises `ObjectNotFoundError`, and `ManifestMismatchError` if it
    was changed.
    """
    data = store.get(ref.key).data
    if hashlib.sha256(data).hexdigest() != ref.sha256:
        problem = (
            f"page {ref.key!r} in {store.url} differs from its manifest: found {len(data)} bytes"
            f" with SHA-256 {hashlib.sha256(data).hexdigest()}, expected {ref.sha256} with"
            f" {ref.count} items."
        )
        step = "Restore the object from a backup or an older object version."
        raise errors.ManifestMismatchError(problem, step, key=ref.key)
    items = json.loads(data)
    assert isinstance(items, list)
    return items


_DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class DeletedObjects:
    """The number and total bytes of deleted objects. `left`: some remain, because the log was
    recreated meanwhile.
    """

    objects: int
    size: int
    left: bool = False


def is_deletion_commit(commit: Commit | None) -> bool:
    """Return whether this commit records that the log was deleted."""
    return commit is not None and _DELETED in commit.body


def deletion_record(commit: Commit) -> dict[str, Any]:
    """Return what a deletion commit records: `at`, `by`, `reason`, and what the caller of
    `commit_deletion` added.
    """
    return dict(commit.body[_DELETED])


def commit_deletion(log: CommitLog, parent: Commit, *, reason: str, by: str, **more: Any) -> Commit:
    """Commit the deletion as the last commit. Raises CommitConflictError if another commit
    followed `parent`.
    """
    record = {"at": log.now().isoformat(), "by": by, "reason": reason, **more}
    return log.commit(parent, {_DELETED: record}, by=by)


def list_log_objects(log: CommitLog, spared: Collection[str] = ()) -> dict[str, int]:
    """Return the sizes of the objects below the log's prefix, by key, except its pointer and the
    keys `spared`.
    """
    sizes = {item.key: item.size for item in log.store.list(f"{log.prefix}/")}
    return {
        key: size for key, size in sizes.items() if key != log.pointer_key and key not in spared
    }


def exclude_newer_manifests(log: CommitLog, commit: Commit, keys: Collection[str]) -> list[str]:
    """Return the keys except the manifests of this commit and of later ones, since one of these
    may become current.
    """
    manifests = f"{log.prefix}/manifests/"

    def stays(key: str) -> bool:
        if key == commit.manifest_key:
            return True
        number = key.removeprefix(manifests)[:12]
        is_later = number.isdecimal() and int(number) > commit.number
        return key.startswith(manifests) and is_later

    return [key for key in keys if not stays(key)]
