"""The list of a segment's families in DynamoDB: added to before a family gets a key, purged of those without entries.

`dynamodb_layout.py` explains why purging is safe during writes. Processes that add families do it, one part of the list
after the other: for every `PURGE_AFTER` new families they look at four times as many. So at most half of the list, or
some hundred families, have no entries.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.backends.dynamodb_connection import error_code
from dagster_adjunct.resources.errors import AdjunctError, TableUnavailableError
from dagster_adjunct.resources.key_value.segment import KeyRange, SegmentChange
from dagster_adjunct.resources.key_value_backends.dynamodb_layout import (
    GATES,
    Item,
    Patience,
    SegmentLayout,
    TableCalls,
    family_prefix_at,
    key_after_family,
)

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

PURGE_AFTER = 64  # families that a process has added to the list, after which it looks for some to remove
SETTLING_SECONDS = 60  # by DynamoDB's clock, after which no transaction is left that passed a gate before it was raised
FAMILIES_PER_PURGE = 4 * PURGE_AFTER
MIN_EMPTY_FAMILIES = PURGE_AFTER // 2  # families without entries for which all gates are raised
_FAMILIES_KNOWN = 100_000
_PURGE_PATIENCE = 5.0  # seconds for which a gate that writes are passing is retried
_log = logging.getLogger("adjunct.key_value")


class FamilyList:
    """The list of a segment's families, and which of them this process knows to be listed, at one term."""

    def __init__(self, calls: TableCalls, layout: SegmentLayout) -> None:
        self._calls, self._layout = calls, layout
        self._known: tuple[int, set[bytes]] = (0, set())
        # Many processes that list a few purge as often as one that lists many.
        self._new = random.randrange(PURGE_AFTER)

    async def ensure_listed(self, changes: Sequence[SegmentChange]) -> int:
        """List families before they get a key; return the term at which they are listed."""
        term, known = self._known  # another thread may learn a newer term meanwhile: this listing is of this one
        missing = {
            family
            for change in changes
            if change.value is not None
            and not isinstance(change.expected, bytes)
            and (family := family_prefix_at(change.key))
        } - known
        if missing:
            items = ({**self._layout.family(family), "n": {"N": str(term)}} for family in missing)
            added = await self._calls.at_once(
                self._calls.read(partial(self._change_item, "put_item", term, Item=item, ReturnValues="ALL_OLD"))
                for item in items
            )
            self._new += sum(answer is not None and "Attributes" not in answer for answer in added)
            if len(known) > _FAMILIES_KNOWN:
                known.clear()
            known.update(missing)
        return term

    def learn(self, term: int) -> None:
        """Note that a gate has this term."""
        if term > self._known[0]:
            self._known = (term, set())

    async def purge_if_due(self) -> None:
        """Purge a part of the list if enough families were added since the last time.

        Errors are only logged, because they are not of the write that was just applied.
        """
        if self._new < PURGE_AFTER:
            return
        self._new = 0
        try:
            await self.purge()
        except (AdjunctError, KeyError, ValueError) as error:
            _log.warning("%s: families without entries stay in its list for now: %s", self._calls.label, error)

    async def purge(self) -> None:
        """Remove families without entries from the next part of the list, or raise all gates, which allows it later."""
        calls, layout = self._calls, self._layout
        answer: Any = await calls.read(
            lambda client: client.get_item(TableName=calls.name, Key=layout.progress(), ConsistentRead=True)
        )
        item = answer.get("Item")
        # All gates had this term at this time, by DynamoDB's clock; the families from `place` on are next.
        term, at, place = (int(item["n"]["N"]), int(item["a"]["N"]), item["p"]["B"]) if item else (0, 0, b"")
        if _time_of(answer) < at + SETTLING_SECONDS:
            return
        stretch = layout.families(KeyRange(place))
        if stretch is None:
            raise ValueError(f"item {layout.progress()} has a place that is no family's: {place.hex()}; delete it")
        part = await calls.query(stretch, "s, n", FAMILIES_PER_PURGE)
        terms = {item["s"]["B"]: term_of(item) or 0 for item in part["Items"]}
        found = await calls.at_once(calls.query(layout.in_family(family, KeyRange()), "s", 1) for family in terms)
        empty = [family for family, entries in zip(terms, found, strict=True) if not entries["Items"]]
        await calls.at_once(
            # Unless another process has listed it at this term or a newer one.
            calls.read(partial(self._change_item, "delete_item", term, Key=layout.family(family)))
            for family in empty
            if terms[family] < term
        )
        newer = [terms[family] for family in empty if terms[family] >= term]
        if len(newer) >= MIN_EMPTY_FAMILIES:
            term = max(newer) + 1
            at = max(await calls.at_once(self._raise_gate(number, term) for number in range(GATES)))
        place = key_after_family(list(terms)[-1]) if part.get("LastEvaluatedKey") else b""
        progress = {**layout.progress(), "n": {"N": str(term)}, "a": {"N": str(at)}, "p": {"B": place}}
        await calls.read(lambda client: client.put_item(TableName=calls.name, Item=progress))

    async def _raise_gate(self, number: int, term: int) -> int:
        """Make a gate reject older terms, as one of a newer term, or of a sealed table, does; return when."""
        patience = Patience(_PURGE_PATIENCE)

        def put(client: DynamoDBClient) -> int:
            try:
                answer: Any = client.put_item(
                    TableName=self._calls.name,
                    Item={**self._layout.gate(number), "n": {"N": str(term)}},
                    ConditionExpression="attribute_not_exists(h) OR n < :n",
                    ExpressionAttributeValues={":n": {"N": str(term)}},
                )
            except Exception as error:
                if error_code(error) != "ConditionalCheckFailedException":
                    raise
                answer = getattr(error, "response", {})
            return _time_of(answer)

        while True:
            try:
                return await self._calls.read(put)
            except TableUnavailableError:
                if not await patience.wait():
                    raise

    def _change_item(self, request: str, term: int, client: DynamoDBClient, **arguments: Any) -> Any:
        """Put or delete the item of a family; return the answer, None if it is listed at this term or a newer one."""
        try:
            return getattr(client, request)(
                TableName=self._calls.name,
                ConditionExpression="attribute_not_exists(n) OR n < :n",
                ExpressionAttributeValues={":n": {"N": str(term)}},
                **arguments,
            )
        except Exception as error:
            if error_code(error) != "ConditionalCheckFailedException":
                raise
            return None


def term_of(item: Item) -> int | None:
    """Return the term of a gate or of a listed family, None if it has none."""
    return int(item["n"]["N"]) if "n" in item else None


def _time_of(answer: Mapping[str, Any]) -> int:
    """Return the time of DynamoDB's answer in seconds, by its own clock."""
    return int(parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp())
