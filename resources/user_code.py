"""Errors about the user's own code: where it failed, what it raised, and for which record,
masked and truncated.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from inspect import getattr_static, isasyncgenfunction, iscoroutinefunction, signature
from pathlib import Path
from typing import Any

from dagster_adjunct.resources.code_lines import CodeLine, is_library_code
from dagster_adjunct.resources.errors import ConfigurationError, OperatorFailedError

MASKED = "***"
MAX_VALUE_CHARS = 80
"""The most characters of a value that an error shows."""
_MAX_COLUMNS = 20
_LINE = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_LIBRARIES = re.compile(r"(?:^|[/\\])(?:pyspark|py4j|pyarrow|pandas|numpy|cloudpickle)[/\\]")
_STDLIB = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})


def check_plain_function(
    what: str, function: Callable[..., object], argument: str, *given: str
) -> None:
    """Raise ConfigurationError for an async function, and for one that can't be called with the
    `given` arguments.

    `given` describes each argument. Functions whose signature is unknown pass.
    """
    if isinstance(function, partial):
        inner = function.func
    else:
        inner = function
    name = getattr(inner, "__name__", type(inner).__name__)
    callees = (inner, type(inner).__call__)  # an object is async if its `__call__` is
    is_async = any(map(iscoroutinefunction, callees)) or any(map(isasyncgenfunction, callees))
    if is_async:
        problem = f"{what} got {name}(), which is async: expected a synchronous function."
        step = "Write it with def; to await something in it, call asyncio.run(…)."
        raise ConfigurationError(problem, step, argument=argument)
    try:
        # Of the wrapper, if it is decorated: that is called.
        parameters = signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    try:
        parameters.bind(*given)
    except TypeError as error:
        problem = (
            f"{what} calls {name}() with ({', '.join(given)}), but its parameters are {parameters}:"
            f" {error}."
        )
        step = (
            f"Let it take {len(given)} argument{'' if len(given) == 1 else 's'}; bind others with"
            " functools.partial."
        )
        raise ConfigurationError(problem, step, argument=argument) from None


def function_failed_error(
    operator: str,
    called: str,
    function: object,
    error: BaseException,
    *,
    record: Mapping[str, Any] | None = None,
    sensitive: Collection[str] = (),
    among: int = 1,
    **about: Any,
) -> OperatorFailedError:
    """Return the error for a function of an operator (`called`, as plans show it) that raised
    `error`.

    It names the line that failed, or the function's own line where the call itself failed. `record`
    is the record for which it failed, if that is known, or the first of a batch of `among` records.
    Values of `sensitive` columns are masked, and if there are any, the function's own message is
    left out as well. `about` are further fields of the error, such as the record's position. Raise
    it from `error`, unless there are sensitive columns.
    """
    place = failing_line(error) or definition_line(function)
    message = ""
    if not sensitive:
        message = str(error).strip()
    problem = f"{operator}: {called} raised {type(error).__name__}"
    if message:
        problem += f": {truncate_text(message)}"
    return operator_failed_error(
        problem, place, record, sensitive, among=among, operator=operator, **about
    )


def operator_failed_error(
    problem: str,
    place: CodeLine | None,
    record: Mapping[str, Any] | None,
    sensitive: Collection[str],
    *,
    among: int = 1,
    **about: Any,
) -> OperatorFailedError:
    """Return an error with this problem, followed by what is known of the line of the user's file
    (`place`), the record's position, and the record, or the first of `among` records.

    The position is in `about`, as "stream", "partition" and "offset".
    """
    if place is not None:
        problem += f" ({place.describe()})"
        about |= {"file": place.file, "line": place.line}
    position = [about.get(name) for name in ("stream", "partition", "offset")]
    if None not in position:
        stream, partition, offset = position
        problem += f", at {stream}.{partition} offset {offset}"
    if record is not None:
        shown = format_record(record, sensitive)
        about["record"] = shown
        if among == 1:
            problem += f", for {shown}"
        else:
            problem += f", for {among} records from {shown} on"
    return OperatorFailedError(f"{problem.rstrip('.')}.", "Fix it and run again.", **about)


def format_record(record: Mapping[str, Any], sensitive: Collection[str] = ()) -> str:
    """Return a record for a message: `{k: 'a', email: ***}`, without hidden columns, long values
    truncated, and "…" for columns beyond 20.
    """
    hidden = {name.lower() for name in sensitive}
    shown: list[str] = []
    for name, value in record.items():
        if name.startswith("__"):
            continue
        if len(shown) == _MAX_COLUMNS:
            shown.append("…")
            break
        if name.lower() not in hidden:
            text = truncate_text(repr(value))
        else:
            text = MASKED
        shown.append(f"{name}: {text}")
    return f"{{{', '.join(shown)}}}"


def truncate_text(text: str) -> str:
    """Return the first line of a text, at most 80 characters of it; the last is "…" if anything is
    left out.
    """
    line = ""
    if text:
        line = text.splitlines()[0]
    if len(line) <= MAX_VALUE_CHARS and line == text:
        return line
    return f"{line[: MAX_VALUE_CHARS - 1]}…"


def definition_line(function: object) -> CodeLine | None:
    """Return the line that defines a function, below its decorators; None where it is not user
    code.
    """
    while isinstance(function, partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, partial) else function.__wrapped__
    if not hasattr(function, "__code__"):  # an object that can be called, or a built-in function
        called = getattr_static(function, "__call__", None)
    else:
        called = function
    code = getattr(called, "__code__", None)
    if code is None:
        return None
    return _innermost([(code.co_filename, code.co_firstlineno)])


def failing_line(error: BaseException) -> CodeLine | None:
    """Return the innermost line of user code in an error's traceback, or else in that of its
    cause; None if there is none.
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = _innermost((frame.filename, frame.lineno or 0) for frame in frames)
    if place is None and error.__cause__ is not None:
        return failing_line(error.__cause__)
    return place


def failing_line_in_text(text: str) -> CodeLine | None:
    """Return the innermost line of user code in the text of a traceback, as Spark's workers send
    it; None if there is none.
    """
    return _innermost((match["file"], int(match["line"])) for match in _LINE.finditer(text))


def _innermost(lines: Iterable[tuple[str, int]]) -> CodeLine | None:
    """Return the last of these (file, line) that is user code, None without one."""
    user_lines = []
    for file, line in lines:
        if _is_user_code(file):
            user_lines.append(CodeLine(file, line))
    if user_lines:
        return user_lines[-1]
    return None


def _is_user_code(file: str) -> bool:
    """Whether a file is neither of Python, of this distribution, nor of a library whose frames only
    lead to user code.
    """
    if file.startswith("<") or is_library_code(file) or _LIBRARIES.search(file):
        return False
    # libraries are installed below the folder of Python's own modules
    is_of_python = file.startswith(_STDLIB) and "site-packages" not in Path(file).parts
    return not is_of_python
