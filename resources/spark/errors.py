"""Adjunct's errors on their way through Spark: raised in a task or by a plan, met again where the job was started.

Spark wraps what a task raises into errors of its own, with the text of the first. So the error travels as a text
within that text, and `unwrapped` finds it there. What Spark says of a damaged file, or of a worker that is gone,
becomes an error of ours too.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ManifestMismatchError,
    PlanningError,
    StoreUnavailableError,
    TransientError,
)
from dagster_adjunct.resources.file_errors import DISK_FULL_ERRNOS, file_error

if TYPE_CHECKING:
    from pyspark.sql import Column

T = TypeVar("T")
STACK_SIZE = "16m"
"""How much stack a thread of Spark's JVMs may take: enough for a chain of 1,500 operators."""
# How an error travels: readable, because Spark's executors log the whole text of what a task raises.
_ENCODED = "adjunct-error[{kind}] {problem} [next step] {next_step} [facts] {facts} [adjunct-error]"
_ENCODED_PATTERN = re.compile(
    r"adjunct-error\[(?P<error>\w+)\] (?P<problem>.*?) \[next step\] (?P<next_step>.*?)"
    r"(?: \[facts\] (?P<facts>.*?))? \[adjunct-error\]",
    re.S,
)
# How a Python worker's traceback ends when a task raised one of our errors: the class, then its message.
_RAISED = re.compile(rf"^{re.escape(errors.__name__)}\.(?P<name>\w+): (?P<message>.*)", re.MULTILINE | re.DOTALL)
# How Spark names a file that it can't read, and what says that the file is to blame and not the way to it.
_UNREAD = re.compile(r"\[FAILED_READ_FILE\.\w+\] Encountered error while reading file (?P<file>\S+?)\.\s")
# What the network, or the store's server, does to a request of Spark's; S3A wraps it into errors of its own.
_CUT_OFF = re.compile(
    r"^(?:Caused by: |: )(?:java\.net\.\w+Exception|javax\.net\.ssl\.\w+Exception|java\.io\.InterruptedIOException"
    r"|org\.apache\.http\.[\w.]*(?:ConnectionClosed|NoHttpResponse|ConnectTimeout|TruncatedChunk|HttpHostConnect|"
    r"ConnectionPoolTimeout|MalformedChunkCoding)Exception|org\.apache\.hadoop\.net\.ConnectTimeoutException"
    r"|org\.apache\.hadoop\.fs\.s3a\.AWS(?:Status500|ServiceThrottled|NoResponse|ApiCallTimeout)Exception"
    r"|software\.amazon\.awssdk\.core\.exception\.(?:ApiCall\w*Timeout|Retryable)Exception"
    r"|software\.amazon\.awssdk\.core\.exception\.SdkClientException(?=: Unable to execute HTTP request)"
    r"): (?P<cause>[^\n]*)",
    re.MULTILINE,
)
# What the JVM says where a task's Python process has closed its connection without a word.
_WORKER_LOST = "Python worker exited unexpectedly"
# How the JVM says that a plan is nested deeper than it can follow.
_TOO_DEEP = re.compile(r"^(?:Caused by: |: )java\.lang\.StackOverflowError", re.MULTILINE)
# What the JVM, or a Python worker, says of a disk without room or that may not be written: Spark's own temporary files.
_NO_ROOM = re.compile(
    r"(?:java\.(?:nio\.file\.FileSystemException|io\.(?:IOException|FileNotFoundException))|OSError): (?P<cause>[^\n]*?"
    r"(?:No space left on device|Disk quota exceeded|Read-only file system)[^\n]*)"
)
_DAMAGED = re.compile(
    r"^Caused by: (?:java\.lang\.\w+|java\.io\.(?:EOF|FileNotFound)Exception|[\w.$]*\b(?:parquet|zstd)\b[\w.$]*"
    r"|[\w.]+\.SchemaColumnConvertNotSupportedException): (?P<cause>[^\n]*)",
    re.MULTILINE,
)


def encode_task_errors(items: Iterator[T]) -> Iterator[T]:
    """Yield the items in a Spark task; what they raise can be found again by `unwrapped`."""
    try:
        yield from items
    except AdjunctError as error:
        text = _ENCODED.format(
            kind=error_class_name(error),
            problem=error.problem,
            next_step=error.next_step,
            facts=json.dumps(_facts(error)),
        )
        raise RuntimeError(text) from None


def error_to_json(error: AdjunctError) -> dict[str, Any]:
    """Return what `from_document` makes the same error of, to be sent as JSON by a task that must not fail itself."""
    return {
        "error": error_class_name(error),
        "problem": error.problem,
        "next_step": error.next_step,
        "facts": _facts(error),
    }


def error_from_json(document: Mapping[str, Any]) -> AdjunctError:
    """Return the error that a task has sent, with the facts that its class has."""
    kind = _error_class(document["error"]) or AdjunctError
    known = {field.name for field in fields(kind)}
    facts = {name: _frozen(value) for name, value in document["facts"].items() if name in known}
    return kind(document["problem"], document["next_step"], **facts)


def _facts(error: AdjunctError) -> dict[str, Any]:
    """Return the error's facts as far as JSON holds them: the keys of a record may be anything."""
    return {name: value for name, value in error.facts.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, str | int | float)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def error_class_name(error: AdjunctError) -> str:
    """Return the name by which an error is known again on the other side: its class's, or the nearest public one's."""
    return next(kind.__name__ for kind in type(error).__mro__ if _error_class(kind.__name__) is kind)


