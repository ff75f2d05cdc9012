"""Writes to a segment in DynamoDB: one transaction each, tried until it is known what became of it.

Each try has a client request token of its own. DynamoDB answers a repeated try that was applied with the same success
for ten minutes, whatever others wrote since. So a try whose reply was lost is sent once more. If that is cancelled, the
first copy may still be on its way: its token is burnt, and only then is the try known never to be applied.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.backends.dynamodb_connection import code_of, throttled
from dagster_adjunct.resources.errors import AdjunctError, TableError, TableUnavailableError
from dagster_adjunct.resources.key_value.ended_tables import sealed_table
from dagster_adjunct.resources.key_value.table_segment import ConditionsFailed, ReplyLostError, SegmentChange
from dagster_adjunct.resources.key_value_backends.dynamodb_calls import Patience, TableCalls
from dagster_adjunct.resources.key_value_backends.dynamodb_layout import Item, SegmentLayout, family_at
from dagster_adjunct.resources.key_value_backends.dynamodb_transactions import (
    Cancelled,
    burning,
    cancellation,
    transaction,
)

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

HORIZON = 540.0  # seconds; DynamoDB forgets a token ten minutes after its request has ended
PATIENCE = 5.0  # seconds in which a write that meets other writers is tried again here
_FAMILIES_KNOWN = 100_000
_LOST_KNOWN = 1_000


class Answer(Enum):
    """What DynamoDB says to a transaction that it does not cancel."""

    APPLIED = "applied, now or before"
    TOKEN_TAKEN = "another request has its token"
    UNDER_WAY = "a copy of it is being worked on"


class SegmentWrites:
    """The writes of one segment in this process."""

    def __init__(self, calls: TableCalls, layout: SegmentLayout, patience: float = PATIENCE) -> None:
        self._calls = calls
        self._layout = layout
        self._patience = patience
        self._listed: set[bytes] = set()  # families that are listed, as far as this process knows
        self._lost: dict[bytes, tuple[int, float]] = {}  # token: the try whose reply was lost, and when
        self._remembering = threading.Lock()

    async def apply(self, changes: Sequence[SegmentChange], token: bytes, *, repeated: bool) -> None:
        """Do what `TableSegment.apply` says."""
        number = 0
        if repeated:
            number, _ = self._lost.get(token, (0, 0.0))
            try:
                await self._list_families(changes)
                applied = await self._was_applied(changes, token, number)
            except TableUnavailableError as error:
                # Of this call nothing happened; of the one before it nothing is known yet.
                raise ReplyLostError(error.problem, error.next_step) from error
            self._forget(token)
            if applied:
                return
            number += 1
        else:
            await self._list_families(changes)
        await self._try(changes, token, number)

    async def _try(self, changes: Sequence[SegmentChange], token: bytes, number: int) -> None:
        """Apply the changes; nothing of the tries from `number` on was sent yet."""
        patience = Patience(self._patience, self._calls.pause)
        while True:
            try:
                answer = await self._send(transaction(self._layout, changes, token, number))
            except ReplyLostError:
                self._remember(token, number)
                raise
            if answer is Answer.APPLIED:
                return
            if isinstance(answer, Cancelled):
                self._check(answer)
            if not await patience.wait():
                if answer is Answer.UNDER_WAY:
                    self._remember(token, number)
                    raise ReplyLostError(
                        f"{self._calls.label}: a copy of a write is being worked on for {self._patience:g} s.",
                        "It is asked about again.",
                    )
                raise self._contended()
            # This one is over. A server that remembered cancelled ones too would cancel it for ever.
            number += answer is not Answer.UNDER_WAY

    async def _was_applied(self, changes: Sequence[SegmentChange], token: bytes, number: int) -> bool:
        """Find out what became of a try whose reply was lost: True, or False where it never will be applied.

        Raises `ConditionsFailed` and the like where it never will be and a new try is no use, `ReplyLostError` or
        TableUnavailableError where it could not be found out.
        """
        patience = Patience(self._patience, self._calls.pause)
        taken = False
        while True:
            answer = await self._send(transaction(self._layout, changes, token, number))
            if not isinstance(answer, Cancelled):
                if answer is not Answer.UNDER_WAY:
                    return answer is Answer.APPLIED  # else its token was burnt before
            elif answer.sealed:
                raise sealed_table(self._calls.table, self._calls.label)
            elif not answer.may_pass:
                burnt = await self._send(burning(self._layout, token, number))
                if burnt is Answer.APPLIED or (taken and burnt is Answer.TOKEN_TAKEN):
                    self._check(answer)
                    return False
                if burnt is Answer.TOKEN_TAKEN:
                    # The first copy came meanwhile. What became of it is what DynamoDB says to another copy.
                    taken = True
                    continue
            if not await patience.wait():
                raise self._contended()

    async def _send(self, request: dict[str, Any]) -> Answer | Cancelled:
        try:
            await self._calls.call(lambda client: client.transact_write_items(**request))
        except AdjunctError:
            raise
        except Exception as error:
            code = code_of(error)
            if code == "TransactionCanceledException":
                return cancellation(getattr(error, "response", {}))
            if code == "TransactionInProgressException":
                return Answer.UNDER_WAY
            if code == "IdempotentParameterMismatchException":
                return Answer.TOKEN_TAKEN
            raise self._calls.meaning(error, sent=True) from error
        return Answer.APPLIED

    async def _list_families(self, changes: Sequence[SegmentChange]) -> None:
        """See to it that the families are listed before they get a key. One that has a version is listed already."""
        families = {
            family
            for change in changes
            if change.value is not None and not isinstance(change.expected, bytes) and (family := family_at(change.key))
        } - self._listed
        if not families:
            return
        requests = (partial(_put, self._layout.table, self._layout.family(family)) for family in families)
        await self._calls.together(map(self._calls.read, requests))
        if len(self._listed) > _FAMILIES_KNOWN:
            self._listed.clear()
        self._listed |= families

    def _remember(self, token: bytes, number: int) -> None:
        now = time.monotonic()
        with self._remembering:  # threads may share a table
            if len(self._lost) >= _LOST_KNOWN:
                for old in [old for old, (_, when) in self._lost.items() if when < now - HORIZON]:
                    del self._lost[old]
            self._lost[token] = number, now

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
        if cancelled.found is not None and not cancelled.conflict:
            raise ConditionsFailed(cancelled.found)
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


def _put(table: str, item: Item, client: DynamoDBClient) -> None:
    client.put_item(TableName=table, Item=item)
