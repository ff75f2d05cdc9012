"""The book-keeping of a DynamoDB table: the epochs of runs, for fenced writes, and a count of runs.

Epochs are in a table `<table>__adjunct_runs`, and checked by each write's transaction:

    name     (the key) name of the application's epoch | "/" | number, 0 to 31
    epoch    the epoch of the last run that has begun

All items of an application have the same epoch. A transaction checks one of them, drawn at random,
because two that check the same one at the same time conflict; `announce` raises all of them in one
transaction.

The count of the runs that write the table, and of their batches, is an item of the table itself:

    the key         "adjunct_runs" (S, B), the lowest number of DynamoDB (N)
    adjunct_runs    the count

It is stored among the records, so old items that are written back into the table bring an earlier
count with them (`presence.py`). No record may have its key.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import TableError, TableUnavailableError
from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.table_backends.dynamodb_connection import (
    error_code,
    throttled_problem,
)
from dagster_adjunct.resources.table_backends.dynamodb_items import COUNT_KEY, RUNS_ATTRIBUTE
from dagster_adjunct.resources.table_backends.epochs import epoch_name, must_raise_epoch
from dagster_adjunct.resources.tables.operation import Problem, State

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient


NAME = "name"
EPOCH = "epoch"
_ITEMS = 32  # with the epoch of one application
_MAX_CONFLICTS = 30  # after which a write fails
# seconds between two tries
_FIRST_PAUSE = 0.01
_LONGEST_PAUSE = 0.5
_CANCELLED = "TransactionCanceledException"
_CONFLICT = "TransactionConflict"
_THROTTLED = ("ThrottlingError", "ProvisionedThroughputExceeded")
FAILED_CONDITION = "ConditionalCheckFailed"

Reason = Mapping[str, Any]
"""Why an action of a transaction cancelled it: "Code" ("None": it did not), "Message", and
"Item" as it was.
"""


@dataclass(frozen=True, slots=True)
class FencedWrites:
    """Sends the writes of a run in transactions that check its epoch; `table` is the table with
    the epochs.
    """

    client: DynamoDBClient
    label: str
    table: str
    fence: Fence
    pause: Callable[[float], object] = time.sleep

    def announce(self) -> None:
        """Raise the epoch to that of this run. RunLeaseLostError if a later run has begun."""
        self._send([self._raising_action(number) for number in range(_ITEMS)])

    def send(self, actions: Sequence[dict[str, Any]]) -> Sequence[Reason] | None:
        """Carry out all actions ({"Put": {…}} and so on) or none.

        Returns None if they are done, else the reason of each. Raises RunLeaseLostError if a later
        run has begun, and what boto3 raises. Transactions that conflict with others are sent again
        a few times.
        """
        return self._send([self._checking_action(), *actions])

    def _send(self, actions: Sequence[dict[str, Any]]) -> Sequence[Reason] | None:
        """Send a transaction until it does not conflict with others; return None if it is done,
        else the reasons of all actions but the first, which is on an epoch. Raises
        RunLeaseLostError if the run may have lost its lease.
        """
        for turn in range(_MAX_CONFLICTS):
            self.fence.check()
            try:
                items: Any = list(actions)
                self.client.transact_write_items(TransactItems=items)
            except Exception as error:
                if error_code(error) != _CANCELLED:
                    raise
                reasons: list[Reason] = getattr(error, "response", {}).get(
                    "CancellationReasons", []
                )
                if len(reasons) != len(actions):
                    raise  # it is not known which action was rejected
                self._check_fences(actions, reasons)
                has_conflict = any(reason["Code"] == _CONFLICT for reason in reasons)
                if not has_conflict:
                    self._check_other_reasons(actions, reasons)
                    return reasons[1:]
            else:
                return None
            self.pause(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**turn) * (0.5 + random.random() / 2))
        problem = f"{self.label}: a transaction conflicted with others {_MAX_CONFLICTS} times."
        step = (
            "The request is retried; if it keeps failing, have fewer writers of the same records."
        )
        raise TableUnavailableError(problem, step, table=self.label)

    def _check_fences(self, actions: Sequence[dict[str, Any]], reasons: Sequence[Reason]) -> None:
        """Raise if the condition of an action on an epoch does not hold."""
        for action, reason in zip(actions, reasons, strict=True):
            (request,) = action.values()
            if request["TableName"] != self.table or reason["Code"] != FAILED_CONDITION:
                continue
            stored = (reason.get("Item") or {}).get(EPOCH)
            # Raises if it is that of a later run.
            must_raise_epoch(self.label, None if stored is None else int(stored["N"]), self.fence)
            problem = (
                f"{self.label}: the epoch of this run is gone from the table {self.table}, where it"
                " was stored."
            )
            step = "Find out who deletes its items, then run again."
            raise TableError(problem, step, table=self.label)

    def _check_other_reasons(
        self, actions: Sequence[dict[str, Any]], reasons: Sequence[Reason]
    ) -> None:
        """Raise if an action on an epoch was rejected for another reason, such as throttling."""
        for action, reason in zip(actions, reasons, strict=True):
            (request,) = action.values()
            problem = problem_from_reason(self.label, reason)
            if request["TableName"] == self.table and problem is not None:
                assert problem.error is not None  # its condition holds: see `_check_fences`
                raise problem.error

    def _checking_action(self) -> dict[str, Any]:
        """The action that checks one of the items with the run's epoch, drawn at random."""
        key = {NAME: {"S": f"{epoch_name(self.fence)}/{random.randrange(_ITEMS)}"}}
        return {"ConditionCheck": {"Key": key, **self._conditional_parts("#e = :e")}}

    def _raising_action(self, number: int) -> dict[str, Any]:
        """The action that raises the epoch in the item of this number, unless it is a later
        run's.
        """
        key = {NAME: {"S": f"{epoch_name(self.fence)}/{number}"}}
        condition = self._conditional_parts("attribute_not_exists(#e) OR #e <= :e")
        return {"Update": {"Key": key, "UpdateExpression": "SET #e = :e", **condition}}

    def _conditional_parts(self, condition: str) -> dict[str, Any]:
        """The parts of an action that has this condition; in it, #e is the stored epoch and :e the
        run's.
        """
        return {
            "TableName": self.table,
            "ConditionExpression": condition,
            "ExpressionAttributeNames": {"#e": EPOCH},
            "ExpressionAttributeValues": {":e": {"N": str(self.fence.epoch)}},
            "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
        }


