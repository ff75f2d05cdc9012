"""When what was applied to keys is forgotten: now and then, because each time reads all that is kept."""

from __future__ import annotations

import threading
import time

_MOST_OFTEN = 3600.0
_forgot: dict[str, float] = {}  # by table: when this process did it last
_lock = threading.Lock()


def is_time_to_forget(table: str, forget_after: float | None) -> bool:
    """Whether a connection to `table` that has just been made should forget: once an hour in each process, or once in
    `forget_after` seconds where that is less. Tasks connect all the time."""
    if forget_after is None:
        return False
    now = time.monotonic()
    with _lock:
        last = _forgot.get(table)
        if last is not None and now - last < min(forget_after, _MOST_OFTEN):
            return False
        _forgot[table] = now
    return True
