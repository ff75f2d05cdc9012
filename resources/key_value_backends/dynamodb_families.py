"""The list of a segment's families: a family is in it before it gets its first key, and leaves it when it has none.

Who writes knows by heart which families are listed, so that an ordinary put costs no request for it. What a process
knows by heart can't be called back; so it holds for a **term**, a number that grows:

- A family is listed at the term that its writer knows: the item's number becomes that one, unless it is higher.
- A write passes its gate only where the gate's term is at most the one at which its families were listed. Who is
  refused so learns the newer term, forgets what it knew by heart, and lists its families again.
- To forget families at term t, all gates are first moved up to t, and given time (`SETTLING`). Whoever sees a family
  without an entry after that may delete its place in the list, under the condition that its number is below t.

No entry is in a family that is not listed: a write of term k has seen its family listed at k or higher. That place can
be deleted only at a term t > k, by somebody who looked into the family when all gates were at t. Then that write was
either applied before, and its entry was seen or was gone; or it is applied never. The condition is checked when the
place is deleted, so it does not matter how late the request comes, nor how many forget at a time; and a place whose
number is higher belongs to those who write at a newer term. A change of a key that must have a version needs no
listing: its family has an entry, whose writer has listed it.

The time is needed since a Query, unlike a PutItem, does not wait for a transaction that is just being committed: the
gate may be free again a moment before the entry is seen.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from dagster_adjunct.resources.backends.dynamodb_connection import code_of
from dagster_adjunct.resources.key_value.table_segment import SegmentChange
from dagster_adjunct.resources.key_value_backends.dynamodb_calls import TableCalls
from dagster_adjunct.resources.key_value_backends.dynamodb_layout import Item, SegmentLayout, family_at

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

LOOK_AFTER = 64  # families that are new to the list, of a process; then it looks whether some can leave it
_FAMILIES_KNOWN = 100_000


@dataclass(frozen=True, slots=True)
class _Known:
    """What this process knows by heart: families that were listed at this term."""

    term: int
    families: set[bytes] = field(default_factory=set)


class Families:
    """The families of one segment, as this process knows them."""

    def __init__(self, calls: TableCalls, layout: SegmentLayout) -> None:
        self._calls = calls
        self._layout = layout
        self._known = _Known(0)
        self._new = random.randrange(LOOK_AFTER)  # many processes that list a few look as often as one that lists many

    async def listed(self, changes: Sequence[SegmentChange]) -> int:
        """See to it that families are listed before they get a key; return the term at which they are."""
        known = self._known  # another thread may learn of a newer term meanwhile: what is listed here is of this one
        missing = {
            family
            for change in changes
            if change.value is not None and not isinstance(change.expected, bytes) and (family := family_at(change.key))
        } - known.families
        if missing:
            places = (partial(_list, self._layout.table, self._layout.family(family), known.term) for family in missing)
            self._new += sum(await self._calls.together(map(self._calls.read, places)))
            if len(known.families) > _FAMILIES_KNOWN:
                known.families.clear()
            known.families.update(missing)
        return known.term

    def learn(self, term: int) -> None:
        """Hear of a gate that has this term."""
        if term > self._known.term:
            self._known = _Known(term)

    def look_is_due(self) -> bool:
        """Whether so many families were added that some may be forgotten; it is said once."""
        if self._new < LOOK_AFTER:
            return False
        self._new = 0
        return True


def _list(table: str, place: Item, term: int, client: DynamoDBClient) -> bool:
    """List a family at a term or above; return whether it was not in the list."""
    try:
        answer = client.put_item(
            TableName=table,
            Item={**place, "n": {"N": str(term)}},
            ConditionExpression="attribute_not_exists(n) OR n < :n",
            ExpressionAttributeValues={":n": {"N": str(term)}},
            ReturnValues="ALL_OLD",
        )
    except Exception as error:
        if code_of(error) == "ConditionalCheckFailedException":
            return False
        raise
    return "Attributes" not in answer
