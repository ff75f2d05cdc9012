"""Errors as Dagster shows them: what is wrong and what to do first, retried only where that can help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dagster import AssetExecutionContext, Failure, OpExecutionContext, RetryRequested

from resources.errors import AdjunctError, PermanentError, TransientError
from resources.spark_errors import adjunct_error

MAX_RETRIES = 2
_SECONDS = 5.0


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
            metadata={
                "error": type(ours).__name__,
                "next step": ours.next_step or "See the message.",
                "permanent": isinstance(ours, PermanentError),
            },
            allow_retries=False,
        ) from error


def raise_first(context: OpExecutionContext, errors: Sequence[AdjunctError]) -> None:
    """Raise the first of the errors, if there are any, and log the others: each was of a dataset of its own."""
    for other in errors[1:]:
        context.log.error(str(other))
    if errors:
        raise errors[0]
