"""What the runs of a lake know of one budget: up to when its credits are leased, on a time line that they share.

Credits come in at the budget's rate, so a lease is a stretch of time: who leases two tenths of a second may spend what
comes in meanwhile. No stretch is leased twice, so all runs together never spend more, whatever their clocks say: who
finds the time line ahead of his clock goes by it, and whose clock is ahead moves it on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from dagster_adjunct.resources.stored_documents import StoredDocument
from dagster_adjunct.resources.tables.credit_source import KEPT_SECONDS

# So far ahead is leased at most: what a run that dies takes along. Two seconds is the promise.
AHEAD_SECONDS = 1.0
# A run that has not leased for so long wants nothing any more, or is dead.
_HEARD_SECONDS = 2.0
# A shorter lease is not worth a request: who wishes for less gets so much, where there is so much.
_SHORTEST = 0.01


class RunWish(StoredDocument):
    """When a run leased last, how much of the rate it could use, from 0 to 1, and the rate that it states (credits per
    second)."""

    at: float
    share: float
    rate: float | None = None


class SharedTimeline(StoredDocument):
    """A budget as it is stored. `now` is the latest time that a run has told; credits up to `through` are leased."""

    format: Literal[1] = 1
    now: float = 0.0
    through: float = 0.0
    runs: dict[str, RunWish] = Field(default_factory=dict)
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Leased time, in seconds from when it was decided: its beginning may be past."""

    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Wish:
    """What a run asks for: so many seconds' credits now, and such a share of the rate as long as it goes on so."""

    seconds: float
    share: float


def lease(
    timeline: SharedTimeline, run: str, now: float, wish: Wish, rate: float | None = None
) -> tuple[SharedTimeline, Stretch | None]:
    """Return the budget after a lease, and what was leased; None where others have all that may be leased by now.

    Of what may be leased a run gets the part that its share is of all shares, where all can't have what they want.
    """
    now = max(now, timeline.now)
    heard = {name: other for name, other in timeline.runs.items() if other.at > now - _HEARD_SECONDS and name != run}
    runs = {**heard, run: RunWish(at=now, share=wish.share, rate=rate)}
    wished = max(wish.seconds, _SHORTEST)
    # Of what has come in, the latest: what came in before has expired when a small lease is there.
    start = max(timeline.through, now - min(wished, KEPT_SECONDS))
    shares = fair_shares({name: other.share for name, other in runs.items()})
    part = shares[run] / total if (total := sum(shares.values())) else 0.0
    seconds = min(wished, (now + AHEAD_SECONDS - start) * part)
    if seconds < _SHORTEST:
        # Who waits is told all the same, or those before it would never leave it anything.
        return timeline.model_copy(update={"now": now, "runs": runs}), None
    after = timeline.model_copy(update={"now": now, "through": start + seconds, "runs": runs})
    return after, Stretch(start - now, start + seconds - now)


def fair_shares(wanted: Mapping[str, float]) -> dict[str, float]:
    """Return what each gets of 1: no more than it wants, and more than others only where those have all they want."""
    got: dict[str, float] = {}
    left, waiting = 1.0, sorted(wanted, key=lambda name: wanted[name])
    for place, name in enumerate(waiting):
        got[name] = min(wanted[name], left / (len(waiting) - place))
        left -= got[name]
    return got
