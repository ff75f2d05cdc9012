"""Writes to a segment in DynamoDB: one transaction each, tried until it is known what became of it.

Each try has a client request token of its own. DynamoDB answers a repeated try that was applied with the same success
for ten minutes, whatever others wrote since. So a try whose reply was lost is sent once more. If that is cancelled, the
first copy may still be on its way: its token is burnt, and only then is the try known never to be applied. It is known
too where gates have a newer term than the try.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dagster_adjunct.resources.backends.dynamodb_connection import code_of, throttled
from dagster_adjunct.resources.errors import AdjunctError, TableError, TableUnavailableError
from dagster_adjunct.resources.key_value.ended_tables import sealed_table
from dagster_adjunct.resources.key_value.table_segment import ConditionsFailed, ReplyLostError, SegmentChange
from dagster_adjunct.resources.key_value_backends.dynamodb_calls import Patience, TableCalls
from dagster_adjunct.resources.key_value_backends.dynamodb_families import Families
from dagster_adjunct.resources.key_value_backends.dynamodb_forgetting import forget_families
from dagster_adjunct.resources.key_value_backends.dynamodb_layout import SegmentLayout
from dagster_adjunct.resources.key_value_backends.dynamodb_transactions import (
    Cancelled,
    burning,
    cancellation,
    transaction,
)

HORIZON = 540.0  # seconds; DynamoDB forgets a token ten minutes after its request has ended
PATIENCE = 5.0  # seconds in which a write that meets other writers is tried again here
_LOST_KNOWN = 1_000


class TransactionAnswer(Enum):
    """What DynamoDB says to a transaction that it does not cancel."""

    APPLIED = "applied, now or before"
    TOKEN_TAKEN = "another request has its token"
    UNDER_WAY = "a copy of it is being worked on"


@dataclass(frozen=True, slots=True)
class LastTry:
    """Of a write whose reply was lost: the last try's number and term. `over`: it is known never to be applied."""

    number: int
    term: int
    when: float
    over: bool = False


