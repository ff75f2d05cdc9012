"""Spark's Python workers, started while the driver is still busy with what they are to do.

The process that workers are forked from takes seconds to begin in, and Spark starts it when the first task asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_begun: WeakKeyDictionary[SparkContext, Thread] = WeakKeyDictionary()


def begin_workers(session: SparkSession) -> None:
    """Start them beside whatever comes next, once a session; only on this machine, as executors elsewhere are many."""
    context = session.sparkContext
    if context not in _begun and (context.master or "").startswith("local"):
        _begun[context] = Thread(target=_one_task, args=(session,), name="early-workers", daemon=True)
        _begun[context].start()


def wait_for_workers(context: SparkContext) -> None:
    """Wait until those that were begun are there: a session that ends before would tell of a task that it has lost."""
    if context in _begun:
        _begun[context].join()


def _one_task(session: SparkSession) -> None:
    with suppress(Exception):  # where workers can't be started, the first task of a batch says so
        session.range(1).coalesce(1).mapInArrow(_as_they_are, "id bigint").collect()


def _as_they_are(batches: Iterator[Any]) -> Iterator[Any]:
    yield from batches
