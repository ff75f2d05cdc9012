"""What all packages share: checks of arguments and names, lines of user code, registries of
classes, stored documents, moments in microseconds, threads for requests, and an event loop for code
that is not async."""

from __future__ import annotations

import asyncio
import base64
import getpass
import inspect
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, overload
from weakref import WeakSet
from zoneinfo import ZoneInfo

from pydantic import BaseModel, ConfigDict, ValidationError

from dagster_adjunct.resources.errors import ConfigurationError, InvalidNameError

A = TypeVar("A")
T = TypeVar("T")
N = TypeVar("N", int, float)

MAX_SECONDS = 1e12  # clocks and stores overflow beyond it


def argument_error(
    found: str, expected: str, next_step: str = "", *, argument: str, **about: Any
) -> ConfigurationError:
    """Return the error for an argument with a wrong value: "`found`: expected `expected`."

    `about` are further fields of the error, such as the dataset.
    """
    return ConfigurationError(
        f"{found}: expected {expected}.", next_step, argument=argument, **about
    )


# Names that Python takes for zones, but Spark does not: files next to the zones. Those in right/
# count leap seconds.
_NOT_A_ZONE = re.compile(r"(posix|right)/|(localtime|posixrules|Factory)$")


def check_zone(found: str, zone: str, *, argument: str) -> None:
    """Raise `argument_error` unless `zone` is the name of an IANA time zone that this machine
    knows.

    `found` begins the message, such as "Tumbling has zone".
    """
    try:
        is_known = not _NOT_A_ZONE.match(zone) and ZoneInfo(zone) is not None
    except (KeyError, ValueError, OSError):  # an unknown or invalid name
        is_known = False
    if not is_known:
        expected = 'a time zone that this machine knows, such as "America/New_York" or "UTC"'
        raise argument_error(f"{found}={zone!r}", expected, argument=argument)


def check_whole_number(
    value: object,
    found: str,
    expected: str,
    *,
    argument: str,
    least: int = 1,
    next_step: str = "",
    **about: Any,
) -> None:
    """Raise `argument_error` unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise argument_error(found, expected, next_step, argument=argument, **about)


def check_seconds(
    value: object, found: str, *, argument: str, none: bool = False, zero: bool = False
) -> None:
    """Raise `argument_error` unless `value` is a finite number of seconds above 0.

    `none` allows None, `zero` allows 0.
    """
    if value is None and none:
        return
    number = (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MAX_SECONDS
    )
    if not number or (value == 0 and not zero):
        expected = ("seconds from 0 on" if zero else "seconds above 0") + (
            ", or None" if none else ""
        )
        raise argument_error(found, expected, argument=argument)


def check_choice(
    value: object, found: str, choices: Sequence[object], *, argument: str, **about: Any
) -> None:
    """Raise `argument_error` unless `value` is one of the choices."""
    if value not in choices:
        raise argument_error(
            found, f"one of {', '.join(map(repr, choices))}", argument=argument, **about
        )


def import_package(what: str, module: str, extra: str, **about: Any) -> Any:
    """Import and return a module of an optional package, which `what` needs. Raises
    ConfigurationError without it.

    `extra` is the extra of this distribution that installs it; `about` are further fields of the
    error.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        problem = f"{what} needs the package {package}, which can't be imported here ({error})."
        step = f'Install it, on executors too: pip install "dagster-adjunct[{extra}]".'
        raise ConfigurationError(problem, step, package=package, **about) from error