def _error_class(name: str) -> type[AdjunctError] | None:
    """Return the class of errors that is known by this name."""
    kind = getattr(errors, name, None) or getattr(errors, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, AdjunctError) else None


def raise_error_column(kind: type[AdjunctError], problem: Column, next_step: str, **facts: str) -> Column:
    """Return a column whose evaluation fails with this error, for rows that must not be there."""
    from pyspark.sql import functions as F

    before, after = _ENCODED.format(
        kind=kind.__name__, problem="\0", next_step=next_step, facts=json.dumps(facts)
    ).split("\0")
    text = F.concat(F.lit(before), problem, F.lit(after))
    return F.raise_error(text)


@contextlib.contextmanager
def translate_spark_errors() -> Iterator[None]:
    """Raise the error of Adjunct's that made a Spark job fail, instead of Spark's; others pass as they are.

    Also a decorator, of the functions that users call.
    """
    try:
        yield
    except Exception as error:
        ours = find_adjunct_error(error)
        if ours is None or ours is error:
            raise
        raise ours from error


def find_adjunct_error(error: BaseException) -> AdjunctError | None:
    """Return the error of ours that this is, that a task raised, or that a lost worker or damaged file is; or None."""
    if isinstance(error, AdjunctError):
        return error
    if isinstance(error, OSError) and error.errno in (*DISK_FULL_ERRNOS, errno.EROFS):
        return file_error(error, error.filename or tempfile.gettempdir(), "a temporary file")
    if type(error).__module__.partition(".")[0] not in ("pyspark", "py4j"):
        return None
    text = str(error)
    told = decode_error(text) or _worker_lost(text) or _cut_off(text) or _damaged(text) or _too_deep(text)
    return told or _raised(text) or _no_room(text)


def _no_room(text: str) -> AdjunctError | None:
    """Return the error of a disk of Spark's own, for what it shuffles and sorts, that is full or may not be written."""
    full = _NO_ROOM.search(text)
    if not full:
        return None
    return StoreUnavailableError(
        f"Spark could not write a file: {full['cause'].rstrip('.')}.",
        "Free some room, or give Spark another folder for temporary files (SPARK_LOCAL_DIRS or spark.local.dir), then "
        "run it again. Nothing was committed, and nothing is lost.",
        url=full["cause"].partition(": ")[0] if full["cause"].startswith("/") else None,
    )


def _worker_lost(text: str) -> AdjunctError | None:
    """Return the error of a task whose Python process is gone, whatever the JVM met on its connection to it."""
    if _WORKER_LOST not in text:
        return None
    return TransientError(
        "a Python worker of Spark ended in the middle of its task: it was killed, ran out of memory, or crashed.",
        "Run it again: a batch that was begun is repeated as it was written down. If that goes on, look at the memory "
        "of the machine and of its container, and at what its system log says of ended processes.",
    )


def _cut_off(text: str) -> AdjunctError | None:
    """Return the error of a read that the way to the store broke off, which says nothing of the object."""
    cut, unread = _CUT_OFF.search(text), _UNREAD.search(text)
    if not cut:
        return None
    what = f"Spark's read of {unread['file']}" if unread else "Spark's request to the store"
    problem = f"{what} was broken off: {cut['cause'].rstrip('.')}."
    return StoreUnavailableError(problem, "Run it again.", url=unread["file"] if unread else None)


def _damaged(text: str) -> AdjunctError | None:
    unread, damaged = _UNREAD.search(text), _DAMAGED.search(text)
    if not unread or not damaged:
        return None
    return ManifestMismatchError(
        f"Spark can't read {unread['file']}: {damaged['cause']}.",
        "The object is missing or damaged: restore it from a backup, or serve an earlier version (adjunct dataset "
        "rollback). adjunct dataset verify names every such object of a version.",
        url=unread["file"],
    )


def _too_deep(text: str) -> AdjunctError | None:
    if not _TOO_DEEP.search(text):
        return None
    return PlanningError(
        "Spark's plan of a batch is nested deeper than the stack of its JVM can follow: too many operators follow one "
        "another, or an expression has too many parts.",
        "Divide the application: let one send to a stream what it has made half-way, and another go on from there. Or "
        f"give the session a larger stack than {STACK_SIZE}, in spark.driver.extraJavaOptions and "
        "spark.executor.extraJavaOptions: -Xss128m.",
    )


def _raised(text: str) -> AdjunctError | None:
    raised = _RAISED.search(text)
    kind = getattr(errors, raised["name"], None) if raised else None
    if raised is None or not (isinstance(kind, type) and issubclass(kind, AdjunctError)):
        return None
    # Spark's text goes on with the JVM's own stack after ours.
    message = re.split(r"\n\s*(?:\n|at |JVM stacktrace|SQLSTATE)", raised["message"], maxsplit=1)[0]
    return kind(message.strip())


def first_message_line(error: Exception) -> str:
    """Return what an error of Spark's says first. Its parser's begin with an empty line, py4j's with its own call."""
    lines = (line.strip().removeprefix(": ") for line in str(error).splitlines())
    telling = (line for line in lines if line and not line.startswith("An error occurred while calling "))
    return next(telling, type(error).__name__)


def decode_error(text: str) -> AdjunctError | None:
    """Return the error that is in the text of another one."""
    if match := _ENCODED_PATTERN.search(text):
        try:
            facts = json.loads(match["facts"] or "{}")
        except ValueError:  # a plan that Spark quotes, and not what a row was refused with
            facts = {}
        return error_from_json({**match.groupdict(), "facts": facts})
    return None
