"""The probe that a store honours conditional writes; without them a commit would be a lottery."""

from __future__ import annotations

import contextlib
import uuid
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConditionalWritesUnsupportedError,
    ObjectExistsError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreUnavailableError,
)
from dagster_adjunct.resources.objects.object_store import PROBES

if TYPE_CHECKING:
    from collections.abc import Callable

    from dagster_adjunct.resources.objects.object_store import ObjectStore

_INSTEAD = (
    "Use a store that honours conditional writes (Amazon S3, versitygw, MinIO, Ceph since Squid, a local folder), "
    "or upgrade this one."
)


def probe_conditional_writes(store: ObjectStore) -> None:
    """Return if the store refuses what it must, else raise `ConditionalWritesUnsupportedError`.

    Nobody else writes to the probe's key. So what it holds says which writes were done, also where a reply was lost, or
    the store repeated a write by itself and answered the repeat. Leaves no object behind.
    """
    key = f"{PROBES}{uuid.uuid4().hex}"
    try:
        first = _done(store, key, b"first", lambda: store.put_if_absent(key, b"first"))
        if first is None:
            raise _refusal(store, "a put-if-absent (PUT with If-None-Match: *) of a new key was refused")
        if _done(store, key, b"second", lambda: store.put_if_absent(key, b"second")):
            raise _refusal(store, "a second put-if-absent (PUT with If-None-Match: *) replaced the first")
        if not _done(store, key, b"third", lambda: store.put_if_match(key, b"third", first)):
            raise _refusal(store, "a put-if-match (PUT with If-Match) with the current ETag was refused")
        if _done(store, key, b"fourth", lambda: store.put_if_match(key, b"fourth", first)):
            raise _refusal(store, "a put-if-match (PUT with If-Match) with a stale ETag was accepted")
    finally:
        with contextlib.suppress(AdjunctError):
            store.delete(key)


def _done(store: ObjectStore, key: str, data: bytes, write: Callable[[], str]) -> str | None:
    """Return the ETag that this write left, None where the store has refused it.

    Where the store does not say (StoreUnavailableError), and has not done it, it is asked once more.
    """
    for last in (False, True):
        try:
            return write()
        except (ObjectExistsError, PreconditionFailedError, StoreUnavailableError) as error:
            with contextlib.suppress(ObjectNotFoundError):
                stored = store.get(key)
                if stored.data == data:
                    return stored.etag
            if not isinstance(error, StoreUnavailableError):
                return None
            if last:
                raise
    raise AssertionError("unreachable")


def _refusal(store: ObjectStore, what: str) -> ConditionalWritesUnsupportedError:
    return ConditionalWritesUnsupportedError(
        f"store {store.url} does not honour conditional writes: {what}.", _INSTEAD, url=store.url
    )
