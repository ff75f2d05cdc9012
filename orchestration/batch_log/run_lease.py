"""The run lease: one run of an application at a time; a run renews its lease, and a second run
waits for its end.

    applications/{name}/run.json     who runs it, where, since when; rewritten while it runs, and at
                                     its end
    applications/{name}/asked.json   who waits for a run that stays, which then ends after its batch

A lease ends when its holder says so, when its process is proven dead, when Dagster has ended the
run, or when it was not renewed within its time to live, by the store's clock. It is taken by
compare-and-swap, so that one of two waiting runs gets it. The batch log's own compare-and-swap
still fences a run without a lease, or one that lost it.

Each take has a greater epoch. A run whose lease was taken may live: it was paused, or Dagster has
given it up. Before anything leaves such a run it looks at its lease (`Fence`), so it sends nothing
after its time to live. The run that took the lease begins after that, and after the time in which a
request of the other may have been under way. Until when that is stands in the lease, so that a
third run waits for it, too.

The lease stays in the lake between runs. If it is gone though the application has run, somebody
has deleted it, and perhaps that of a run that lives: it notices when it renews its lease or looks
at it, and the next run waits until it has.
"""

from __future__ import annotations

import logging
import math
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
from typing import Any, Literal, NamedTuple, Self

from pydantic import ValidationError

from dagster_adjunct.orchestration.batch_log.batch_log import KIND
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.documents import StoredDocument
from dagster_adjunct.resources.objects.fence import Fence, Heartbeat, lease_lost_error
from dagster_adjunct.resources.objects.lake import RUN_TTL, Lake
from dagster_adjunct.resources.objects.store import ObjectStore, read_store_clock, requests_at_once
from dagster_adjunct.resources.threads import call_in_threads
from dagster_adjunct.resources.times import Deadline, describe_span, read_clocks, to_microseconds


class Process(StoredDocument):
    """A process, identified by its number and start within one boot and process namespace; "" for
    what is not known.

    Numbers are reused, so the start (in ticks since the boot) is part of the identity. Containers
    on one machine have process numbers of their own, and may share a host name.
    """

    host: str
    pid: int
    boot: str = ""
    namespace: str = ""
    started: str = ""

    def is_dead(self) -> bool:
        """Return whether the process is proven to have ended; False if nothing can be proven
        from here.
        """
        here = this_process()
        if "" in (self.boot, self.namespace, self.started):
            return False
        if (self.boot, self.namespace) != (here.boot, here.namespace):
            return False
        try:
            started = _read_start(self.pid)
        except OSError:  # such as too many open files
            return False
        if started:
            return started != self.started
        return not _is_of_another_user(self.pid)


def this_process() -> Process:
    """Return the identity of this process."""
    boot = namespace = started = ""
    with suppress(OSError):
        boot = _read_text("/proc/sys/kernel/random/boot_id")
        namespace = str(Path("/proc/self/ns/pid").readlink())
        started = _read_start(os.getpid())
    return Process(
        host=socket.gethostname(), pid=os.getpid(), boot=boot, namespace=namespace, started=started
    )


_START_FIELD = 19
"""Which field after the command's name in /proc/PID/stat has the start, from 0."""


def _read_start(pid: int) -> str:
    """Return when a process started, "" if there is none; a zombie counts as none. Raises OSError
    if that can't be read.
    """
    # The command's name, in parentheses, may contain blanks and parentheses.
    _, _, after_name = _read_text(f"/proc/{pid}/stat").rpartition(")")
    fields = after_name.split()
    if len(fields) <= _START_FIELD or fields[0] in ("Z", "X"):
        return ""
    return fields[_START_FIELD]


def _is_of_another_user(pid: int) -> bool:
    """Return whether another user has a process of this number, which /proc may hide (its option
    hidepid).
    """
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return False