# The folder that the packages are imported from. The examples below it count as user code.
_PACKAGE = Path(__file__).parents[1]
_EXAMPLES = str(_PACKAGE / "examples")
# Code that makes an object of a class of this distribution from what a user has passed to it.
_MODELS = re.compile(r"[/\\]site-packages[/\\](?:pydantic|dagster[/\\]_config)[/\\]")


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A line of code: its file and line number."""

    file: str
    line: int

    def __str__(self) -> str:
        """Return "visits.py:12"; the path is relative if the file is in the working directory or
        below it.
        """
        file = Path(self.file)
        if file.is_relative_to(Path.cwd()):
            file = file.relative_to(Path.cwd())
        return f"{file}:{self.line}"

    def describe(self) -> str:
        """Return "flights.py, line 12", for messages: without the folder, so the text is the
        same on all machines.
        """
        return f"{Path(self.file).name}, line {self.line}"


def is_library_code(file: str) -> bool:
    """Whether a file of code belongs to this distribution; its examples count as user code."""
    return file.startswith(str(_PACKAGE)) and not file.startswith(_EXAMPLES)


_declared_at: ContextVar[CodeLine | None] = ContextVar("declared_at", default=None)


@contextmanager
def declaring_at(line: CodeLine | None) -> Iterator[None]:
    """Let `find_calling_line` return this line in the context.

    For declarations in files that are not code, such as YAML. None changes nothing.
    """
    before = _declared_at.set(line)
    try:
        yield
    finally:
        _declared_at.reset(before)


def find_calling_line() -> CodeLine | None:
    """Return the line of user code that called into this distribution, or that of `declaring_at`;
    None in an interactive session.
    """
    if (declared := _declared_at.get()) is not None:
        return declared
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        is_between = file.startswith("<") or _MODELS.search(file)
        if not is_between and not is_library_code(file):
            return CodeLine(file, frame.f_lineno)
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


def check_name(kind: str, name: str) -> str:
    """Return `name` if it is safe in paths and keys; `kind` says in errors what it names
    ("dataset", "stream").

    A safe name has 1 to 100 letters, digits, `-` and `_`, and begins with a letter or digit. It has
    no dots, because `system.stream.3` names a partition of a stream.
    """
    if not isinstance(name, str) or not _SAFE.fullmatch(name):
        system, _, stream = str(name).partition(".")
        if kind == "stream" and _SAFE.fullmatch(system) and _SAFE.fullmatch(stream):
            problem = f"stream name {name!r} includes its system: expected the name alone."
            step = f"Write {stream!r}."
        else:
            problem = (
                f"{kind} name {name!r} is not safe: expected 1 to 100 letters, digits, '-' or '_', "
            )
            problem += "beginning with a letter or digit."
            safe = re.sub(r"[^A-Za-z0-9_-]+", "-", str(name)).strip("-_")[:100]
            step = "Choose another name."
            if safe:
                step = f"Choose another name, such as {safe!r}."
        raise InvalidNameError(problem, step, name=str(name))
    return name


def split_stream_name(qualified: str) -> tuple[str, str]:
    """Return the system and the stream that "system.stream" names, both checked."""
    system, dot, stream = str(qualified).partition(".")
    if not dot:
        problem = f"stream {qualified!r} names no system: expected SYSTEM.STREAM."
        raise InvalidNameError(
            problem, f'Write "lake.{qualified}" for a stream of the lake.', name=str(qualified)
        )
    if "." in stream:
        problem = f"stream {qualified!r} has more than one dot: expected SYSTEM.STREAM."
        step = (
            f'Write "{system}.{stream.partition(".")[0]}", without a partition; a stream\'s name'
            " has no dots."
        )
        raise InvalidNameError(problem, step, name=str(qualified))
    return check_name("system", system), check_name("stream", stream)


def unqualify_stream_name(system: str, name: str) -> str:
    """Return the stream's name without its system, which may precede it ("SYSTEM.STREAM") and
    must be `system`.
    """
    if "." not in name:
        return check_name("stream", name)
    named, stream = split_stream_name(name)
    if named != system:
        problem = (
            f"stream {name!r} belongs to the system {named!r}: expected a stream of {system!r}."
        )
        raise ConfigurationError(
            problem, f'Write "STREAM" or "{system}.STREAM".', stream=name, system=named
        )
    return stream


def split_partitions(text: str) -> tuple[str, str | None]:
    """Split "system.stream.0-3,7" into "system.stream" and "0-3,7", which is None where no
    partitions are named.

    Neither part is checked: `split_stream_name` does that.
    """
    system, dot, rest = text.strip().partition(".")
    stream, separator, partitions = rest.partition(".")
    return f"{system}{dot}{stream}", partitions if separator else None


class ClassRegistry(Generic[T]):
    """Classes of one kind, each registered under a name. Their objects are stored as this name and
    their settings.

    `kind` names the classes in errors ("backend of tables"), `call` is the public function that
    registers one. The settings are what an object's `to_dict()` returns. Adjunct's own classes are
    given as name="module.Class", and imported only when a stored document names them.
    """

    def __init__(self, kind: str, call: str, **ours: str) -> None:
        self._kind = kind
        self._call = call
        self._ours = {name: f"dagster_adjunct.{path}" for name, path in ours.items()}
        self._classes: dict[str, Callable[..., T]] = {}

    def register(self, name: str, factory: Callable[..., T]) -> None:
        """Register a class under `name`. It must accept the items of its `to_dict()` as keyword
        arguments.
        """
        known = self._find(check_name("backend", name)) or self._classes.setdefault(name, factory)
        if known is not factory:
            problem = f"the {self._kind} {name!r} is already registered, as {known!r}."
            raise ConfigurationError(problem, "Register it under another name.", backend=name)

    def describe(self, item: Any) -> dict[str, Any]:
        """Return an object of a registered class as plain values: {"backend": "sqlite", …}."""
        path = f"{type(item).__module__}.{type(item).__qualname__}"
        for name, known in [*self._ours.items(), *self._classes.items()]:
            if known in (path, type(item)):
                return {"backend": name, **item.to_dict()}
        problem = (
            f"{type(item).__name__} is not a registered {self._kind}; registered are"
            f" {self._names()}."
        )
        raise ConfigurationError(
            problem, f"Register it with {self._call}(name, class).", backend=type(item).__name__
        )

    def from_description(self, description: Mapping[str, Any]) -> T:
        """Return a new object with the class and settings that `describe` has returned."""
        settings = dict(description)
        name = settings.pop("backend", None)
        make = self._find(str(name))
        if make is None:
            problem = (
                f"a stored document names the {self._kind} {name!r}, which is not registered;"
                " registered are "
            )
            problem += f"{self._names()}."
            step = (
                f"Import the module that registers it, or call {self._call}(name, class) before"
                " reading it."
            )
            raise ConfigurationError(problem, step, backend=str(name))
        signature = inspect.signature(make)
        try:
            signature.bind(**settings)
        except TypeError as error:
            problem = f"the {self._kind} {name!r} rejects its stored settings: {error}."
            step = f"It accepts {', '.join(signature.parameters)}."
            raise ConfigurationError(problem, step, argument="backend", backend=str(name)) from None
        return make(**settings)

    def _find(self, name: str) -> Callable[..., T] | None:
        if name not in self._ours:
            return self._classes.get(name)
        module, _, cls = self._ours[name].rpartition(".")
        found: Callable[..., T] = getattr(import_module(module), cls)
        return found

    def _names(self) -> str:
        return ", ".join(sorted({*self._ours, *self._classes}))


class RepeatedMemberError(ValueError):
    """A JSON object has a member twice; the text is the member's name."""


def unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of a JSON object, for `object_pairs_hook`. Raises RepeatedMemberError."""
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise RepeatedMemberError(name)
        members[name] = value
    return members


class StoredDocument(BaseModel):
    """A stored document, or a part of one: frozen, and rejecting fields that this release does
    not know.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Report:
    """Base of dataclasses that report what was done, found or planned; programs read them as
    JSON.
    """

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return _fields_to_json(self)


def to_json_value(value: Any) -> Any:
    """Return a value in a form that JSON can hold.

    Times become ISO text, durations seconds, binary values base64. Decimals, NaN and infinities
    become text, as do objects whose class defines `__str__`, such as partitions.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return str(float(value))
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json_value(item) for item in value]
    if hasattr(value, "to_json"):
        return value.to_json()
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        return to_json_value(value.item())
    is_text = any("__str__" in vars(cls) for cls in type(value).__mro__[:-1])
    if is_dataclass(value) and not is_text:
        return _fields_to_json(value)
    return str(value)


def _fields_to_json(value: Any) -> dict[str, Any]:
    return {field.name: to_json_value(getattr(value, field.name)) for field in fields(value)}


def validation_problems(error: ValidationError) -> list[str]:
    """Return the problems that pydantic found, each as "field: message"; messages of validators
    stay as they are.
    """
    return [
        f"{'.'.join(map(str, one['loc'])) or 'the whole document'}:"
        f" {one['msg'].removeprefix('Value error, ')}"
        for one in error.errors(include_url=False)
    ]


def first_validation_problem(error: ValidationError) -> str:
    """Return the first problem that pydantic found, as "field: message"."""
    return validation_problems(error)[0]


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST = datetime.min.replace(tzinfo=UTC)
_LAST = datetime.max.replace(tzinfo=UTC)


_DURATION = re.compile(r"(\d+)\s*(s|m|h|d|w)", re.ASCII)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def read_duration(text: str) -> timedelta | None:
    """Return the duration that is written as 30s, 90m, 2h, 7d or 1w; None if it is none."""
    written = _DURATION.fullmatch(text.strip())
    if written is None:
        return None
    try:
        return timedelta(**{_UNITS[written[2]]: int(written[1])})
    except (OverflowError, ValueError):  # int() rejects thousands of digits
        return None


def describe_span(span: object) -> str:
    """Return a timedelta as text, such as "0:05:00" or "-1 day, 0:00:00"; of another value its
    repr.
    """
    if not isinstance(span, timedelta):
        return repr(span)
    if span < timedelta(0):
        return f"-{-span}"
    return str(span)


def subtract_span(now: datetime, span: timedelta) -> datetime:
    """Return `now` minus `span`, or the first moment of the year 1 where that is too far back
    (`timedelta.max`).
    """
    return now - min(span, now - _FIRST)


def add_span(now: datetime, span: timedelta) -> datetime:
    """Return `now` plus `span`, or the last moment of the year 9999 where that is too far ahead
    (`timedelta.max`).
    """
    return now + min(span, _LAST - now)


def sum_counters(before: Mapping[str, N], more: Mapping[str, N]) -> dict[str, N]:
    """Return the sums of two sets of counters, by name; a missing counter is 0."""
    return {name: before.get(name, 0) + more.get(name, 0) for name in {**before, **more}}


def to_microseconds(moment: datetime) -> int:
    """Return the exact number of microseconds from 1970 to a moment with a time zone."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def fits_utc(moment: datetime) -> bool:
    """Whether a moment with a time zone is in the years 1 to 9999 of UTC, too."""
    try:
        moment.astimezone(UTC)
    except OverflowError:
        return False
    return True


