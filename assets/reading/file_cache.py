"""A bounded cache of footers and decoded row groups of sealed files, which never change."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar, cast

T = TypeVar("T")
CACHE_BYTES = 512 * 1024 * 1024


class FileCache:
    """An LRU cache of footers and decoded row groups, with at most `max_bytes` in memory.

    Safe to share between readers, datasets and threads. Random lookups are fast while the decoded version fits: a row
    of eight short columns takes about 100 bytes, so the default of 512 MiB holds some 5M such rows. The newest value is
    kept even if it alone is larger.
    """

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._values: OrderedDict[Hashable, tuple[object, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, load: Callable[[], tuple[T, int]]) -> T:
        """Return the value of this key; if it is absent, `load` returns it with its size in bytes."""
        with self._lock:
            known = self._values.get(key)
            if known is not None:
                self._values.move_to_end(key)
                return cast(T, known[0])
        value, size = load()  # without the lock: two threads may load the same value, which only wastes work
        with self._lock:
            if key not in self._values:
                self._values[key] = (value, size)
                self.bytes += size
            while self.bytes > self.max_bytes and len(self._values) > 1:
                _, (_, dropped) = self._values.popitem(last=False)
                self.bytes -= dropped
        return value
