"""Errors as Dagster shows them: what is wrong and what to do first, retried only where that can help."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from dagster import AssetExecutionContext, Failure, OpExecutionContext, RetryRequested

from resources import errors
from resources.errors import AdjunctError, ManifestMismatchError, TransientError

MAX_RETRIES = 2
_SECONDS = 5.0
# How a Python worker's traceback ends when a task raised one of our errors: the class, then its message.
_RAISED = re.compile(r"^resources\.errors\.(?P<name>\w+): (?P<message>.*)", re.MULTILINE | re.DOTALL)
# How Spark names a file that it can't read, and what says that the file is to blame and not the way to it.
_UNREAD = re.compile(r"\[FAILED_READ_FILE\.\w+\] Encountered error while reading file (?P<file>\S+?)\.\s")
_DAMAGED = re.compile(
    r"^Caused by: (?:java\.lang\.\w+|java\.io\.(?:EOF|FileNotFound)Exception|[\w.$]*\b(?:parquet|zstd)\b[\w.$]*"
    r"|[\w.]+\.SchemaColumnConvertNotSupportedException): (?P<cause>[^\n]*)",
    re.MULTILINE,
)


def adjunct_error(error: BaseException) -> AdjunctError | None:
    """Return the error of ours that this is, that a Spark task raised, or that a damaged file is; None for others."""
    if isinstance(error, AdjunctError):
        return error
    if type(error).__module__.partition(".")[0] not in ("pyspark", "py4j"):
        return None
    unread, damaged = _UNREAD.search(str(error)), _DAMAGED.search(str(error))
    if unread and damaged:
        return ManifestMismatchError(
            f"Spark can't read {unread['file']}: {damaged['cause']}.",
            "The object is missing or damaged: restore it from a backup, or serve an earlier version (adjunct dataset "
            "rollback). adjunct dataset verify names every such object of a version.",
        )
    found = _RAISED.search(str(error))
    kind = getattr(errors, found["name"], None) if found else None
    if found is None or not (isinstance(kind, type) and issubclass(kind, AdjunctError)):
        return None
    # Spark's text goes on with the JVM's own stack after ours.
    message = re.split(r"\n\s*(?:\n|at |JVM stacktrace|SQLSTATE)", found["message"], maxsplit=1)[0]
    return kind(message.strip())


@contextmanager
def clear_failures(
    context: AssetExecutionContext | OpExecutionContext, *, retry: tuple[type[AdjunctError], ...] = (TransientError,)
) -> Iterator[None]:
    """Turn our own errors into Dagster failures that say what to do; those in `retry` run again first.

    Anything else passes as it is, and is not retried.
    """
    try:
        yield
    except Exception as error:
        ours = adjunct_error(error)
        if ours is None:
            raise
        if isinstance(ours, retry) and context.retry_number < MAX_RETRIES:
            context.log.warning(f"{type(ours).__name__}, trying again in {_SECONDS:g} s: {ours}")
            raise RetryRequested(max_retries=MAX_RETRIES, seconds_to_wait=_SECONDS) from error
        raise Failure(
            description=str(ours),
            metadata={"error": type(ours).__name__, "next step": ours.next_step or "See the message."},
            allow_retries=False,
        ) from error
