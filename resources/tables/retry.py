"""When a request to a table is sent again, and after how long."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_exponential, wait_random

from dagster_adjunct.resources.errors import ConfigurationError, RecordNotFoundError, TransientError
from dagster_adjunct.resources.tables.clock import SystemClock

if TYPE_CHECKING:
    from dagster_adjunct.resources.tables.clock import Clock

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Waits that double from `first_wait` to `max_wait`, each with up to `first_wait` more at random.

    Gives up after `attempts` requests, or before a wait that would end later than `max_total` after
    the first request. All times in seconds. `RetryPolicy(attempts=1)` never sends again.
    """

    attempts: int = 8
    first_wait: float = 0.1
    max_wait: float = 5.0
    max_total: float = 60.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or min(self.first_wait, self.max_wait, self.max_total) < 0:
            raise ConfigurationError(
                f"{self} can't work: expected at least one attempt and no negative time.",
                "Correct the policy.",
            )

    async def run(
        self,
        request: Callable[[], Awaitable[T]],
        *,
        is_retriable: Callable[[BaseException], bool],
        clock: Clock | None = None,
        on_retry: Callable[[], None] = lambda: None,
    ) -> T:
        """The answer of `request`, sent again as long as its errors pass and the policy allows.

        A TransientError passes, and so does what `is_retriable` accepts; RecordNotFoundError is an
        answer and never passes. The last error is raised as it is, with a note on the attempts made.
        """
        timer = clock or SystemClock()
        start = timer.now()

        def passes(error: BaseException) -> bool:
            if isinstance(error, RecordNotFoundError):
                return False
            return isinstance(error, TransientError) or is_retriable(error)

        def enough(state: RetryCallState) -> bool:
            too_late = timer.now() - start + state.upcoming_sleep > self.max_total
            if state.attempt_number >= self.attempts or too_late:
                error = state.outcome.exception() if state.outcome else None
                if error is not None:
                    error.add_note(f"Gave up after {state.attempt_number} attempts in {timer.now() - start:.1f} s.")
                return True
            return False

        retrying = AsyncRetrying(
            retry=retry_if_exception(passes),
            wait=wait_exponential(self.first_wait, self.max_wait) + wait_random(0, self.first_wait),
            stop=enough,
            sleep=timer.sleep,
            before_sleep=lambda _: on_retry(),
            reraise=True,
        )
        return await retrying(request)
