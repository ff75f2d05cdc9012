"""Asking for runs: at once for something new, ever more rarely for what the run before did not get done."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

from dagster_adjunct.resources.stored_documents import StoredDocument

FIRST_WAIT, LONGEST_WAIT = 60.0, 3600.0
SECONDS_BETWEEN_LOOKS = 30
_SHOWN = 200


class LastRequest(StoredDocument):
    """What a sensor asked for last: for which state of things (a digest), how often, and when (epoch seconds)."""

    about: str = ""
    attempt: int = 0
    asked_at: float = 0.0


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """Launch a run under this key."""

    run_key: str
    asked: LastRequest


@dataclass(frozen=True, slots=True)
class Skip:
    """Launch nothing, and say why."""

    reason: str


def ask(name: str, what: str, about: object, before: LastRequest, now: float) -> LaunchRequest | Skip:
    """Ask for a run, or wait where one that was asked for has left things as they were.

    `name` is how the run key begins, `what` says why a run is wanted, and `about` (JSON-able) is the state of things.
    As long as that stays the same, the run is asked for again after one minute, then after two, four and so on, up to
    an hour. A run key is consumed for ever, even by a failed run, so it holds the attempt.
    """
    digest = digest_of(about)
    attempt = before.attempt + 1 if digest == before.about else 1
    wait = 0.0 if attempt == 1 else before.asked_at + wait_after(before.attempt) - now
    if wait > 0:
        return Skip(
            f"{what}; attempt {before.attempt} did not get past that (see its run), the next is in {wait:.0f} s."
        )
    return LaunchRequest(f"{name}:{digest}:{attempt}", LastRequest(about=digest, attempt=attempt, asked_at=now))


def wait_after(attempt: int) -> float:
    """Return how many seconds to wait after this attempt, counted from 1."""
    return float(min(FIRST_WAIT * 2 ** min(attempt - 1, 30), LONGEST_WAIT))


def digest_of(about: object) -> str:
    """Return a short text that differs where `about` does."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def shortened(texts: Iterable[str], separator: str = ", ") -> str:
    """Return distinct texts as one that a run's tag can hold and a person can read: the first ones, and how many more.

    Dagster's storage indexes the values of tags, which bounds them.
    """
    every = list(dict.fromkeys(texts))
    shown: list[str] = []
    for text in every:
        if shown and len(separator.join([*shown, text])) > _SHOWN:
            break
        shown.append(text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…")
    more = len(every) - len(shown)
    return separator.join(shown) + (f" and {more} more" if more else "")