def utc_now() -> datetime:
    """Return the time of this machine, the default clock of a lake."""
    return datetime.now(UTC)


def require_reason(reason: str, what: str, changed: str, **facts: str) -> None:
    """Raise ConfigurationError for a change without a reason: `what` can't be `changed`
    ("deleted").
    """
    if not reason.strip():
        step = "Pass a reason, which is recorded with the change."
        raise ConfigurationError(
            f"{what} can't be {changed} without a reason.", step, argument="reason", **facts
        )


def resolve_user(by: str | None) -> str:
    """Return `by`, or else the user of the operating system. Raises ConfigurationError if
    neither is known.
    """
    if by is None:
        try:
            by = getpass.getuser()
        except (KeyError, OSError, ImportError) as error:
            problem = "the operating system does not tell the current user's name."
            raise ConfigurationError(problem, "Pass by=, or --by NAME.", argument="by") from error
    if not by.strip():
        raise ConfigurationError("by is empty.", "Give a name, or omit it.", argument="by")
    return by.strip()


REQUESTS_AT_ONCE = 8


class requested_once(cached_property[T]):
    """A `functools.cached_property` for values that take requests.

    In Python 3.11 a cached property computes its value under a lock that all instances of the class
    share: a request of one would stop all others.
    """

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> T: ...

    def __get__(self, instance: object, owner: type[Any] | None = None) -> Self | T:
        if instance is None:
            return self
        assert self.attrname is not None
        value: T = instance.__dict__.setdefault(self.attrname, self.func(instance))
        return value


