"""How the owner of an object stays its owner: a `Heartbeat` rewrites it, a `Fence` asks before
anything leaves a process whether its run still holds the lease.

Others consider an owner dead when its object, by the store's clock, is older than its time to live.
The owner itself trusts its heartbeat for 90% of that time, counted from before the last write was
sent, also while the machine sleeps, so that it notices before others do.

A run may be stopped for any time between two of its requests: a suspended laptop, a paused
container, a page that swaps. Meanwhile its lease expires, and another run goes on. So a fence knows
until when the lease surely holds, by a clock that runs on while the process is stopped. Before that
`check` costs no request; from then on it reads the lease.

The store's clock says how old the lease is; clocks of machines are only used to measure spans of
time, and only on the machine that has read them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ObjectNotFoundError,
    PreconditionFailedError,
    TransientError,
)
from dagster_adjunct.resources.objects.store import (
    WRITES,
    ObjectStore,
    StoreDescriptor,
    guard_store,
    read_store_clock,
)
from dagster_adjunct.resources.times import Clocks, Deadline, machine_id, read_clocks

TRUSTED_SHARE = 0.9
"""The share of its time to live for which the owner trusts a heartbeat: stores round times to
seconds.
"""


_REMOVED = "it was removed, by others after it had expired or by hand"


class Heartbeat:
    """Rewrites the object `key` with `body()` in a background thread, from `start` to `end`.

    Others may consider the owner dead if the object is older than `ttl`. `describe_loss(data)` is
    called if the object has another ETag than that of the last known write: it returns why the
    object is lost, or "" if this is an own write, whose reply was lost.

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
        describe_loss: Callable[[bytes], str],
        log: logging.Logger,
        revives: bool = False,
    ) -> None:
        self._store = store
        self._key = key
        self._body = body
        self._ttl = ttl
        self._describe_loss = describe_loss
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

    def write(self, write: Callable[[bytes], str], began: Clocks | None = None) -> None:
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
                    self._failure = self._describe_loss(stored.data)

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

    def _set_deadline(self, began: Clocks) -> None:
        """Trust the heartbeat that was sent at this time for most of its time to live."""
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
        """Rewrite the object, which had this ETag when it was last known; return why it is lost, ""
        if it is not. With another ETag it may be an own write, whose reply was lost: that is
        rewritten, too.
        """
        try:
            self._etag = self._store.put_if_match(self._key, self._body(), etag)
        except (PreconditionFailedError, ObjectNotFoundError):
            return self._rewrite_found(etag)
        return ""

    def _rewrite_found(self, refused: str) -> str:
        """Rewrite the object as it is now, if it is ours, after the store has `refused` to replace
        this ETag; return why it is lost, "" if it is not.
        """
        try:
            stored = self._store.get(self._key)
        except ObjectNotFoundError:
            return _REMOVED
        if stored.etag == refused:
            # It was gone, or changed by another request, and is back, for example from a backup.
            # Others may have seen that it was removed. Nor is the same ETag tried without end.
            return _REMOVED
        loss = self._describe_loss(stored.data)
        if loss:
            return loss
        return self._rewrite(stored.etag)

    def _run(self) -> None:
        """Renew the object until the heartbeat is ended or lost; runs in the background thread."""
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


PATIENCE = 5.0
"""How many seconds a task waits for the driver to renew an expired lease that nobody has taken."""
_PAUSE = 0.25
_LOOKS = 3

AFTER_LOSS = (
    "A run that has lost its lease sends nothing more. A request that was under way then may still"
    " take effect within its time limit; key-value tables, tables with fenced=True and the lake"
    " refuse it."
)
"""What a run that has lost its lease may still do; the pages say the same."""


def lease_lost_error(application: str, run: str, problem: str) -> errors.RunLeaseLostError:
    """Return the error of a run whose lease was lost; `problem` says how."""
    return errors.RunLeaseLostError(
        f"application {application!r}: the lease of run {run} was lost: {problem}. {AFTER_LOSS}",
        "Let the other run finish, or run again: it continues from what is committed.",
        application=application,
        run=run,
    )


class _Runner(BaseModel):
    run: str


