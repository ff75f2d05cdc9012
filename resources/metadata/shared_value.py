"""`SharedValue`: one small value that processes change by compare-and-swap, without a history.

    metadata/NAMESPACE/SCOPE/NAME.json      the value; whoever changes it puts a nonce in

For what changes several times a second and is worth nothing after a while: a change costs one request where nobody
else made one meanwhile, and leaves nothing behind to collect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from dagster_adjunct.resources.errors import (
    CommitConflictError,
    ObjectExistsError,
    ObjectNotFoundError,
    PreconditionFailedError,
)
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.objects.commit_log import retry_conflicts
from dagster_adjunct.resources.objects.object_store import Stored

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.lake import Lake

_ATTEMPTS = 20

T = TypeVar("T")


class SharedValue:
    """One value of a lake's metadata. For one thread at a time; any number of processes."""

    def __init__(self, lake: Lake, namespace: str, scope: str, name: str) -> None:
        checked = check_name("namespace", namespace), check_name("scope", scope), check_name("value", name)
        self._store, self._key = lake.store, f"metadata/{'/'.join(checked)}.json"
        self._seen: Stored | None = None

    def forget(self) -> None:
        """Read it before the next change: somebody else is likely to have made one."""
        self._seen = None

    def transact(self, decide: Callable[[bytes | None], tuple[bytes | None, T]]) -> T:
        """Write what `decide` makes of the value as it is, and return what else it decided; None writes nothing.

        After every conflict it decides again, so it must have no side effects; equal bytes are never written twice (a
        nonce). Raises StoreUnavailableError where it may have happened, and CommitConflictError after many conflicts.
        """
        return retry_conflicts(lambda: self._decided(decide), attempts=_ATTEMPTS)

    def _decided(self, decide: Callable[[bytes | None], tuple[bytes | None, T]]) -> Callable[[], T]:
        seen = self._seen or self._read()
        value, result = decide(None if seen is None else seen.data)

        def commit() -> T:
            if value is not None:
                self._write(value, seen)
            return result

        return commit

    def _read(self) -> Stored | None:
        try:
            self._seen = self._store.get(self._key)
        except ObjectNotFoundError:
            self._seen = None
        return self._seen

    def _write(self, value: bytes, seen: Stored | None) -> None:
        self._seen = None  # whatever comes of it, unless it is written
        try:
            if seen is None:
                etag = self._store.put_if_absent(self._key, value)
            else:
                etag = self._store.put_if_match(self._key, value, seen.etag)
        except (ObjectExistsError, PreconditionFailedError) as error:
            raise CommitConflictError(
                f"{self._key} in {self._store.url} was changed by somebody else meanwhile.",
                "It is read and decided again.",
                prefix=self._key,
            ) from error
        self._seen = Stored(value, etag)
