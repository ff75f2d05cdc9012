"""A heartbeat: an object that its owner rewrites regularly, so that its age shows whether the owner
is alive.

Others consider the owner dead when the object, by the store's clock, is older than its time to
live. The owner itself trusts the heartbeat for 90% of that time, counted from before the last write
was sent, also while the machine sleeps, so that it notices before others do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue

from dagster_adjunct.resources.errors import (
    AdjunctError,
    ObjectNotFoundError,
    PreconditionFailedError,
    TransientError,
)
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.times import Deadline, read_clocks

TRUSTED_SHARE = 0.9
"""The share of its time to live for which the owner trusts a heartbeat: stores round times to
seconds.
"""
_REMOVED = "it was removed, by others after it had expired or by hand"


class Heartbeat:
    """Rewrites the object `key` with `body()` in a background thread, from `start` to `end`.

    Others may consider the owner dead if the object is older than `ttl`. `not_ours(data)` describes
    the owner of an object with other contents than the last known; it returns "" if that was our
    own write, whose reply was lost.

    A heartbeat that was not renewed in time is lost, unless it `revives`: then it can be renewed as
    long as the object is the owner's. That is for objects that others replace, by its ETag, before
    they act on its age.
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
        revives: bool = False,
    ) -> None:
        self._store = store
        self._key = key
        self._body = body
        self._ttl = ttl
        self._not_ours = not_ours
        self._log = log
        self._revives = revives
        self.on_renewal: Callable[[Deadline], object] = lambda deadline: None
        self.on_loss: Callable[[], object] = lambda: None
        self._etag: str | None = None
        self._set_deadline(read_clocks())
        self._failure = ""
        # How the thread is to end: None, or the `remove` to call. A SimpleQueue, because its `put`
        # is reentrant: a finalizer may call it.
        self._last: SimpleQueue[Callable[[str], object] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def write(
        self, write: Callable[[bytes], str], began: tuple[float, float] | None = None
    ) -> None:
        """Create the object by `write`, which returns its ETag. `began` is the time before that,
        by default now.
        """
        began = began or read_clocks()
        self._etag = write(self._body())
        self._set_deadline(began)

    def start(self) -> None:
        """Start renewing the object in the background."""
        self._thread = threading.Thread(target=self._run, name="adjunct-lease", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str:
        """The reason why the heartbeat is lost; "" while it is valid."""
        if not self._failure and not self._revives and self.deadline.has_passed():
            self._failure = f"it lives for {self._ttl} and was not renewed in time"
        return self._failure

    def check(self) -> None:
        """Read the object and set `problem` if it was removed or taken over. Ignores transient
        errors of the store.
        """
        with self._lock, suppress(TransientError):
            if self._etag is None or self._failure:
                return
            try:
                stored = self._store.get(self._key)
            except ObjectNotFoundError:
                self._failure = _REMOVED
            else:
                if stored.etag != self._etag:
                    self._failure = self._not_ours(stored.data)

    def renew(self) -> None:
        """Rewrite the object, which makes it new again. If it was removed or taken over, set
        `problem` instead.
        """
        with self._lock:
            if self._etag is None or self._failure:
                return
            began = read_clocks()
            self._failure = self._rewrite(self._etag)
            if not self.problem:
                # Otherwise the write came too late: others may have seen the object expire.
                self._set_deadline(began)

    def _set_deadline(self, began: tuple[float, float]) -> None:
        self.deadline = Deadline(began, TRUSTED_SHARE * self._ttl.total_seconds())
        self.on_renewal(self.deadline)

    def end(self, remove: Callable[[str], object]) -> None:
        """Stop renewing and call `remove(etag)`. If that fails, the object stays until it
        expires. Safe to repeat.
        """
        self._last.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock, suppress(AdjunctError):
            if self._etag is not None:
                etag = self._etag
                self._etag = None
                remove(etag)

    def end_in_background(self, remove: Callable[[str], object]) -> None:
        """Let the background thread call `end`, without waiting: for finalizers."""
        self._last.put(remove)

    def _rewrite(self, etag: str) -> str:
        try:
            self._etag = self._store.put_if_match(self._key, self._body(), etag)
        except (PreconditionFailedError, ObjectNotFoundError):
            try:
                stored = self._store.get(self._key)
            except ObjectNotFoundError:
                return _REMOVED
            if stored.etag == etag:
                return _REMOVED
            return self._not_ours(stored.data) or self._rewrite(stored.etag)
        return ""

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
                self.on_loss()
                return
