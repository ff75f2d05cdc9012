"""Threads for what blocks, of which each process has its own: those of a parent are not there after a fork."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache


def threads(purpose: str, count: int) -> ThreadPoolExecutor:
    """Return this process's threads for a purpose, at most `count`, which start when they are needed."""
    return _threads(purpose, count, os.getpid())


@lru_cache(maxsize=16)
def _threads(purpose: str, count: int, _process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, f"adjunct-{purpose}")
