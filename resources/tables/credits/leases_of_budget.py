"""`LeasesOfBudget`: one budget of the lake, as one run leases from it."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from pydantic import ValidationError

from dagster_adjunct.resources.errors import MalformedDocumentError
from dagster_adjunct.resources.metadata.shared_value import SharedValue
from dagster_adjunct.resources.stored_documents import first_problem
from dagster_adjunct.resources.tables.credits.shared_timeline import SharedTimeline, Stretch, Wish, lease

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.tables.credit_source import Budget


_log = logging.getLogger("adjunct.tables")


class LeasesOfBudget:
    """Leases credits of a budget that all runs of a lake share. For one thread at a time.

    `clock` gives seconds that only grow; the wall clock is looked at once.
    """

    def __init__(self, lake: Lake, budget: Budget, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._value = SharedValue(lake, "budgets", budget.name, budget.tag)
        self._rate, self._told = budget.rate, set[float]()
        self._where = f"the budget {budget.name!r} ({budget.tag}) in {lake.url}"
        self._run, self._clock = run, clock
        self._ahead = time.time() - clock()  # of the budget's time line, by which its runs go together

    def lease(self, wish: Wish) -> Stretch | None:
        """Return what was leased, by `clock`; None where others have all that may be leased by now.

        Raises StoreUnavailableError (what may have been leased expires), CommitConflictError after many conflicts, and
        MalformedDocumentError.
        """

        others, rates = False, set[float]()

        def decide(data: bytes | None) -> tuple[bytes, Stretch | None]:
            nonlocal others, rates
            timeline = SharedTimeline() if data is None else self._parse(data)
            here = self._clock()
            self._ahead = max(self._ahead, timeline.now - here)
            after, got = lease(timeline, self._run, here + self._ahead, wish, self._rate)
            others = len(after.runs) > 1
            rates = {run.rate for run in after.runs.values() if run.rate is not None} - {self._rate}
            document = after.model_copy(update={"nonce": uuid.uuid4().hex}).model_dump_json().encode()
            return document, None if got is None else Stretch(here + got.start, here + got.end)

        got = self._value.transact(decide)
        if others:
            self._value.forget()
        self._tell(rates - self._told)
        return got

    def _tell(self, rates: set[float]) -> None:
        """Say which other rates runs spend of the budget at this moment, each once."""
        self._told |= rates
        for rate in sorted(rates):
            _log.warning(
                "%s is stated with %g credits per second here, and with %g in another run at this moment: together "
                "they spend more than the lower. Give all tables that share it one RateLimit, or budgets of their own.",
                self._where,
                self._rate,
                rate,
            )

    def _parse(self, data: bytes) -> SharedTimeline:
        try:
            return SharedTimeline.model_validate_json(data)
        except ValidationError as error:
            raise MalformedDocumentError(
                f"{self._where} can't be read: {first_problem(error)}.",
                "If a newer release wrote it, upgrade dagster-adjunct; else delete the object, which is made again: "
                "what it tells is worth nothing after two seconds.",
                document=self._where,
            ) from error
