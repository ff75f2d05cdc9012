"""A heartbeat: an object that its owner rewrites regularly, so that its age shows whether the owner is alive.

Others consider the owner dead when the object, by the store's clock, is older than its time to live. The owner itself
trusts the heartbeat for 90% of that time, counted from before the last write was sent, so that it notices first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import AdjunctError, ObjectNotFoundError, PreconditionFailedError, TransientError

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.store import ObjectStore

_TRUSTED_SHARE = 0.9


class Heartbeat:
    """Rewrites `key` with `body()`, by a thread of its own, from `start` to `end`.

    `not_ours(data)` says of what was found there instead whose it is, and "" of a write of ours whose reply was lost.
    """

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        body: Callable[[], bytes],
        ttl: timedelta,
        *,
        not_ours: Callable[[bytes], str],
        log: logging.Logger,
    ) -> None:
        self._store, self._key, self._body, self._ttl = store, key, body, ttl
        self._not_ours, self._log = not_ours, log
        self._etag: str | None = None
        self._written = _clock()
        self._failure = ""
        # What its thread is to do before it ends. Unlike an event it may be told so at any point of another thread's
        # work, the collection of garbage included.
        self._last: SimpleQueue[Callable[[str], object] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def write(self, write: Callable[[bytes], str]) -> None:
        """Write the object a first time, by `write`, which gives its ETag."""
        self._written = _clock()
        self._etag = write(self._body())

    def start(self) -> None:
        """Renew it from now on."""
        self._thread = threading.Thread(target=self._run, name="adjunct-lease", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str:
        """Why it can't be relied on any more; "" as long as it can."""
        if not self._failure and self._is_overdue():
            self._failure = f"it lives for {self._ttl} and was not renewed in time"
        return self._failure

    def check(self) -> None:
        """Notice now, not with the next renewal, that somebody else has it; a store that can't tell changes nothing."""
        with self._lock, suppress(TransientError):
            if self._etag is None or self._failure:
                return
            try:
                stored = self._store.get(self._key)
            except ObjectNotFoundError:
                self._failure = "it had expired and was removed"
                return
            if stored.etag != self._etag:
                self._failure = self._not_ours(stored.data)

    def renew(self) -> None:
        """Write it anew, which moves its expiry. One that was removed or taken meanwhile is lost, not made again."""
        with self._lock:
            if self._etag is None or self._failure:
                return
            began = _clock()
            self._failure = self._rewrite(self._etag)
            if not self.problem:  # else it was written too late: somebody may have seen it expired
                self._written = began

    def end(self, remove: Callable[[str], object]) -> None:
        """Stop renewing and `remove` the object, given its ETag; what can't be removed now expires. Safe to repeat."""
        self._last.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock, suppress(AdjunctError):
            if self._etag is not None:
                etag, self._etag = self._etag, None
                remove(etag)

    def end_in_background(self, remove: Callable[[str], object]) -> None:
        """Let its own thread end it, waiting for nothing: for what runs where an object is collected."""
        self._last.put(remove)

    def _rewrite(self, etag: str) -> str:
        try:
            self._etag = self._store.put_if_match(self._key, self._body(), etag)
        except (PreconditionFailedError, ObjectNotFoundError):
            try:
                stored = self._store.get(self._key)
            except ObjectNotFoundError:
                return "it had expired and was removed"
            if stored.etag == etag:
                return "it had expired and was removed"
            return self._not_ours(stored.data) or self._rewrite(stored.etag)
        return ""

    def _is_overdue(self) -> bool:
        """Whether it may have expired, with a margin: stores round the times that they tell to seconds."""
        passed = max(now - then for now, then in zip(_clock(), self._written, strict=True))
        return passed >= _TRUSTED_SHARE * self._ttl.total_seconds()

    def _run(self) -> None:
        while True:
            try:
                remove = self._last.get(timeout=self._ttl.total_seconds() / 4)
            except Empty:
                pass
            else:
                if remove is not None:
                    self.end(remove)
                return
            try:
                self.renew()
            except TransientError as error:
                self._log.warning("the lease %s was not renewed: %s", self._key, error)
            except AdjunctError as error:
                self._failure = error.problem
            if self.problem:
                return


def _clock() -> tuple[float, float]:
    """Return two clocks: one that nobody sets, and one that goes on while the machine sleeps."""
    return time.monotonic(), time.time()
