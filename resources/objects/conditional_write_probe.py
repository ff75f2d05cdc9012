"""The probe that a store honours conditional writes; without them a commit would be a lottery."""

from __future__ import annotations

import contextlib
import uuid
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConditionalWritesUnsupportedError,
    ObjectExistsError,
    PreconditionFailedError,
)

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.object_store import ObjectStore

_INSTEAD = (
    "Use a store that honours conditional writes (Amazon S3, versitygw, MinIO, Ceph since Squid, a local folder), "
    "or upgrade this one."
)


def probe_conditional_writes(store: ObjectStore) -> None:
    """Return if the store refuses what it must, else raise `ConditionalWritesUnsupportedError`.

    Leaves no object behind.
    """
    key = f"_adjunct/probe/{uuid.uuid4().hex}"
    try:
        first = store.put_if_absent(key, b"first")
        if _accepts(lambda: store.put_if_absent(key, b"second"), ObjectExistsError):
            raise _refusal(store, "a second put-if-absent (PUT with If-None-Match: *) replaced the first")
        try:
            store.put_if_match(key, b"third", first)
        except PreconditionFailedError:
            raise _refusal(store, "a put-if-match (PUT with If-Match) with the current ETag was refused") from None
        if _accepts(lambda: store.put_if_match(key, b"fourth", first), PreconditionFailedError):
            raise _refusal(store, "a put-if-match (PUT with If-Match) with a stale ETag was accepted")
    finally:
        with contextlib.suppress(AdjunctError):
            store.delete(key)


def _accepts(write: object, refusal: type[AdjunctError]) -> bool:
    try:
        write()  # type: ignore[operator]
    except refusal:
        return False
    return True


def _refusal(store: ObjectStore, what: str) -> ConditionalWritesUnsupportedError:
    return ConditionalWritesUnsupportedError(
        f"store {store.url} does not honour conditional writes: {what}.", _INSTEAD, url=store.url
    )
