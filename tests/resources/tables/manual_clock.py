"""Time that tests of tables move by hand."""

from __future__ import annotations

import asyncio


class ManualClock:
    """A clock that sleeping moves at once, and `slept` lists how long each sleep was."""

    def __init__(self) -> None:
        self._now = 0.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass without anybody sleeping."""
        self._now += seconds

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self._now += seconds
        await asyncio.sleep(0)
