"""Forgets families that have no entries any more; `dynamodb_families` says why that is right whoever writes meanwhile.

It is done by those who add families, a part of the list at a time, going round: for every `LOOK_AFTER` new families
four times as many are looked at. So the list has no more families without entries than with them, or some hundred.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.backends.dynamodb_connection import code_of
from dagster_adjunct.resources.errors import AdjunctError, TableUnavailableError
from dagster_adjunct.resources.key_value.addressing import KeyRange
from dagster_adjunct.resources.key_value_backends.dynamodb_calls import Patience, TableCalls
from dagster_adjunct.resources.key_value_backends.dynamodb_families import LOOK_AFTER
from dagster_adjunct.resources.key_value_backends.dynamodb_layout import GATES, Item, SegmentLayout, behind_family
from dagster_adjunct.resources.key_value_backends.dynamodb_reads import query
from dagster_adjunct.resources.key_value_backends.dynamodb_transactions import term_of

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

SETTLING = 60  # seconds, by DynamoDB's clock, after which no transaction is left that passed a gate before it moved up
LOOKED_AT = 4 * LOOK_AFTER
WORTH_A_TERM = LOOK_AFTER // 2  # families without entries for which all gates are moved up
_PATIENCE = 5.0  # seconds for which a gate is tried that writes are passing
_log = logging.getLogger("adjunct.key_value")


@dataclass(frozen=True, slots=True)
class Progress:
    """All gates had `term` at `at`, by DynamoDB's clock; the families from `place` on are looked at next."""

    term: int = 0
    at: int = 0
    place: bytes = b""

    @staticmethod
    def of(item: Item) -> Progress:
        return Progress(int(item["n"]["N"]), int(item["a"]["N"]), item["p"]["B"]) if item else Progress()

    def attributes(self) -> Item:
        return {"n": {"N": str(self.term)}, "a": {"N": str(self.at)}, "p": {"B": self.place}}


async def forget_families(calls: TableCalls, layout: SegmentLayout) -> None:
    """Look at a part of the list. A write was applied just before: nothing that fails here is an error of it."""
    try:
        await _look(calls, layout)
    except (AdjunctError, KeyError, ValueError) as error:
        _log.warning("%s: families without entries stay in its list for now: %s", calls.label, error)


async def _look(calls: TableCalls, layout: SegmentLayout) -> None:
    answer: Any = await calls.read(partial(_get_progress, layout))
    progress, now = Progress.of(answer.get("Item", {})), _time_of(answer)
    if now < progress.at + SETTLING:
        return
    stretch = layout.families(KeyRange(progress.place))
    if stretch is None:
        raise ValueError(f"item {layout.progress()} has a place that is no family's: {progress.place.hex()}; delete it")
    part = await query(calls, layout.table, stretch, "s, n", LOOKED_AT)
    terms = {item["s"]["B"]: term_of(item) or 0 for item in part["Items"]}
    held = await calls.together(_has_entries(calls, layout, family) for family in terms)
    empty = [family for family, holds in zip(terms, held, strict=True) if not holds]
    gone = [family for family in empty if terms[family] < progress.term]
    await calls.together(calls.read(partial(_delete, layout, family, progress.term)) for family in gone)

    term, at = progress.term, progress.at
    left = [terms[family] for family in empty if terms[family] >= term]
    if len(left) >= WORTH_A_TERM:
        term = max(left) + 1
        at = max(await calls.together(_move_gate(calls, layout, number, term) for number in range(GATES)))
    place = behind_family(list(terms)[-1]) if part.get("LastEvaluatedKey") else b""
    await calls.read(partial(_put, layout, {**layout.progress(), **Progress(term, at, place).attributes()}))


async def _has_entries(calls: TableCalls, layout: SegmentLayout, family: bytes) -> bool:
    answer = await query(calls, layout.table, layout.in_family(family, KeyRange()), "s", 1)
    return bool(answer["Items"])


async def _move_gate(calls: TableCalls, layout: SegmentLayout, number: int, term: int) -> int:
    """Let a gate pass nothing of an older term, as one of a newer term, or of a sealed table, does; return when."""
    patience = Patience(_PATIENCE, calls.pause)
    while True:
        try:
            return await calls.read(partial(_raise_gate, layout, number, term))
        except TableUnavailableError:
            if not await patience.wait():
                raise


def _raise_gate(layout: SegmentLayout, number: int, term: int, client: DynamoDBClient) -> int:
    request: dict[str, Any] = {
        "TableName": layout.table,
        "Item": {**layout.gate(number), "n": {"N": str(term)}},
        "ConditionExpression": "attribute_not_exists(h) OR n < :n",
        "ExpressionAttributeValues": {":n": {"N": str(term)}},
    }
    try:
        return _time_of(client.put_item(**request))
    except Exception as error:
        if code_of(error) != "ConditionalCheckFailedException":
            raise
        return _time_of(getattr(error, "response", {}))


def _get_progress(layout: SegmentLayout, client: DynamoDBClient) -> Any:
    return client.get_item(TableName=layout.table, Key=layout.progress(), ConsistentRead=True)


def _put(layout: SegmentLayout, item: Item, client: DynamoDBClient) -> None:
    client.put_item(TableName=layout.table, Item=item)


def _delete(layout: SegmentLayout, family: bytes, term: int, client: DynamoDBClient) -> None:
    """Take a family without entries out of the list, unless somebody has listed it at this term or a later one."""
    try:
        client.delete_item(
            TableName=layout.table,
            Key=layout.family(family),
            ConditionExpression="attribute_not_exists(n) OR n < :n",
            ExpressionAttributeValues={":n": {"N": str(term)}},
        )
    except Exception as error:
        if code_of(error) != "ConditionalCheckFailedException":
            raise


def _time_of(answer: Mapping[str, Any]) -> int:
    """Return the seconds at which DynamoDB answered, by its own clock."""
    return int(parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp())
