"""The run lease: one run of an application at a time; a run renews its lease, and a second run waits for its end.

    applications/{name}/run.json     who runs it, where, since when; rewritten while it runs, and at its end
    applications/{name}/asked.json   who waits for a run that stays, which then ends after its batch

A lease ends when its holder says so, when its process is proven dead, when Dagster has ended the run, or when it was
not renewed within its time to live, by the store's clock. It is taken by compare-and-swap, so that one of two waiting
runs gets it. The batch log's own compare-and-swap still fences a run without a lease, or one that lost it.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Literal, Self

from pydantic import ValidationError

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.common import StoredDocument, call_in_threads
from dagster_adjunct.resources.objects.heartbeat import Heartbeat
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.objects.store import ObjectStore, read_store_clock, requests_at_once


class Process(StoredDocument):
    """A process, identified by its number and start within one boot and process namespace; "" for what is not known.

    Numbers are reused, so the start (in ticks since the boot) is part of the identity. Containers on one machine have
    process numbers of their own, and may share a host name.
    """

    host: str
    pid: int
    boot: str = ""
    namespace: str = ""
    started: str = ""

    def is_dead(self) -> bool:
        """Return whether the process is proven to have ended; False if nothing can be proven from here."""
        here, is_known = this_process(), bool(self.boot and self.namespace and self.started)
        if not is_known or (self.boot, self.namespace) != (here.boot, here.namespace):
            return False
        started = _read_start(self.pid)
        return started != self.started and (bool(started) or not _is_of_another_user(self.pid))


def this_process() -> Process:
    """Return the identity of this process."""
    namespace = ""
    with suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return Process(
        host=socket.gethostname(),
        pid=os.getpid(),
        boot=_read_text("/proc/sys/kernel/random/boot_id"),
        namespace=namespace,
        started=_read_start(os.getpid()),
    )


def _read_start(pid: int) -> str:
    """Return when a process started, "" if there is none; a zombie counts as none."""
    # The command's name, in parentheses, may contain blanks and parentheses.
    fields = _read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in ("Z", "X") else ""


def _is_of_another_user(pid: int) -> bool:
    """Return whether another user has a process of this number, which /proc may hide (its option hidepid)."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return False


