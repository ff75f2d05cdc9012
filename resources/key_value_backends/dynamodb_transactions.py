"""What is sent to DynamoDB to write to a segment, and what its refusals say. Decisions without any I/O.

A write is one transaction: it checks a gate, which a sealed table has shut, and one whose families may have been
forgotten since this process listed them (`dynamodb_families`), and makes every change under its condition. All tries of
a write are the same to a byte but for that term and for the number in their client request token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dagster_adjunct.resources.key_value.table_segment import ABSENT, SegmentChange
from dagster_adjunct.resources.key_value_backends.dynamodb_layout import GATES, Item, SegmentLayout

_CONDITION_FAILED = "ConditionalCheckFailed"
_CONFLICT = "TransactionConflict"
_THROTTLED = {"ThrottlingError", "ProvisionedThroughputExceeded"}


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A transaction that had no effect, and why.

    `term`: the gate has this one, which is newer than the request's, and no request of an older one passes it any more.
    `current` tells, for the place of each change whose condition fails, the version that its key has. `conflict`:
    others wrote, so that not everything was looked at. `refused`: DynamoDB's words for what it will never take.
    """

    sealed: bool = False
    term: int | None = None
    current: Mapping[int, bytes | None] | None = None
    conflict: bool = False
    throttled: bool = False
    refused: str | None = None

    @property
    def may_pass(self) -> bool:
        """Whether the same request may be applied, or tell more, in a moment."""
        return (self.conflict or self.throttled) and self.refused is None


def transaction(
    layout: SegmentLayout, changes: Sequence[SegmentChange], token: bytes, number: int, term: int
) -> dict[str, Any]:
    """Return the request that makes these changes, whose families are listed at `term`: the `number`th try, from 0."""
    return {
        "ClientRequestToken": _client_token(token, number),
        "TransactItems": [_gate_check(layout, token, term), *(_action(layout, change) for change in changes)],
    }


def burning(layout: SegmentLayout, token: bytes, number: int, term: int) -> dict[str, Any]:
    """Return a harmless request that takes the client request token of a try away from it.

    DynamoDB does one of the two. A copy of the try that is still on its way is refused when this was done: it has the
    token of another request.
    """
    burnt = {**layout.burnt(gate_of(token)), "t": {"B": token}}
    return {
        "ClientRequestToken": _client_token(token, number),
        "TransactItems": [_gate_check(layout, token, term), {"Put": {"TableName": layout.table, "Item": burnt}}],
    }


def gate_of(token: bytes) -> int:
    """Return the gate that a request checks: any will do, since sealing shuts them all."""
    return token[0] % GATES


def cancellation(response: Mapping[str, Any]) -> Cancelled:
    """Return what the answer to a cancelled transaction says."""
    reasons: Sequence[Mapping[str, Any]] = response.get("CancellationReasons") or ()
    codes = [str(reason.get("Code", "None")) for reason in reasons]
    if not codes:
        # Some servers give the reasons in the message alone: nothing was done, and the next try tells more.
        return Cancelled(conflict=True)
    current = {
        place: _version_in(reason.get("Item"))
        for place, (code, reason) in enumerate(zip(codes[1:], reasons[1:], strict=True))
        if code == _CONDITION_FAILED
    }
    known = {"None", _CONDITION_FAILED, _CONFLICT, *_THROTTLED}
    refused = [
        f"{code}: {reason.get('Message')}" for code, reason in zip(codes, reasons, strict=True) if code not in known
    ]
    # That the gate was busy does not matter where a condition failed.
    looked_at = codes[1:] if current else codes
    shut = codes[0] == _CONDITION_FAILED
    term = term_of(reasons[0].get("Item") or {}) if shut else None
    return Cancelled(
        sealed=shut and term is None,
        term=term,
        current=current or None,
        conflict=_CONFLICT in looked_at,
        throttled=any(code in _THROTTLED for code in looked_at),
        refused=refused[0] if refused else None,
    )


def _client_token(token: bytes, number: int) -> str:
    return f"{token.hex()}-{number}"


def term_of(item: Item) -> int | None:
    """Return the term of a gate or of a family in the list; None where it has none."""
    return int(item["n"]["N"]) if "n" in item else None


def _gate_check(layout: SegmentLayout, token: bytes, term: int) -> Item:
    check = {
        "TableName": layout.table,
        "Key": layout.gate(gate_of(token)),
        "ConditionExpression": "attribute_not_exists(h) OR n <= :n",
        "ExpressionAttributeValues": {":n": {"N": str(term)}},
        "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
    }
    return {"ConditionCheck": check}


def _action(layout: SegmentLayout, change: SegmentChange) -> Item:
    key = layout.entry(change.key)
    action: dict[str, Any] = {"TableName": layout.table}
    kind = "ConditionCheck" if change.is_guard else "Delete" if change.value is None else "Put"
    if change.value is None:
        action["Key"] = key
    else:
        action["Item"] = {**key, "v": {"B": change.version}, "d": {"B": change.value}}
    if change.expected is ABSENT:
        action["ConditionExpression"] = "attribute_not_exists(h)"
    elif isinstance(change.expected, bytes):
        action["ConditionExpression"] = "v = :v"
        action["ExpressionAttributeValues"] = {":v": {"B": change.expected}}
    if "ConditionExpression" in action:
        action["ReturnValuesOnConditionCheckFailure"] = "ALL_OLD"
    return {kind: action}


def _version_in(item: Item | None) -> bytes | None:
    return item["v"]["B"] if item else None
