"""Functions that run in processes of their own at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

T = TypeVar("T")


def spawned(processes: int) -> ProcessPoolExecutor:
    """Processes that end by themselves: `multiprocessing.Pool` kills its own, and waited for one
    of them for good.
    """
    return ProcessPoolExecutor(processes, mp_context=get_context("spawn"))


def call_all(
    pool: ProcessPoolExecutor, function: Callable[..., T], calls: Iterable[tuple[Any, ...]]
) -> list[T]:
    """Call the function with each of these arguments, all at once, and return the answers."""
    return [
        future.result() for future in [pool.submit(function, *arguments) for arguments in calls]
    ]