class SegmentWrites:
    """The writes of one segment in this process."""

    def __init__(self, calls: TableCalls, layout: SegmentLayout, patience: float = PATIENCE) -> None:
        self._calls = calls
        self._layout = layout
        self._patience = patience
        self._families = Families(calls, layout)
        self._lost: dict[bytes, LastTry] = {}  # by token
        self._remembering = threading.Lock()

    async def apply(self, changes: Sequence[SegmentChange], token: bytes, *, repeated: bool) -> None:
        """Do what `TableSegment.apply` says."""
        if not repeated:
            await self._try(changes, token, 0)
        elif not await self._settle(changes, token):
            await self._try(changes, token, self._lost[token].number + 1)
            self._forget(token)
        if self._families.look_is_due():
            await forget_families(self._calls, self._layout)

    async def _try(self, changes: Sequence[SegmentChange], token: bytes, number: int) -> None:
        """Apply the changes; nothing of the tries from `number` on was sent yet, or all that was sent is over."""
        patience = Patience(self._patience, self._calls.pause)
        term = await self._families.listed(changes)
        while True:
            try:
                answer = await self._send(transaction(self._layout, changes, token, number, term))
            except ReplyLostError:
                self._remember(token, number, term)
                raise
            if answer is TransactionAnswer.APPLIED:
                return
            if isinstance(answer, Cancelled):
                self._check(answer)
            if not await patience.wait():
                if answer is TransactionAnswer.UNDER_WAY:
                    self._remember(token, number, term)
                    raise ReplyLostError(
                        f"{self._calls.label}: a copy of a write is being worked on for {self._patience:g} s.",
                        "It is asked about again.",
                    )
                raise self._contended()
            if answer is not TransactionAnswer.UNDER_WAY:
                # This one is over. A server that remembered cancelled ones too would cancel it for ever.
                number += 1
                term = await self._families.listed(changes)

    async def _settle(self, changes: Sequence[SegmentChange], token: bytes) -> bool:
        """Find out whether a write whose reply was lost was applied; after False its last try never will be."""
        last = self._lost.get(token)
        if last is not None and last.over:
            return False
        try:
            if last is None:  # another handle has sent it: at which term is not known here
                term = await self._families.listed(changes)
                applied = await self._was_applied(changes, token, 0, term, sent_here=False)
            else:
                applied = await self._was_applied(changes, token, last.number, last.term, sent_here=True)
        except TableUnavailableError as error:
            # Of this call nothing happened; of the one before it nothing is known yet.
            raise ReplyLostError(error.problem, error.next_step) from error
        if applied:
            self._forget(token)
        return applied

    async def _was_applied(
        self, changes: Sequence[SegmentChange], token: bytes, number: int, term: int, *, sent_here: bool
    ) -> bool:
        """Find out what became of a try whose reply was lost: True, or False where it never will be applied.

        Raises `ConditionsFailed` and the like where it never will be and a new try is no use, `ReplyLostError` or
        TableUnavailableError where it could not be found out.
        """
        patience = Patience(self._patience, self._calls.pause)
        taken = False
        while True:
            answer = await self._send(transaction(self._layout, changes, token, number, term))
            if not isinstance(answer, Cancelled):
                if answer is TransactionAnswer.TOKEN_TAKEN and not sent_here:
                    raise self._sent_elsewhere()
                if answer is TransactionAnswer.APPLIED:
                    return True
                if answer is TransactionAnswer.TOKEN_TAKEN:  # it was burnt before
                    self._remember(token, number, term, over=True)
                    return False
            elif answer.sealed:
                raise sealed_table(self._calls.table, self._calls.label)
            elif answer.term is not None:
                # No gate passes any copy of it any more.
                self._families.learn(answer.term)
                if not sent_here:
                    raise self._sent_elsewhere()
                self._remember(token, number, term, over=True)
                return False
            elif not answer.may_pass:
                burnt = await self._send(burning(self._layout, token, number, term))
                if burnt is TransactionAnswer.APPLIED or (taken and burnt is TransactionAnswer.TOKEN_TAKEN):
                    self._remember(token, number, term, over=True)
                    self._check(answer)
                    return False
                if burnt is TransactionAnswer.TOKEN_TAKEN:
                    # The first copy came meanwhile. What became of it is what DynamoDB says to another copy.
                    taken = True
                    continue
            if not await patience.wait():
                raise self._contended()

    async def _send(self, request: dict[str, Any]) -> TransactionAnswer | Cancelled:
        try:
            await self._calls.call(lambda client: client.transact_write_items(**request))
        except AdjunctError:
            raise
        except Exception as error:
            code = code_of(error)
            if code == "TransactionCanceledException":
                return cancellation(getattr(error, "response", {}))
            if code == "TransactionInProgressException":
                return TransactionAnswer.UNDER_WAY
            if code == "IdempotentParameterMismatchException":
                return TransactionAnswer.TOKEN_TAKEN
            raise self._calls.meaning(error, sent=True) from error
        return TransactionAnswer.APPLIED

    def _remember(self, token: bytes, number: int, term: int, *, over: bool = False) -> None:
        now = time.monotonic()
        with self._remembering:  # threads may share a table
            if len(self._lost) >= _LOST_KNOWN:
                for old in [old for old, last in self._lost.items() if last.when < now - HORIZON]:
                    del self._lost[old]
            self._lost[token] = LastTry(number, term, now, over)

    def _forget(self, token: bytes) -> None:
        with self._remembering:
            self._lost.pop(token, None)

    def _check(self, cancelled: Cancelled) -> None:
        """Raise what a cancelled transaction has to say, unless it may be applied when it is tried again at once."""
        if cancelled.sealed:
            raise sealed_table(self._calls.table, self._calls.label)
        label = self._calls.label
        if cancelled.refused is not None:
            raise TableError(f"{label}: a write is refused ({cancelled.refused}).", "Correct it.", table=label)
        if cancelled.term is not None:
            self._families.learn(cancelled.term)
            return
        if cancelled.current is not None and not cancelled.conflict:
            raise ConditionsFailed(cancelled.current)
        if cancelled.throttled:
            error = throttled(label, "a transaction was throttled").error
            assert error is not None
            raise error

    def _contended(self) -> TableUnavailableError:
        label = self._calls.label
        return TableUnavailableError(
            f"{label}: a write met others that write the same keys, again and again for {self._patience:g} s.",
            "It is tried again; if that goes on, let fewer write the same keys at a time.",
            table=label,
        )

    def _sent_elsewhere(self) -> ReplyLostError:
        return ReplyLostError(
            f"{self._calls.label}: a write was sent over another handle, and families were forgotten since.",
            "Read its keys, or ask over the handle that has sent it.",
        )