def map_in_threads(
    work: Callable[[A], T], items: Iterable[A], at_once: int = REQUESTS_AT_ONCE
) -> list[T]:
    """Return the results of `work` for the items, in their order, from up to `at_once` concurrent
    calls.

    Raises the error of the first item, in this order, that failed. Errors and interrupts are raised
    once no call is running any more; calls that have not begun by then are cancelled.
    """
    listed = list(items)
    if min(len(listed), at_once) < 2:
        return [work(item) for item in listed]
    begun: list[Future[T]] = []
    with ThreadPoolExecutor(min(len(listed), at_once), "adjunct-requests") as threads:
        # Python starts no threads after the main one has ended: then this thread does the rest
        # itself.
        with suppress(RuntimeError):
            begun.extend(threads.submit(work, item) for item in listed)
        try:
            return [future.result() for future in begun] + [
                work(item) for item in listed[len(begun) :]
            ]
        finally:
            for future in begun:
                future.cancel()


def call_in_threads(*calls: Callable[[], Any], at_once: int = REQUESTS_AT_ONCE) -> list[Any]:
    """Return the results of these calls, made at the same time as by `map_in_threads`."""
    return map_in_threads(lambda call: call(), calls, at_once)


class LoopThread:
    """An event loop in a thread of its own, which runs coroutines for callers that block until they
    are done.

    Callers may be in any thread, also in one whose own event loop is running (and blocked
    meanwhile). The thread starts with the first coroutine, and again after `close` and after a
    fork.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: _Running | None = None
        self._change = threading.Condition()
        _loop_threads.add(self)

    def run(self, operation: Coroutine[Any, Any, T]) -> T:
        """Return what the coroutine returns, or raise what it raises."""
        mine = self._enter()
        try:
            pending = asyncio.run_coroutine_threadsafe(operation, mine.loop)
            try:
                return pending.result()
            except BaseException:
                # Ctrl-C must not leave the request running behind the caller's back
                pending.cancel()
                raise
        finally:
            self._leave(mine)

    def close(self, closing: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run a last coroutine, which releases the loop's resources, then end the thread; nothing
        without a thread.

        Callers that are waiting in other threads get their results first; later callers start a new
        thread.
        """
        with self._change:
            running = self._running
            self._running = None
            if running is None:
                return
            # A signal handler may call this in a thread that is waiting here, and whose call can't
            # finish first.
            this = threading.get_ident()
            self._change.wait_for(lambda: all(caller == this for caller in running.callers))
        try:
            asyncio.run_coroutine_threadsafe(closing(), running.loop).result()
        finally:
            running.loop.call_soon_threadsafe(running.loop.stop)
            running.thread.join()
            running.loop.close()

    def _enter(self) -> _Running:
        with self._change:
            if self._running is None:
                self._running = _Running(self._name)
            self._running.callers.append(threading.get_ident())
            return self._running

    def _leave(self, running: _Running) -> None:
        with self._change:
            running.callers.remove(threading.get_ident())
            self._change.notify_all()

    def _abandon(self) -> None:
        """Drop the parent process's loop after a fork: its thread does not exist here, and its
        selector is shared.
        """
        _parent_loops.append(self._running)
        self._running = None
        self._change = threading.Condition()


class _Running:
    """A loop with its thread; `callers` are the threads that wait for it."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.callers: list[int] = []
        self.thread = threading.Thread(
            target=_run_until_stopped, args=(self.loop,), name=name, daemon=True
        )
        self.thread.start()


_loop_threads: WeakSet[LoopThread] = WeakSet()
_parent_loops: list[
    _Running | None
] = []  # kept: collecting a loop would close the selector that the parent uses


def _reset_after_fork() -> None:
    for loop_thread in list(_loop_threads):
        loop_thread._abandon()


os.register_at_fork(after_in_child=_reset_after_fork)


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
        except (KeyboardInterrupt, SystemExit):
            # A coroutine raised it and so stopped the loop. Run it again, so that the caller
            # receives the exception.
            continue
        return
