"""Records of builds: that one is running, and what one has finished.

    datasets/{name}/attempts/{attempt}.json     who builds, since when; renewed by being rewritten

The modification time of the record, by the store's clock, is what keeps a running build's files from being
discarded. A finished build is kept in it, so that a crash after it does not cost the build.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dagster_adjunct.resources.errors import AdjunctError, ObjectNotFoundError

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.lake import Lake

RENEWED_EVERY = timedelta(minutes=5)
# A record that was renewed within this time is of a build that is going on.
RUNNING = 3 * RENEWED_EVERY
_log = logging.getLogger("adjunct.dataset")


@dataclass(frozen=True, slots=True)
class AttemptInfo:
    """A build on record; `renewed` is by the store's clock."""

    id: str
    key: str
    renewed: datetime


class AttemptRenewal:
    """Keeps a build on record while the context lasts; `finish` leaves what it has built there."""

    def __init__(self, lake: Lake, dataset: str, attempt: str, by: str) -> None:
        self._store, self._key = lake.store, attempt_key(lake, dataset, attempt)
        self._body: dict[str, Any] = {"attempt": attempt, "by": by}
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._write()
        self._thread = threading.Thread(target=self._renew, name="adjunct-attempt", daemon=True)
        self._thread.start()
        return self

    def finish(self, body: dict[str, Any]) -> None:
        """Leave what was built on record."""
        with self._lock:
            self._body |= {"built": body}
        self._write()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _renew(self) -> None:
        while not self._stopped.wait(RENEWED_EVERY.total_seconds()):
            try:
                self._write()
            except AdjunctError as error:
                # Two more are tried before anybody takes the build for one that has ended.
                _log.warning("the build on record in %s was not renewed: %s", self._key, error)

    def _write(self) -> None:
        with self._lock:  # or a renewal that is on its way could end after `finish`, without what was built
            self._store.put(self._key, json.dumps(self._body).encode())


@contextmanager
def build_on_record(lake: Lake, dataset: str, attempt: str, by: str) -> Iterator[None]:
    """Keep a build on record while the context lasts, and no longer, for one that nobody takes up when it has died."""
    try:
        with AttemptRenewal(lake, dataset, attempt, by):
            yield
    finally:
        forget_attempt(lake, dataset, attempt)


def attempts(lake: Lake, dataset: str) -> Iterator[AttemptInfo]:
    """Yield the builds on record."""
    prefix = f"{lake.dataset_prefix(dataset)}/attempts/"
    for item in lake.store.list(prefix):
        yield AttemptInfo(item.key.removeprefix(prefix).removesuffix(".json"), item.key, item.modified)


def read_attempt(lake: Lake, dataset: str, attempt: str) -> dict[str, Any] | None:
    """Return what a build on record has finished, None while it runs or where there is none."""
    try:
        body = json.loads(lake.store.get(attempt_key(lake, dataset, attempt)).data)
    except (ObjectNotFoundError, ValueError):
        return None
    built = body.get("built") if isinstance(body, dict) else None
    return built if isinstance(built, dict) else None


def forget_attempt(lake: Lake, dataset: str, attempt: str) -> None:
    """Delete the record of a build that has ended; what can't be deleted now is garbage for discarding."""
    with suppress(AdjunctError):
        lake.store.delete(attempt_key(lake, dataset, attempt))


def attempt_key(lake: Lake, dataset: str, attempt: str) -> str:
    """Return where the record of a build is."""
    return f"{lake.dataset_prefix(dataset)}/attempts/{attempt}.json"