def _read_text(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    return ""


TTL = timedelta(minutes=2)
LONGEST_STAY = timedelta(days=10_000)  # of a run that goes on when it has caught up
DEFAULT_WAIT = timedelta(minutes=5)
_LONGEST_PAUSE = 5.0
_ATTEMPTS = 3  # to write the lease, though each may have been lost on its way
_log = logging.getLogger("adjunct.run")
# Ids of the leases that this process holds; its other leases were left by runs that failed to end them.
_held: set[str] = set()


class Holder(StoredDocument):
    """Who runs an application: `run` is its name in commits, `dagster` the id of a Dagster run.

    A run that `stays` waits for more when it has caught up, unless another run asks for the application. `nonce` is
    new at each renewal, so that the stored lease gets another ETag.
    """

    id: str
    run: str
    process: Process
    since: datetime
    ttl: float
    dagster: str = ""
    stays: bool = False
    ended: bool = False
    nonce: str = ""

    def describe(self) -> str:
        """Return who runs it, where, and since when."""
        named = f"run {self.run}" + (" of Dagster" if self.dagster else "")
        return f"{named} on host {self.process.host} (pid {self.process.pid}), since {self.since:%Y-%m-%d %H:%M:%S} UTC"


class Asking(StoredDocument):
    """The request of a run that waits for one that stays; `by` describes the run that waits."""

    by: str


@dataclass(frozen=True, slots=True)
class StoredLease:
    """A lease in the lake: its holder (None if it can't be read), and when it was last written."""

    key: str
    etag: str
    written: datetime
    holder: Holder | None

    def describe(self) -> str:
        return self.holder.describe() if self.holder else f"a run whose lease, {self.key}, can't be read"


@dataclass(frozen=True, slots=True)
class Claim:
    """How a run gets its lease: it waits for a live run to end, or takes over from it at once.

    `dagster` is the id of this run in Dagster, if any; `finished` returns whether Dagster has ended a run of this id.
    `say` receives messages about which run it waits for or takes over from. A run that `stays` ends for one that waits.
    """

    wait: timedelta = DEFAULT_WAIT
    take_over: bool = False
    stays: bool = False
    dagster: str = ""
    finished: Callable[[str], bool] = lambda run: False
    say: Callable[[str], None] = _log.warning


def describe_end(stored: StoredLease, now: Callable[[], datetime], finished: Callable[[str], bool]) -> str:
    """Return why a lease has ended, "" if its holder may be alive; `now` returns the time by the store's clock."""
    holder = stored.holder
    if holder is not None:
        if holder.ended:
            return "it has ended"
        ours = holder.process == this_process()
        if holder.process.is_dead() or (ours and holder.id not in _held):
            return "its process has ended"
        if holder.dagster and finished(holder.dagster):
            return "Dagster has ended the run"
    ttl = timedelta(seconds=holder.ttl) if holder is not None else TTL
    return f"it was not renewed for {ttl}" if now() >= stored.written + ttl else ""


class RunLease:
    """A context manager that holds the run lease of an application."""

    def __init__(self, lake: Lake, application: str, run: str, claim: Claim) -> None:
        self._application, self._store = application, lake.store
        self._key = f"{lake.application_prefix(application)}/run.json"
        self._asked_key = asked_key(lake, application)
        self._clock_key = f"{lake.application_prefix(application)}/clock"
        self._claim, self._asked = claim, False
        self._failures = 0
        self._holder = Holder(
            id=uuid.uuid4().hex,
            run=run,
            process=this_process(),
            since=lake.now(),
            ttl=TTL.total_seconds(),
            dagster=claim.dagster,
            stays=claim.stays,
        )
        self._heartbeat = Heartbeat(lake.store, self._key, self._body, TTL, not_ours=self._not_ours, log=_log)

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            if self._asked:  # if other runs wait too, they ask again
                with suppress(errors.AdjunctError):
                    self._store.delete(self._asked_key)
            self.__exit__()
            raise
        return self

    def _begin(self) -> None:
        """Wait for the lease, take it and renew it from now on."""
        began, pause, waits_for = time.monotonic(), 0.25, ""
        now = partial(read_store_clock, self._store, self._clock_key)
        while True:
            stored = read_lease(self._store, self._key)
            why = describe_end(stored, now, self._claim.finished) if stored else ""
            if stored is None or why or self._claim.take_over:
                if self._take(stored):
                    break
                continue
            waited = time.monotonic() - began
            limit = self._claim.wait.total_seconds()
            if waited >= limit:
                raise self._busy(stored)
            if stored.describe() != waits_for:
                waits_for = stored.describe()
                self._claim.say(
                    f"application {self._application} is being run by {waits_for}; waiting up to "
                    f"{timedelta(seconds=round(limit - waited))}"
                )
            if stored.holder is not None and stored.holder.stays:  # repeated: who takes the lease deletes it
                self._asked = True
                ask_to_end(self._store, self._asked_key, self._holder.describe())
            time.sleep(min(pause, limit - waited))
            pause = min(_LONGEST_PAUSE, pause * 1.5)
        self._heartbeat.start()
        if self._claim.stays or (stored is not None and stored.holder is not None and stored.holder.stays):
            self._store.delete(self._asked_key)
        if stored is not None and not (stored.holder and stored.holder.ended):
            self._claim.say(
                f"application {self._application} is taken over from {stored.describe()}: {why or 'as requested'}"
            )

    def __exit__(self, *error: object) -> None:
        _held.discard(self._holder.id)
        self._holder = self._holder.model_copy(update={"ended": True})
        # A conditional PUT: on real servers a conditional DELETE may remove the lease of the run that took it over.
        self._heartbeat.end(lambda etag: self._store.put_if_match(self._key, self._body(), etag))

    def check(self) -> None:
        """Read the lease; raise RunLeaseLostError if another run may have taken it over."""
        self._heartbeat.check()
        self._check_heartbeat()

    def asked_by(self) -> str:
        """Return which run waits for this one to end, "" for none. Raises RunLeaseLostError if the lease was lost."""
        self._check_heartbeat()
        try:
            return Asking.model_validate_json(self._store.get(self._asked_key).data).by
        except errors.ObjectNotFoundError:
            return ""
        except ValidationError:
            return "a run of another release"

    def _check_heartbeat(self) -> None:
        if lost := self._heartbeat.problem:
            problem = f"application {self._application!r}: the lease of run {self._holder.run} was lost: {lost}."
            step = (
                "This run has no effect on the open batch. Let the other run finish, or run again: it continues from "
                "what is committed."
            )
            raise errors.RunLeaseLostError(problem, step, application=self._application, run=self._holder.run)

    def _take(self, stored: StoredLease | None) -> bool:
        """Take the lease if it is still as found; return False if another run was faster."""
        _held.add(self._holder.id)
        try:
            if stored is None:
                self._heartbeat.write(partial(self._store.put_if_absent, self._key))
            else:
                self._heartbeat.write(lambda body: self._store.put_if_match(self._key, body, stored.etag))
        except (errors.ObjectExistsError, errors.PreconditionFailedError, errors.TransientError) as error:
            # The reply to our own success may have been lost: the stored lease says whose it is.
            now = read_lease(self._store, self._key)
            if now is None or now.holder is None or now.holder.id != self._holder.id:
                _held.discard(self._holder.id)
                is_unchanged = (now and now.etag) == (stored and stored.etag)
                if is_unchanged and isinstance(error, errors.TransientError):
                    self._failures += 1  # nobody was faster: the store takes no writes, such as on a full disk
                    if self._failures >= _ATTEMPTS:
                        raise
                    time.sleep(0.1)
                return False
            self._heartbeat.write(lambda body: now.etag)
        except BaseException:
            _held.discard(self._holder.id)
            raise
        return True

    def _busy(self, stored: StoredLease) -> errors.ApplicationBusyError:
        waited = f" after {self._claim.wait} of waiting" if self._claim.wait else ""
        return errors.ApplicationBusyError(
            f"application {self._application!r} is being run by {stored.describe()}, last renewed at "
            f"{stored.written:%H:%M:%S} UTC: this run did not start{waited}.",
            "Wait for its end (adjunct run MODULE:APP --wait 1h), or stop it. Take over from a run that hangs with "
            "adjunct run MODULE:APP --take-over, run_application(…, take_over=True), or take_over in the config of the "
            "Dagster op.",
            application=self._application,
            run=stored.holder.run if stored.holder else None,
        )

    def _body(self) -> bytes:
        return self._holder.model_copy(update={"nonce": uuid.uuid4().hex}).model_dump_json().encode()

    def _not_ours(self, data: bytes) -> str:
        stored = _parse(data)
        if stored is not None and stored.id == self._holder.id:
            return ""
        return f"{stored.describe() if stored else 'a run whose lease can not be read'} has taken it over"


def asked_key(lake: Lake, application: str) -> str:
    """Return the key of the object that asks the run which stays with an application to end."""
    return f"{lake.application_prefix(application)}/asked.json"


def ask_to_end(store: ObjectStore, key: str, by: str) -> None:
    """Ask a run that stays to end after its batch; `key` is that of `asked_key`."""
    store.put(key, Asking(by=by).model_dump_json().encode())


def read_lease(store: ObjectStore, key: str) -> StoredLease | None:
    """Return a lease, None if there is none."""
    while True:
        try:
            stored, info = call_in_threads(
                partial(store.get, key), partial(store.head, key), at_once=requests_at_once(store)
            )
        except errors.ObjectNotFoundError:
            return None
        if info is not None and info.etag == stored.etag:
            return StoredLease(key, stored.etag, info.modified, _parse(stored.data))


def describe_runner(lake: Lake, application: str, finished: Callable[[str], bool] = lambda run: False) -> str:
    """Return who runs an application now, "" if nobody does; by this machine's clock, without writing."""
    stored = read_lease(lake.store, f"{lake.application_prefix(application)}/run.json")
    if stored is None or describe_end(stored, lake.now, finished):
        return ""
    return stored.describe()


def _parse(data: bytes) -> Holder | None:
    with suppress(ValidationError):
        return Holder.model_validate_json(data)
    return None


def validate_span(argument: Literal["wait", "follow"], span: timedelta | float) -> timedelta:
    """Return how long to wait for another run, or to stay, given as a timedelta or in seconds.

    Raises ConfigurationError for a negative or too long time, and for 0 to stay.
    """
    seconds = span.total_seconds() if isinstance(span, timedelta) else span
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds <= LONGEST_STAY.total_seconds() or (argument == "follow" and not seconds):
        least = "from 0, which does not wait," if argument == "wait" else "of more than 0"
        problem = f"{argument}={span!r} is not a valid time: expected a time {least} to {LONGEST_STAY}."
        raise errors.ConfigurationError(problem, "Pass a timedelta or seconds.", argument=argument)
    return timedelta(seconds=seconds)
