"""Frames that are computed once and read by several operators, until what they were for is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class KeptFrames:
    """What is kept for a batch. Spark computes such a frame when it is first read, and keeps its rows."""

    def __init__(self) -> None:
        self._frames: list[DataFrame] = []

    def keep(self, frame: DataFrame) -> DataFrame:
        """Return a frame of the same rows, which are kept once they are computed."""
        self._frames.append(frame.persist())
        return self._frames[-1]

    def release(self) -> None:
        """Let go of all of them, the newest first.

        Spark plans what reads a frame that is let go anew, as long as it is kept itself and nobody has read it yet.
        """
        while self._frames:
            self._frames.pop().unpersist()