def _read_text(path: str) -> str:
    """Return the text of a file, "" if there is none, or its process has ended. Raises OSError."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    return ""


LONGEST_STAY = timedelta(days=10_000)  # of a run that goes on when it has caught up
DEFAULT_WAIT = timedelta(minutes=5)
_LONGEST_PAUSE = 5.0
# How many seconds a run whose lease may have expired tries to renew it, as after the network was
# away with the machine.
_RENEWING = 5.0
_PAUSE = 0.25
# How often a run that waits for a paused one looks whether its process has ended, in seconds.
_LONGEST_WAIT = 0.5
_SHORTEST_TICK = 0.01  # of a store's clock, in seconds
_LONGEST_TICK = 2.0
_ATTEMPTS = 3  # to write the lease, though each may have been lost on its way
_log = logging.getLogger("adjunct.run")
# Ids of the leases that this process holds; its other leases were left by runs that failed to end
# them.
_held: set[str] = set()


class Runner(StoredDocument):
    """Who runs an application: `run` is its name in commits, `dagster` the id of a Dagster run."""

    run: str
    process: Process
    since: datetime
    dagster: str = ""

    def describe(self) -> str:
        """Return who runs it, where, and since when."""
        of_dagster = " of Dagster" if self.dagster else ""
        return (
            f"run {self.run}{of_dagster} on host {self.process.host} (pid {self.process.pid}),"
            f" since {self.since:%Y-%m-%d %H:%M:%S} UTC"
        )


class Holder(StoredDocument):
    """The lease of the run `by` which an application is run.

    A run that `stays` waits for more when it has caught up, unless another run asks for the
    application. `nonce` is new at each renewal, so that the stored lease gets another ETag. `epoch`
    is greater at each take of the lease.

    Times in seconds: the lease ends `ttl` after it was written, and a request that was sent before
    that may take effect until `in_flight` later. Until `others_until`, by the store's clock,
    earlier holders may still write. If `unfenced`, earlier holders may live, and tables have not
    been told of an epoch that is later than theirs.
    """

    id: str
    by: Runner
    ttl: float
    epoch: int
    in_flight: float = 0.0
    others_until: datetime | None = None
    unfenced: bool = False
    stays: bool = False
    ended: bool = False
    nonce: str = ""


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

    @property
    def stays(self) -> bool:
        """Whether the holder waits for more when it has caught up."""
        return self.holder is not None and self.holder.stays

    @property
    def has_ended(self) -> bool:
        """Whether the holder has said that it has ended."""
        return self.holder is not None and self.holder.ended

    @property
    def is_of_this_process(self) -> bool:
        """Whether the holder is a run of this process."""
        return self.holder is not None and self.holder.by.process == this_process()

    def describe(self) -> str:
        """Return who holds the lease."""
        if self.holder is not None:
            return self.holder.by.describe()
        return f"a run whose lease, {self.key}, can't be read"

    def has_gone(self) -> bool:
        """Return whether the holder is proven to be gone: it has said so, or its process is
        dead.
        """
        if self.holder is None:
            return False
        if self.holder.ended:
            return True
        if self.is_of_this_process:  # a run that failed to end its lease has left it
            return self.holder.id not in _held
        return self.holder.by.process.is_dead()

    def may_write_until(self) -> datetime | None:
        """Return until when, by the store's clock, this holder or an earlier one may write; None
        if none may.
        """
        if self.holder is None:
            return self.written + self.ttl
        earlier = self.holder.others_until
        if self.has_gone():
            return earlier
        own = self.written + self.ttl + timedelta(seconds=self.holder.in_flight)
        if earlier is None:
            return own
        return max(own, earlier)

    @property
    def ttl(self) -> timedelta:
        """How long the lease lives after it was written."""
        if self.holder is None:
            return RUN_TTL
        return timedelta(seconds=self.holder.ttl)


@dataclass(frozen=True, slots=True)
class Claim:
    """How a run gets its lease: it waits for a live run to end, or takes over from it at once.

    `dagster` is the id of this run in Dagster, if any; `finished` returns whether Dagster has ended
    a run of this id. `say` receives messages about which run it waits for or takes over from. A run
    that `stays` for some time ends for one that waits. `in_flight` is how many seconds a request of
    this run may be under way.
    """

    wait: timedelta = DEFAULT_WAIT
    take_over: bool = False
    stays: timedelta | None = None
    in_flight: float = 0.0
    dagster: str = ""
    finished: Callable[[str], bool] = lambda run: False
    say: Callable[[str], None] = _log.warning


def describe_end(
    stored: StoredLease, now: Callable[[], datetime], finished: Callable[[str], bool]
) -> str:
    """Return why a lease has ended, "" if its holder may be alive.

    `now` returns the time, by the store's clock where it decides about a lease. `finished` says of
    the id of a run in Dagster whether Dagster has ended it.
    """
    if stored.has_ended:
        return "it has ended"
    if stored.has_gone():
        if stored.is_of_this_process:
            return "it has ended, which it could not record"
        return "its process has ended"
    if stored.holder is not None:
        dagster = stored.holder.by.dagster
        if dagster and finished(dagster):
            return "Dagster has ended the run"
    if now() >= stored.written + stored.ttl:
        return f"it was not renewed for {stored.ttl}"
    return ""


class _TakenLease(NamedTuple):
    """The lease that was there when this run took its own, None for none, and why it had ended, ""
    if it had not.
    """

    before: StoredLease | None
    why_ended: str


class RunLease:
    """A context manager that holds the run lease of an application."""

    def __init__(self, lake: Lake, application: str, run: str, claim: Claim) -> None:
        prefix = lake.application_prefix(application)
        self._application = application
        self._store = lake.store
        self._log = lake.commit_log(prefix, KIND)
        self._key = f"{prefix}/run.json"
        self._asked_key = asked_key(lake, application)
        self._clock_key = f"{prefix}/clock"
        self._claim = claim
        self._asked = False
        self._fence: Fence | None = None
        self._failures = 0
        self._holder = Holder(
            id=uuid.uuid4().hex,
            by=Runner(run=run, process=this_process(), since=lake.now(), dagster=claim.dagster),
            ttl=lake.run_ttl.total_seconds(),
            epoch=0,
            in_flight=claim.in_flight,
            stays=claim.stays is not None,
        )
        # Others take an expired lease by its ETag, so that its holder may still renew one that
        # nobody has taken.
        self._heartbeat = Heartbeat(
            lake.store,
            self._key,
            self._body,
            lake.run_ttl,
            describe_loss=self._describe_loss,
            log=_log,
            revives=True,
        )

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
        """Wait for the lease, take it and renew it from now on, and wait until no earlier run can
        write any more.
        """
        now = partial(read_store_clock, self._store, self._clock_key)
        taken = self._wait_and_take(now)
        before = taken.before
        self._fence = Fence(
            self._store,
            self._key,
            holder=self._holder.id,
            application=self._application,
            run=self._holder.by.run,
            epoch=self._holder.epoch,
            deadline=self._heartbeat.deadline,
            renew=self._renew,
        )
        self._heartbeat.on_renewal = self._fence.extend
        self._heartbeat.on_loss = self._fence.expire
        self._heartbeat.start()
        did_stay = before is not None and before.stays
        if self._holder.stays or did_stay:
            self._store.delete(self._asked_key)  # the request to end has been followed
        if before is not None and not before.has_ended:
            self._claim.say(
                f"application {self._application} is taken over from {before.describe()}:"
                f" {taken.why_ended or 'as requested'}"
            )
        self._wait_for_writes(before, now)

    def _wait_and_take(self, now: Callable[[], datetime]) -> _TakenLease:
        """Take the lease once it has ended, or at once if it is to be taken over. Ask a run that
        stays to end. Raises ApplicationBusyError if it has not ended within the claim's `wait`.
        """
        began = time.monotonic()
        limit = self._claim.wait.total_seconds()
        pause = 0.25
        waits_for = ""
        while True:
            stored = read_lease(self._store, self._key)
            why_ended = ""
            if stored is not None:
                why_ended = describe_end(stored, now, self._claim.finished)
            if stored is None or why_ended or self._claim.take_over:
                if self._take(stored):
                    return _TakenLease(stored, why_ended)
                continue  # another run was faster
            left = limit - (time.monotonic() - began)
            if left <= 0:
                raise self._busy(stored)
            if stored.describe() != waits_for:
                waits_for = stored.describe()
                self._claim.say(
                    f"application {self._application} is being run by {waits_for}; waiting up to "
                    f"{timedelta(seconds=round(left))}"
                )
            if stored.stays:
                # Repeated: who takes the lease deletes it.
                self._asked = True
                ask_to_end(self._store, self._asked_key, self._holder.by.describe())
            time.sleep(min(pause, left))
            pause = min(_LONGEST_PAUSE, pause * 1.5)

    def _wait_for_writes(self, stored: StoredLease | None, now: Callable[[], datetime]) -> None:
        """Wait until no earlier run can write any more; it stops at its next look at its lease,
        if it lives. `stored` is the lease that was found, None if it was deleted.
        """
        if stored is None:
            other = f"a run whose lease, {self._key}, was deleted"
        else:
            other = stored.describe()
        until = self._holder.others_until
        while until is not None:
            left = (until - now()).total_seconds()
            if left <= 0:
                return
            self._claim.say(
                f"application {self._application}: {other} may be alive, only paused."
                " This run begins when the other can't write any more, in"
                f" {timedelta(seconds=math.ceil(left))}"
            )
            waiting = Deadline(read_clocks(), left)
            while not waiting.has_passed():
                # The time is earlier once the process of the other run has ended.
                if stored is not None and stored.may_write_until() != until:
                    until = stored.may_write_until()
                    self._holder = self._holder.model_copy(update={"others_until": until})
                    break
                time.sleep(min(left, _LONGEST_WAIT))
                self._check_heartbeat()

    @property
    def fence(self) -> Fence:
        """What the run's writes are checked by, while it holds the lease."""
        assert self._fence is not None
        return self._fence

    @property
    def has_unfenced(self) -> bool:
        """Whether earlier runs may live, and tables have not been told of a later epoch since
        (`note_fenced`).
        """
        return self._holder.unfenced

    def note_fenced(self) -> None:
        """Note that all tables know the epoch of this run, so that the next one need not tell
        them of its own.
        """
        self._holder = self._holder.model_copy(update={"unfenced": False})

    def _renew(self) -> Deadline:
        """Renew the lease, after which nobody else has taken it; return its deadline. Raises
        RunLeaseLostError.
        """
        trying = Deadline(read_clocks(), _RENEWING)
        while True:
            if self._holder.ended:
                raise self._lost("the run has ended")
            try:
                self._heartbeat.renew()
            except errors.AdjunctError as error:
                if trying.has_passed() or isinstance(error, errors.PermanentError):
                    ttl = timedelta(seconds=self._holder.ttl)
                    problem = f"it lives for {ttl} and could not be renewed: {error.problem}"
                    raise self._lost(problem.removesuffix(".")) from error
                time.sleep(_PAUSE)
            else:
                self._check_heartbeat()
                return self._heartbeat.deadline

    def _lost(self, why: str) -> errors.RunLeaseLostError:
        """Return the error for this run, which has lost its lease."""
        return lease_lost_error(self._application, self._holder.by.run, why)

    def __exit__(self, *error: object) -> None:
        _held.discard(self._holder.id)
        self._holder = self._holder.model_copy(update={"ended": True})
        if self._fence is not None:  # nothing that the run has left behind writes after its end
            self._heartbeat.on_renewal = lambda deadline: None
            self._fence.expire()
        # A conditional PUT: on real servers a conditional DELETE may remove the lease of the run
        # that took it over.
        self._heartbeat.end(lambda etag: self._store.put_if_match(self._key, self._body(), etag))

    def check(self) -> None:
        """Read the lease; raise RunLeaseLostError if another run may have taken it over."""
        self._heartbeat.check()
        self._check_heartbeat()
        self.fence.check()

    def asked_by(self) -> str:
        """Return which run waits for this one to end, "" for none. Raises RunLeaseLostError if
        the lease was lost.
        """
        self._check_heartbeat()
        try:
            return Asking.model_validate_json(self._store.get(self._asked_key).data).by
        except errors.ObjectNotFoundError:
            return ""
        except ValidationError:
            return "a run of another release"

    def _check_heartbeat(self) -> None:
        """Raise RunLeaseLostError if a renewal in the background has found the lease lost."""
        if self._heartbeat.problem:
            raise self._lost(self._heartbeat.problem)

    def _take(self, stored: StoredLease | None) -> bool:
        """Take the lease if it is still as found: `stored`, or None if there was none; return False
        if another run was faster. Raises TransientError if the store has taken no write repeatedly.
        """
        self._holder = self._holder.model_copy(update=self._fields_after(stored))
        _held.add(self._holder.id)
        began = read_clocks()
        etag = None if stored is None else stored.etag
        try:
            self._heartbeat.write(partial(self._write, etag))
        except (
            errors.ObjectExistsError,
            errors.PreconditionFailedError,
            errors.TransientError,
        ) as error:
            # The reply to our own success may have been lost: the stored lease says whose it is.
            found = read_lease(self._store, self._key)
            if (
                found is not None
                and found.holder is not None
                and found.holder.id == self._holder.id
            ):
                self._heartbeat.write(lambda body: found.etag, began)  # it is written already
                return True
            _held.discard(self._holder.id)
            found_etag = None if found is None else found.etag
            is_unchanged = found_etag == etag
            if is_unchanged and isinstance(error, errors.TransientError):
                # Nobody was faster: the store takes no writes, such as on a full disk.
                self._failures += 1
                if self._failures >= _ATTEMPTS:
                    raise
                time.sleep(0.1)
            return False
        except BaseException:
            _held.discard(self._holder.id)
            raise
        return True

    def _write(self, etag: str | None, body: bytes) -> str:
        """Write the lease if it still has this ETag, or is still not there; return the new one."""
        if etag is None:
            return self._store.put_if_absent(self._key, body)
        return self._store.put_if_match(self._key, body, etag)

    def _fields_after(self, stored: StoredLease | None) -> dict[str, Any]:
        """Return the fields of the holder that takes the lease which is `stored` now; with
        `others_until` None if no earlier run can write any more.

        Without a lease that can be read, the epoch is the time in microseconds by the store's
        clock: all earlier takes have a lower one, as each takes longer than that.
        """
        until = None
        if stored is not None:
            until = stored.may_write_until()
        if stored is not None and stored.holder is not None:
            return {
                "epoch": stored.holder.epoch + 1,
                "others_until": until,
                "unfenced": stored.holder.unfenced or not stored.holder.ended,
            }
        now = self._read_later_clock()
        if stored is None and self._log.current() is not None:  # its runs had a lease
            until = now + timedelta(seconds=self._holder.ttl + self._holder.in_flight)
        return {"epoch": to_microseconds(now), "others_until": until, "unfenced": True}

    def _read_later_clock(self) -> datetime:
        """Return the time by the store's clock, later than when a run of this application last read
        it: on S3 it has whole seconds.

        Each reading writes an object. With pauses that double, there are ten of them at most.
        """
        last = self._store.head(self._clock_key)
        deadline = Deadline(read_clocks(), _LONGEST_TICK)
        pause = _SHORTEST_TICK
        while True:
            now = read_store_clock(self._store, self._clock_key)
            if last is None or now != last.modified or deadline.has_passed():
                return now
            time.sleep(pause)
            pause *= 2

    def _busy(self, stored: StoredLease) -> errors.ApplicationBusyError:
        """Return the error for a lease that has not ended while this run waited."""
        run = None
        if stored.holder is not None:
            run = stored.holder.by.run
        waited = f" after {self._claim.wait} of waiting" if self._claim.wait else ""
        return errors.ApplicationBusyError(
            f"application {self._application!r} is being run by {stored.describe()}, last renewed"
            f" at {stored.written:%H:%M:%S} UTC: this run did not start{waited}.",
            "Wait for its end (adjunct run MODULE:APP --wait 1h), or stop it. Take over from a run"
            " that hangs with adjunct run MODULE:APP --take-over, run_application(…,"
            " take_over=True), or take_over in the config of the Dagster op: that begins when the"
            " other run can't write any more.",
            application=self._application,
            run=run,
        )

    def _body(self) -> bytes:
        """Return the lease to write, which differs at each renewal."""
        renewed = self._holder.model_copy(update={"nonce": uuid.uuid4().hex})
        return renewed.model_dump_json().encode()

    def _describe_loss(self, data: bytes) -> str:
        """Return who has taken a lease with this body over; "" if it is that of this run."""
        stored = _parse(data)
        if stored is None:
            return "a run whose lease can not be read has taken it over"
        if stored.id == self._holder.id:
            return ""
        return f"{stored.by.describe()} has taken it over"


