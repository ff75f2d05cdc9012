"""The count of the runs that write a DynamoDB table, and of their batches: an item of the table
itself.

    the key         "adjunct_runs" (S, B), the lowest number of DynamoDB (N)
    adjunct_runs    the count

It is stored among the records, so old items that are written back into the table bring an earlier
count with them (`presence.py`). No record may have its key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.table_backends.dynamodb_connection import throttled_problem
from dagster_adjunct.resources.table_backends.dynamodb_items import COUNT_KEY, RUNS_ATTRIBUTE

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient


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
        return {name: COUNT_KEY[tag] for name, tag in self.key_types.items()}
