"""Errors as Dagster shows them: what is wrong and what to do first, retried only where that can help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dagster import AssetExecutionContext, Failure, OpExecutionContext, RetryRequested

from dagster_adjunct.resources.errors import (
    AdjunctError,
    ApplicationBusyError,
    CommitStateUnknownError,
    LeaseLostError,
    PermanentError,
    TransientError,
)
from dagster_adjunct.resources.spark.spark_errors import adjunct_error

# Errors after which the same call is wrong, and a new run is right: it reads what stands and goes on from there.
RUN_AGAIN = (CommitStateUnknownError, LeaseLostError)
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
        # Who has waited for another run to end does not wait two more times in the same run.
        again = isinstance(ours, retry) and not isinstance(ours, ApplicationBusyError)
        if again and context.retry_number < MAX_RETRIES:
            context.log.warning(f"{type(ours).__name__}, trying again in {_SECONDS:g} s: {ours}")
            raise RetryRequested(max_retries=MAX_RETRIES, seconds_to_wait=_SECONDS) from error
        for note in getattr(ours, "__notes__", ()):  # the errors of others that failed beside it
            context.log.error(note)
        raise Failure(
            description=str(ours),
            metadata={
                "error": type(ours).__name__,
                "next step": ours.next_step or "See the message.",
                "permanent": isinstance(ours, PermanentError) and not isinstance(ours, RUN_AGAIN),
            },
            allow_retries=False,
        ) from error
