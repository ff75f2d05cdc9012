"""The pointer of a segment in its store: reading it, and swapping it so that nobody doubts who did."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from dagster_adjunct.resources.errors import AdjunctError, PreconditionFailedError, TransientError
from dagster_adjunct.resources.key_value.table_segment import ReplyLostError
from dagster_adjunct.resources.key_value_backends.object_runs.segment_pointer import SegmentState, read_pointer
from dagster_adjunct.resources.objects import ObjectStore

_ATTEMPTS = 6
_FIRST_PAUSE = 0.05
_TURNS = 50


@dataclass(frozen=True, slots=True)
class Standing:
    """A state, and the ETag of the pointer that says it."""

    state: SegmentState
    etag: str


@dataclass(frozen=True, slots=True)
class Swapped:
    """Whether a swap of ours took place, and a state from after it: ours, or one that others made since."""

    won: bool
    standing: Standing


class PointerObject:
    """The object at `key`. Any thread may use it. Raises ObjectNotFoundError where there is none, and
    StoreUnavailableError."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self.store, self.key = store, key
        self.last: Standing | None = None  # that was read, or written, by this process
        self.won = 0  # swaps that this process made
        self._turn = threading.Condition()
        self._begun = 0
        self._ended = 0
        self._outcome: Standing | None = None  # of the last read that ended; None where it failed

    def read(self) -> Standing:
        """Return what stands now. One GET."""
        stored = self.store.get(self.key)
        last = self.last
        if last is not None and last.etag == stored.etag:
            return last
        before = None if last is None else last.state
        state = read_pointer(stored.data, f"pointer {self.key!r} in {self.store.url}", before)
        self.last = Standing(state, stored.etag)
        return self.last

    def fresh(self) -> Standing:
        """Return what stands at some moment of this call. Threads that ask while a GET is under way share the next."""
        with self._turn:
            mine = self._begun + 1  # what began before this call may have read what was before it
            while self._begun > self._ended or self._ended >= mine:
                if self._ended >= mine:
                    if self._outcome is not None:
                        return self._outcome
                    if self._begun == self._ended:
                        break  # it failed: every caller asks for itself
                self._turn.wait()
            self._begun += 1
            number = self._begun
        standing: Standing | None = None
        try:
            standing = self.read()
            return standing
        finally:
            with self._turn:
                self._ended, self._outcome = number, standing
                self._turn.notify_all()

    def change(
        self, make: Callable[[SegmentState], SegmentState | None], *, is_in: Callable[[SegmentState], bool]
    ) -> Swapped | None:
        """Swap in what `make` makes of what stands, and anew of what others put there first.

        `is_in` is as for `swap`, whose errors it raises. What is returned was not won where `make` returned None: it
        has nothing to change then. None where others were always first.
        """
        standing = self.read()
        for _ in range(_TURNS):
            after = make(standing.state)
            if after is None:
                return Swapped(False, standing)
            swapped = self.swap(standing, after, is_in=is_in)
            if swapped.won:
                return swapped
            standing = swapped.standing
        return None

    def swap(
        self,
        before: Standing,
        after: SegmentState,
        *,
        is_in: Callable[[SegmentState], bool],
        pause: Callable[[], None] = lambda: None,
    ) -> Swapped:
        """Put `after` in the place of `before`; `is_in(state)` says of a later state whether ours is part of it.

        `pause` is called where somebody else was first, before that is looked at. Raises ReplyLostError where nobody
        knows; what else it raises says that nothing happened.
        """
        data = after.to_bytes()
        problem: Exception | None = None
        for attempt in range(_ATTEMPTS):
            try:
                etag = self.store.put_if_match(self.key, data, before.etag)
            except PreconditionFailedError as error:
                problem = problem or error
                pause()
            except TransientError as error:
                problem = error
            except AdjunctError as error:
                if problem is None:
                    raise
                raise self._lost(error) from problem
            else:
                self.last = Standing(after, etag)
                self.won += 1
                return Swapped(True, self.last)
            try:
                now = self.read()
                if now.state.nonce == after.nonce:
                    return Swapped(True, now)
                if now.etag != before.etag:  # whatever of ours may still be on its way is refused now
                    return Swapped(is_in(now.state), now)
            except AdjunctError as error:
                raise self._lost(error) from problem
            time.sleep(random.uniform(0.5, 1.0) * _FIRST_PAUSE * 2**attempt)  # the identical request again
        raise self._lost(problem) from problem

    def _lost(self, error: Exception | None) -> ReplyLostError:
        return ReplyLostError(
            f"the store did not say whether {self.key!r} in {self.store.url} was replaced ({error}).",
            "Repeat the request, with its token.",
        )
