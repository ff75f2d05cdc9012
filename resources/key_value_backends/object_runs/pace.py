"""When a writer tries to swap: writers that always tried at once would mostly undo each other's work."""

from __future__ import annotations

import random

_WEIGHT = 0.25  # of what was seen last
_MOST = 32.0
_ALONE = 0.25


class Pace:
    """How many others write the same pointer, and how long a try takes, as this writer has met them lately.

    With n writers a pause is drawn from n tries' time, also after a win: all are equally likely to be next.
    """

    def __init__(self) -> None:
        self._rivals = 0.0
        self._try_takes = 0.005

    @property
    def alone(self) -> bool:
        """Whether nobody else seems to write."""
        return self._rivals < _ALONE

    def won(self, others: int, seconds: float) -> None:
        """Note a swap of ours: how many others made since our last one, and how long reading and swapping took."""
        self._rivals += _WEIGHT * (min(others, _MOST) - self._rivals)
        self._try_takes += _WEIGHT * (min(seconds, 1.0) - self._try_takes)

    def lost(self) -> None:
        """Note that somebody else was first."""
        self._rivals = min(_MOST, max(1.0, 1.25 * self._rivals))

    def pause(self) -> float:
        """Return how many seconds to wait before the next try."""
        return 0.0 if self.alone else random.uniform(0, self._rivals * self._try_takes)
