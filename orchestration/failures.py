"""Errors as Dagster shows them: what is wrong and what to do first, retried only where that can help."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from dagster import AssetExecutionContext, Failure, RetryRequested

from resources import errors
from resources.errors import AdjunctError, TransientError

MAX_RETRIES = 2
_SECONDS = 5.0
# How a Python worker's traceback ends when a task raised one of our errors: the class, then its message.
_RAISED = re.compile(r"^resources\.errors\.(?P<name>\w+): (?P<message>.*)", re.MULTILINE | re.DOTALL)


def adjunct_error(error: BaseException) -> AdjunctError | None:
    """Return the error of ours that this is, or that a Spark task raised and Spark reports; None for others."""
    if isinstance(error, AdjunctError):
        return error
    if type(error).__module__.partition(".")[0] not in ("pyspark", "py4j"):
        return None
    found = _RAISED.search(str(error))
    kind = getattr(errors, found["name"], None) if found else None
    if found is None or not (isinstance(kind, type) and issubclass(kind, AdjunctError)):
        return None
    # Spark's text goes on with the JVM's own stack after ours.
    message = re.split(r"\n\s*(?:\n|at |JVM stacktrace|SQLSTATE)", found["message"], maxsplit=1)[0]
    return kind(message.strip())


@contextmanager
def clear_failures(
    context: AssetExecutionContext, *, retry: tuple[type[AdjunctError], ...] = (TransientError,)
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
