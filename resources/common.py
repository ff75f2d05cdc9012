"""`LoopThread`: an event loop in a thread of its own, for code that isn't async."""

from __future__ import annotations

import asyncio
import getpass
import inspect
import os
import re
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet

from pydantic import BaseModel, ConfigDict

from dagster_adjunct.resources.errors import ConfigurationError, InvalidNameError

if TYPE_CHECKING:
    from pydantic import ValidationError

_ENDLESS = 1e12  # seconds: beyond it clocks and stores can't count


def check_whole_number(
    value: object, what: str, expected: str, *, argument: str, least: int = 1, next_step: str = "Change it."
) -> None:
    """Raise ConfigurationError, "`what`: expected `expected`.", unless `value` is a whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{what}: expected {expected}.", next_step, argument=argument)


def check_seconds(
    value: object, what: str, *, argument: str, none: bool = False, zero: bool = False, next_step: str = "Change it."
) -> None:
    """Raise ConfigurationError, "`what`: expected seconds above 0.", unless `value` is such a number and finite.

    `none`: it may be None; `zero`: it may be 0.
    """
    if value is None and none:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _ENDLESS
    if not number or (value == 0 and not zero):
        expected = ("seconds from 0 on" if zero else "seconds above 0") + (", or None" if none else "")
        raise ConfigurationError(f"{what}: expected {expected}.", next_step, argument=argument)


# The folder that the floors are imported from; examples are written as users write, and are installed beside them.
_PACKAGE = Path(__file__).parents[1]
_EXAMPLES = str(_PACKAGE / "examples")


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A line of a file of this machine."""

    file: str
    line: int

    def words(self) -> str:
        """Return it for a message: "flights.py, line 12", below the working directory with the folders on the way."""
        file = Path(self.file)
        here = Path.cwd()
        shown = file.relative_to(here) if file.is_relative_to(here) else Path(file.name)
        return f"{shown}, line {self.line}"


def is_library_code(file: str) -> bool:
    """Whether a file of code belongs to this distribution, whose examples are written as users write."""
    return file.startswith(str(_PACKAGE)) and not file.startswith(_EXAMPLES)