class _Lease(BaseModel):
    """The part of a stored run lease that a fence reads."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: str
    by: _Runner
    ttl: float
    ended: bool = False


@dataclass
class _Held:
    """Until when a lease surely holds; the fences of a run under each of its names share it.
    None: it must be read.
    """

    until: Deadline | None


class Fence:
    """The permission of a run to write, which lasts as long as its lease.

    `epoch` is greater than that of any earlier run of `application`, also if its lease was deleted
    in between: a store that has seen it can refuse writes of earlier runs. `check` raises
    RunLeaseLostError once another run may have taken the application.

    Pickle it to tasks. `renew` extends the lease and returns its new deadline, or raises; only the
    driver has it. A task reads the lease, and waits a few seconds for the driver to renew it.
    """

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        *,
        holder: str,
        application: str,
        run: str,
        epoch: int,
        deadline: Deadline | None = None,
        renew: Callable[[], Deadline] | None = None,
    ) -> None:
        self.application = application
        self.run = run
        self.epoch = epoch
        self._store = store
        self._key = key
        self._holder = holder
        self._held = _Held(deadline)
        self._renew = renew

    def __reduce__(self) -> tuple[Any, ...]:
        lease = (self._store.descriptor, self._key, self._holder)
        return _unpickle, (
            *lease,
            self.application,
            self.run,
            self.epoch,
            self._held.until,
            machine_id(),
        )

    def __repr__(self) -> str:
        return f"Fence({self.application!r}, run={self.run!r}, epoch={self.epoch})"

    @property
    def is_due(self) -> bool:
        """Whether the next `check` makes requests, which may take seconds."""
        until = self._held.until  # another thread may change it
        return until is None or until.has_passed()

    def check(self) -> None:
        """Raise RunLeaseLostError if another run may have taken the application.

        Call it directly before each request that must not reach its store too late. It reads a
        clock, and makes requests only once the lease may have expired. A lease that can't be read
        then counts as lost.
        """
        for _ in range(_LOOKS):  # again, if the run was paused meanwhile
            if not self.is_due:
                return
            self._held.until = self._read_deadline() if self._renew is None else self._renew()
        if self.is_due:
            raise lease_lost_error(self.application, self.run, "it expired while it was renewed")

    async def check_in_thread(self) -> None:
        """Do as `check`, without blocking the event loop."""
        while self.is_due:
            await asyncio.to_thread(self.check)

    def of_application(self, name: str) -> Fence:
        """Return this fence under another name of the application, the one that tables know it
        by.
        """
        lease = (self._store, self._key)
        fence = Fence(
            *lease,
            holder=self._holder,
            application=name,
            run=self.run,
            epoch=self.epoch,
            renew=self._renew,
        )
        fence._held = self._held
        return fence

    def extend(self, deadline: Deadline) -> None:
        """Note that the lease was renewed, and holds until this deadline."""
        self._held.until = deadline

    def expire(self) -> None:
        """Note that the lease may be lost, before its deadline: the next `check` reads it."""
        self._held.until = None

    def _read_deadline(self) -> Deadline:
        """Return until when the lease holds, by its age; wait a while for the driver to renew it if
        it has expired. Raises RunLeaseLostError if that does not happen.
        """
        lease = (self._store.url, self._key, self._holder)
        known = _KNOWN.get(lease)
        if known is not None and not known.has_passed():
            return known
        patience = Deadline(read_clocks(), PATIENCE)
        while True:
            began = read_clocks()
            cause: errors.AdjunctError | None = None
            try:
                left = self._read_seconds_left()
                problem = f"it expired {timedelta(seconds=round(-left))} ago and was not renewed"
            except errors.RunLeaseLostError:
                raise
            except errors.AdjunctError as error:
                left = 0.0
                cause = error
                problem = f"it can't be read: {error.problem.rstrip('.')}"
            if left > 0:
                _KNOWN[lease] = deadline = Deadline(began, left)
                return deadline
            is_hopeless = isinstance(cause, errors.PermanentError)
            if is_hopeless or patience.has_passed():
                raise lease_lost_error(self.application, self.run, problem) from cause
            time.sleep(_PAUSE)

    def _read_seconds_left(self) -> float:
        """Return for how many seconds the lease still holds; raise if it is not that of this
        run.
        """
        stored = read_dated(self._store, self._key)
        if stored is None:
            raise lease_lost_error(self.application, self.run, "it was removed")
        problem = self._describe_loss(stored.data)
        if problem:
            raise lease_lost_error(self.application, self.run, problem)
        now = read_store_clock(self._store, f"{self._key.rpartition('/')[0]}/clock")
        age = now - stored.written_at
        return TRUSTED_SHARE * _Lease.model_validate_json(stored.data).ttl - age.total_seconds()

    def _describe_loss(self, data: bytes) -> str:
        """Return why the stored lease is not that of this run, "" if it is."""
        try:
            stored = _Lease.model_validate_json(data)
        except ValidationError:
            return "a run whose lease can't be read has taken it over"
        if stored.id != self._holder:
            return f"run {stored.by.run} has taken it over"
        if stored.ended:
            return "the run has ended"
        return ""


# Deadlines that fences of this process have read, by store, key and holder: each pickled task has a
# fence of its own.
_KNOWN: dict[tuple[str, str, str], Deadline] = {}


def _unpickle(
    store: StoreDescriptor,
    key: str,
    holder: str,
    application: str,
    run: str,
    epoch: int,
    deadline: Deadline | None,
    machine: str,
) -> Fence:
    """Return the fence in a task; a deadline counts only on the machine that has set it."""
    if not machine or machine != machine_id():  # its clock says nothing here
        deadline = None
    opened = store.open()
    return Fence(
        opened, key, holder=holder, application=application, run=run, epoch=epoch, deadline=deadline
    )


class DatedObject(NamedTuple):
    """The bytes of an object, and when it was written, by the store's clock."""

    data: bytes
    written_at: datetime


def read_dated(store: ObjectStore, key: str) -> DatedObject | None:
    """Return the object of this key with the time when it was written; None if there is none."""
    while True:
        try:
            stored = store.get(key)
            info = store.head(key)
        except errors.ObjectNotFoundError:
            return None
        if info is not None and info.etag == stored.etag:
            return DatedObject(stored.data, info.modified)
        # It was replaced between the two requests: read it again.


def fenced_store(store: ObjectStore, fence: Fence) -> ObjectStore:
    """Return the store with writes that raise RunLeaseLostError once the lease of the run is lost.

    What a run has sent before stays without effect, too: it commits by compare-and-swap, or under
    names of its own. That also holds for files that its tasks upload, so it pickles as `store`.
    """
    return guard_store(store, fence.check, WRITES)
