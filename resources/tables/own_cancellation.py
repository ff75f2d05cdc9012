"""Tells a request that somebody cancelled from one that ended in a CancelledError of its own."""

from __future__ import annotations

import asyncio

from dagster_adjunct.resources.errors import TableUnavailableError


def ended_itself(error: asyncio.CancelledError) -> TableUnavailableError:
    """The error of a request that was cancelled from within; raises `error` where its task is being cancelled.

    To hand it on as a cancellation would end the caller's task as if somebody had cancelled it, and a task group takes
    that for an end without an error: nobody would hear that the request was not answered.
    """
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise error
    told = TableUnavailableError(
        "the function ended its request with a CancelledError, and nobody had cancelled it.",
        "See what cancels its tasks, or closes its client, while requests are under way.",
    )
    told.__cause__ = error
    return told