def asked_key(lake: Lake, application: str) -> str:
    """Return the key of the object that asks the run which stays with an application to end."""
    return f"{lake.application_prefix(application)}/asked.json"


def ask_to_end(store: ObjectStore, key: str, by: str) -> None:
    """Ask a run that stays to end after its batch; `key` is that of `asked_key`."""
    store.put(key, Asking(by=by).model_dump_json().encode())


def read_lease(store: ObjectStore, key: str) -> StoredLease | None:
    """Return a lease, None if there is none."""
    while True:  # until its body and its time are of the same write
        try:
            stored, info = call_in_threads(
                partial(store.get, key), partial(store.head, key), at_once=requests_at_once(store)
            )
        except errors.ObjectNotFoundError:
            return None
        if info is not None and info.etag == stored.etag:
            return StoredLease(key, stored.etag, info.modified, _parse(stored.data))


def describe_runner(
    lake: Lake, application: str, finished: Callable[[str], bool] = lambda run: False
) -> str:
    """Return who runs an application now, "" if nobody does; `finished` is that of `describe_end`.

    The age of the lease is by the lake's clock, which is that of this machine: to read the store's
    clock, something must be written.
    """
    stored = read_lease(lake.store, f"{lake.application_prefix(application)}/run.json")
    if stored is None or describe_end(stored, lake.now, finished):
        return ""
    return stored.describe()


