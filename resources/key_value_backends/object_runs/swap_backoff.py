"""When a writer tries to swap: writers that always tried at once would mostly undo each other's work."""

from __future__ import annotations

import random
import time

_MOST = 32.0
_ALONE = 0.25
_HALF_LIFE = 0.5  # seconds after which half of the rivals that were not met again are forgotten


class SwapBackoff:
    """How many others write the same pointer, and how long a try takes, as this writer has met them lately.

    With n writers the one that won waits for up to n tries' time, and those that lost for less each time: else who wins
    meets nobody, takes itself for alone, and the others starve.
    """

    def __init__(self) -> None:
        self._rivals = 0.0
        self._try_takes = 0.005
        self._losses = 0
        self._last = time.monotonic()

    @property
    def alone(self) -> bool:
        """Whether nobody else seems to write."""
        return self._rivals < _ALONE

    def won(self, others: int, seconds: float) -> None:
        """Note a swap of ours: how many others made since our last one, and how long reading and swapping took."""
        now = time.monotonic()
        weight = 0.5 if others > self._rivals else 1 - 0.5 ** ((now - self._last) / _HALF_LIFE)
        self._last, self._losses = now, 0
        self._rivals += weight * (min(others, _MOST) - self._rivals)
        self._try_takes += 0.25 * (min(seconds, 1.0) - self._try_takes)

    def lost(self) -> None:
        """Note that somebody else was first."""
        self._losses += 1
        self._rivals = max(1.0, self._rivals)

    def pause(self) -> float:
        """Return how many seconds to wait before the next try."""
        return 0.0 if self.alone else random.uniform(0, self._rivals * self._try_takes / (1 + self._losses))