def find_calling_line() -> CodeLine | None:
    """Return the line that called into this distribution, None where there is none (an interactive session)."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<") and not is_library_code(file):
            return CodeLine(file, frame.f_lineno)
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


T = TypeVar("T")


class LoopThread:
    """Runs coroutines for callers that wait for them, from any thread, also from one whose own event loop is running
    (which they block meanwhile). The thread begins with the first of them, and again after `close` and after a fork."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: _Running | None = None
        self._change = threading.Condition()
        _loop_threads.add(self)

    def run(self, operation: Coroutine[Any, Any, T]) -> T:
        """Return what the coroutine returns, or raise what it raises."""
        mine = self._entered()
        try:
            pending = asyncio.run_coroutine_threadsafe(operation, mine.loop)
            try:
                return pending.result()
            except BaseException:
                pending.cancel()  # Ctrl-C must not leave the request running behind the caller's back
                raise
        finally:
            self._leave(mine)

    def close(self, closing: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run the last coroutine, which gives back what the loop holds, and end the thread, if one began.

        Callers that wait in other threads have their answers before; a new one begins a new thread.
        """
        with self._change:
            running, self._running = self._running, None
            if running is None:
                return
            # In a handler of a signal, whom it interrupted is this thread itself, and would be waited for in vain.
            this = threading.get_ident()
            self._change.wait_for(lambda: all(caller == this for caller in running.callers))
        try:
            asyncio.run_coroutine_threadsafe(closing(), running.loop).result()
        finally:
            running.loop.call_soon_threadsafe(running.loop.stop)
            running.thread.join()
            running.loop.close()

    def _entered(self) -> _Running:
        with self._change:
            if self._running is None:
                self._running = _Running(self._name)
            self._running.callers.append(threading.get_ident())
            return self._running

    def _leave(self, running: _Running) -> None:
        with self._change:
            running.callers.remove(threading.get_ident())
            self._change.notify_all()

    def _forget(self) -> None:
        """Leave what the parent process has alone: its thread is not here, and its loop's selector is shared."""
        _parent_loops.append(self._running)
        self._running, self._change = None, threading.Condition()


class _Running:
    """A loop with its thread; `callers` are the threads that wait for it."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.callers: list[int] = []
        self.thread = threading.Thread(target=_run_until_stopped, args=(self.loop,), name=name, daemon=True)
        self.thread.start()


_loop_threads: WeakSet[LoopThread] = WeakSet()
_parent_loops: list[_Running | None] = []  # kept, as a loop that goes closes what it shares with the parent


def _reset_after_fork() -> None:
    for loop_thread in list(_loop_threads):
        loop_thread._forget()


os.register_at_fork(after_in_child=_reset_after_fork)


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
        except (KeyboardInterrupt, SystemExit):
            # A function raised it. That ends the loop's run, and its caller is yet to be told.
            continue
        return


_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


def check_name(kind: str, name: str) -> str:
    """Return `name` if it is safe; `kind` says in the error what it names ("dataset", "stream").

    Safe is: 1 to 100 letters, digits, `-` and `_`, the first one a letter or digit. Dots are left out
    because `system.stream.3` is how a stream partition is written.
    """
    if not isinstance(name, str) or not _SAFE.fullmatch(name):
        system, _, stream = str(name).partition(".")
        if kind == "stream" and _SAFE.fullmatch(system) and _SAFE.fullmatch(stream):
            problem, step = f"stream {name!r} is named with its system: expected its name alone.", f"Write {stream!r}."
        else:
            problem = f"{kind} name {name!r} is not safe: expected 1 to 100 letters, digits, '-' or '_', "
            problem += "beginning with a letter or digit."
            safe = re.sub(r"[^A-Za-z0-9_-]+", "-", str(name)).strip("-_")[:100]
            step = f"Choose another name, such as {safe!r}." if safe else "Choose another name."
        raise InvalidNameError(problem, step, name=str(name))
    return name


def split_stream_name(qualified: str) -> tuple[str, str]:
    """Split "system.stream" into its two checked names."""
    system, dot, stream = str(qualified).partition(".")
    if not dot:
        raise InvalidNameError(
            f"stream {qualified!r} names no system: expected SYSTEM.STREAM.",
            f'Write "lake.{qualified}" for a stream of the lake.',
            name=str(qualified),
        )
    if "." in stream:
        raise InvalidNameError(
            f"stream {qualified!r} has more than one dot: expected SYSTEM.STREAM.",
            f'Write "{system}.{stream.partition(".")[0]}", without a partition; a stream\'s name has no dots.',
            name=str(qualified),
        )
    return check_name("system", system), check_name("stream", stream)


def unqualify_stream_name(system: str, name: str) -> str:
    """Return the name of a stream within `system`; "SYSTEM.STREAM" is taken as well. One of another is refused."""
    if "." not in name:
        return check_name("stream", name)
    named, stream = split_stream_name(name)
    if named != system:
        raise ConfigurationError(
            f"{name!r} is a stream of the system {named!r}: expected one of {system!r}.",
            f'Write "STREAM" or "{system}.STREAM".',
            stream=name,
            system=named,
        )
    return stream


def split_partitions(text: str) -> tuple[str, str | None]:
    """Split "system.stream.0-3,7" into "system.stream" and what it says of partitions, None where it says nothing.

    Nothing is checked: `split_stream_name` does that.
    """
    system, dot, rest = text.strip().partition(".")
    stream, says, partitions = rest.partition(".")
    return f"{system}{dot}{stream}", partitions if says else None


class ClassRegistry(Generic[T]):
    """Classes of one kind, each under a name; their objects tell their settings by `to_dict()`.

    `kind` names them in errors ("backend of tables"), `call` says how one is registered.
    """

    def __init__(self, kind: str, call: str) -> None:
        self._kind, self._call = kind, call
        self._classes: dict[str, Callable[..., T]] = {}

    def register(self, name: str, made_by: Callable[..., T]) -> None:
        """Make a class known as `name`. It takes, as keywords, what `to_dict()` of its objects gives."""
        known = self._classes.setdefault(check_name("backend", name), made_by)
        if known is not made_by:
            raise ConfigurationError(
                f"the {self._kind} {name!r} is registered already, as {known!r}.",
                "Register it under another name.",
                backend=name,
            )

    def describe(self, made: Any) -> dict[str, Any]:
        """Return an object of a registered class as plain values: {"backend": "sqlite", …}."""
        for name, known in self._classes.items():
            if type(made) is known:
                return {"backend": name, **made.to_dict()}
        raise ConfigurationError(
            f"{type(made).__name__} is no registered {self._kind}; registered are {self._names()}.",
            f"Register it with {self._call}(name, class).",
            backend=type(made).__name__,
        )

    def from_description(self, description: Mapping[str, Any]) -> T:
        """Return the object that `describe` described."""
        settings = dict(description)
        name = settings.pop("backend", None)
        if name not in self._classes:
            raise ConfigurationError(
                f"what is stored names the {self._kind} {name!r}; registered are {self._names()}.",
                f"Import what registers it, or register it with {self._call}(name, class) before it is read.",
                backend=str(name),
            )
        make = self._classes[name]
        signature = inspect.signature(make)
        try:
            signature.bind(**settings)
        except TypeError as error:
            raise ConfigurationError(
                f"the {self._kind} {name!r} can't be made of its settings: {error}.",
                f"It takes {', '.join(signature.parameters)}.",
                argument="backend",
                backend=str(name),
            ) from None
        return make(**settings)

    def _names(self) -> str:
        return ", ".join(sorted(self._classes)) or "none"


class StoredDocument(BaseModel):
    """A stored document, or a part of one: frozen, and without fields that this release does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def validation_problems(error: ValidationError) -> list[str]:
    """Return what pydantic found wrong, each as "field: message"; a validator's own words as they are."""
    details = error.errors(include_url=False)
    return [
        f"{'.'.join(map(str, one['loc'])) or 'the whole document'}: {one['msg'].removeprefix('Value error, ')}"
        for one in details
    ]


def first_validation_problem(error: ValidationError) -> str:
    """Return the first thing that pydantic found wrong, as "field: message"."""
    return validation_problems(error)[0]


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST = datetime.min.replace(tzinfo=UTC)


def subtract_span(now: datetime, span: timedelta) -> datetime:
    """Return the moment so long before `now`; the first of the year 1 where `timedelta.max` says "without limit"."""
    return now - min(span, now - _FIRST)


def to_microseconds(moment: datetime) -> int:
    """Return the microseconds since 1970 of a moment with a zone; exact."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def utc_now() -> datetime:
    """Return this machine's time: what a lake goes by that was given no other clock."""
    return datetime.now(UTC)


def resolve_user(by: str | None) -> str:
    """Return who does it: as given, or the user of the operating system. Raises ConfigurationError for nobody."""
    if by is None:
        try:
            by = getpass.getuser()
        except (KeyError, OSError, ImportError) as error:
            raise ConfigurationError(
                "this machine does not say who you are.", "Pass by=, or --by NAME.", argument="by"
            ) from error
    if not by.strip():
        raise ConfigurationError("by is empty.", "Name who does it, or leave it out.", argument="by")
    return by.strip()
