"""Whether what several processes saw of one key is what one process could have seen, in the order of time.

Every write names the version that it replaces and makes a new one, so the writes of a key are one chain, and each
observation has a place in it. A history is linearisable exactly where nobody saw an older place than was seen, by
anybody, before he began; and nobody saw a place before its write had begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Observation(NamedTuple):
    """One request: `kind` is read, refused or write; versions are None where there is no key; times have one clock."""

    key: str
    kind: str
    before: str | None
    after: str | None
    began: int
    ended: int


def contradictions(observations: Sequence[Observation]) -> list[str]:
    """Return what can't have been, in words, about the observations of one key."""
    following: dict[str | None, str | None] = {}
    wrong = []
    for seen in observations:
        if seen.kind == "write":
            if seen.before in following:
                wrong.append(f"{seen.before} was replaced twice")
            following[seen.before] = seen.after
        if seen.kind == "refused" and seen.before == seen.after:
            wrong.append(f"a write was refused though {seen.before} was there")
    places: dict[str | None, int] = {None: 0}
    version: str | None = None
    while version in following and following[version] not in places:
        version = following[version]
        places[version] = len(places)
    lost = [seen for seen in observations if seen.after not in places]
    if lost:
        return [*wrong, f"{len(lost)} observations of versions that nobody can have written: {lost[0]}"]
    latest, ended = 0, sorted(observations, key=lambda seen: seen.ended)
    behind = iter(ended)
    next_ended = next(behind, None)
    for seen in sorted(observations, key=lambda seen: seen.began):
        while next_ended is not None and next_ended.ended < seen.began:
            latest = max(latest, places[next_ended.after])
            next_ended = next(behind, None)
        if latest > places[seen.after] - (seen.kind == "write"):
            wrong.append(f"place {latest} was seen before {seen} began, which is at {places[seen.after]}")
    return wrong
