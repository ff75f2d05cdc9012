"""Ports of 127.0.0.1 for what tests start.

None is of those that the system gives to whoever opens a connection: between the look and the
start, or while a server is stopped to be started again, such a port may be somebody's.
"""

from __future__ import annotations

import random
import socket

# Linux gives those from 32,768 on, other systems those from 49,152 on
_PORTS = range(15_000, 32_000)
_chosen = random.SystemRandom()  # a seed would have all processes take the same
_given: set[int] = set()


def free_port() -> int:
    """Return a port that nobody listens on now, and that this process has not had yet."""
    while True:
        port = _chosen.choice(_PORTS)
        if port not in _given and _is_free(port):
            _given.add(port)
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