def may_be_running(lake: Lake, application: str) -> bool:
    """Return whether a run of an application may go on: its lease has not ended, though it may have
    expired. It may be paused then.
    """
    stored = read_lease(lake.store, f"{lake.application_prefix(application)}/run.json")
    return stored is not None and not stored.has_gone()


def _parse(data: bytes) -> Holder | None:
    """Return the holder in a stored lease; None if it can't be read."""
    with suppress(ValidationError):
        return Holder.model_validate_json(data)
    return None


def validate_span(argument: Literal["wait", "follow"], span: timedelta | float) -> timedelta:
    """Return how long to wait for another run, or to stay, given as a timedelta or in seconds.

    Raises ConfigurationError for a negative or too long time, and for 0 to stay.
    """
    seconds = span.total_seconds() if isinstance(span, timedelta) else span
    may_be_zero = argument == "wait"
    if isinstance(seconds, int | float) and not isinstance(seconds, bool):
        if may_be_zero:
            is_enough = seconds >= 0
        else:
            is_enough = seconds > 0
        if is_enough and seconds <= LONGEST_STAY.total_seconds():
            return timedelta(seconds=seconds)
    least = "from 0, which does not wait," if may_be_zero else "of more than 0"
    raise errors.ConfigurationError(
        f"{argument}={describe_span(span)} is not a valid time: expected a time {least} to"
        f" {LONGEST_STAY}.",
        "Pass a timedelta or seconds.",
        argument=argument,
    )