def problem_from_reason(label: str, reason: Reason) -> Problem | None:
    """Return the problem of an action that has cancelled its transaction; None if another one
    has.
    """
    code = reason["Code"]
    text = reason.get("Message") or ""
    if code == "None":
        return None
    if code in _THROTTLED:
        return throttled_problem(label, code)
    if code == FAILED_CONDITION:
        return Problem(State.SKIPPED)
    error = TableError(
        f"{label}: DynamoDB rejected the request ({code}: {text}).",
        "Correct the data.",
        table=label,
    )
    return Problem(State.REFUSED, error)


@dataclass(frozen=True, slots=True)
class RunCount:
    """The count in a table; `key_types` has the attribute type of each column of its key. Methods
    block, and raise what boto3 raises.
    """

    client: DynamoDBClient
    label: str
    table: str
    key_types: Mapping[str, str]

    def read(self) -> int:
        """Return the count; 0 without the item. Raises TableUnavailableError if
        DynamoDB leaves the request out.
        """
        keys: Any = {"Keys": [self._key], "ConsistentRead": True}
        answer = self.client.batch_get_item(RequestItems={self.table: keys})
        if answer.get("UnprocessedKeys"):
            error = throttled_problem(self.label, "the count of its runs unprocessed").error
            assert error is not None
            raise error
        for items in answer["Responses"].values():
            for item in items:
                return int(item[RUNS_ATTRIBUTE]["N"])
        return 0

    def add(self) -> int:
        """Raise the count, and return it."""
        answer = self.client.update_item(
            TableName=self.table,
            Key=self._key,
            UpdateExpression="ADD #r :one",
            ExpressionAttributeNames={"#r": RUNS_ATTRIBUTE},
            ExpressionAttributeValues={":one": {"N": "1"}},
            ReturnValues="UPDATED_NEW",
        )
        return int(answer["Attributes"][RUNS_ATTRIBUTE]["N"])

    @property
    def _key(self) -> dict[str, Any]:
        """The key of the item with the count."""
        return {name: COUNT_KEY[tag] for name, tag in self.key_types.items()}
