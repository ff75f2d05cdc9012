"""What a mask keeps of the sessions of Spark that have read its version."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dagster_adjunct.assets.reading.superseded import Mask


class Session:
    """A session that counts its frames."""

    def __init__(self, number: int) -> None:
        self.sparkContext = SimpleNamespace(applicationId=f"session-{number}")
        self.made = 0

    def createDataFrame(self, table: Any) -> Any:
        self.made += 1
        return SimpleNamespace(coalesce=lambda parts: self)


def test_frames_of_old_sessions_are_dropped_and_that_of_the_current_one_is_kept() -> None:
    mask = Mask({(1, 0): b"\x01"})
    current = Session(0)
    for number in range(1, 50):
        for session in (current, Session(number)):
            frame: Any = mask._words_in(session, 1)  # type: ignore[arg-type]
            assert frame is session
    assert current.made == 1
    assert len(mask.frames) < 10
