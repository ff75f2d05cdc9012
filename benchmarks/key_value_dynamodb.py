"""DynamoDB Local by hand: boto3's client without checks and repeats, versions counted up,
conditions in requests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from benchmarks.key_value_sides import Compared, Entries, Store
from dagster_adjunct.key_value import DynamoDbSegments
from tests.servers.dynamodb import DynamoDbServer, start_dynamodb

THREADS = 16
_GATE = {"h": {"B": b"gate"}, "s": {"B": b"gate"}}


class DynamoDbByHand:
    """`checked`: each write is a transaction that looks for a seal too, else a plain write of
    one item.
    """

    def __init__(self, server: DynamoDbServer, checked: bool) -> None:
        from botocore.config import Config

        config = Config(
            max_pool_connections=THREADS,
            retries={"total_max_attempts": 1},
            parameter_validation=False,
        )
        where = server.session()
        self._client = where["session"].client(
            "dynamodb", endpoint_url=where["endpoint_url"], config=config
        )
        self._table = "checked" if checked else "plain"
        self._client.create_table(
            TableName=self._table,
            AttributeDefinitions=[{"AttributeName": name, "AttributeType": "B"} for name in "hs"],
            KeySchema=[
                {"AttributeName": "h", "KeyType": "HASH"},
                {"AttributeName": "s", "KeyType": "RANGE"},
            ],
            BillingMode="PAY_PER_REQUEST",
        )
        self._gate = {
            "ConditionCheck": {**self._condition("attribute_not_exists(h)"), "Key": _GATE}
        }
        self._checked = checked
        self._threads = ThreadPoolExecutor(THREADS)
        self._versions: dict[bytes, int] = {}

    def inserts(self, entries: Entries) -> None:
        for key, value in entries:
            self._write(self._insert(key, value))
            self._versions[key] = 1

    def replaces(self, entries: Entries) -> None:
        for key, value in entries:
            version = self._versions[key]
            expected = {"ExpressionAttributeValues": {":v": {"N": str(version)}}}
            self._write(
                {
                    **self._condition("v = :v"),
                    **expected,
                    "Item": self._item(key, value, version + 1),
                }
            )
            self._versions[key] = version + 1

    def gets(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            assert "Item" in self._client.get_item(
                TableName=self._table, Key=self._key(key), ConsistentRead=True
            )

    def get_all(self, keys: Sequence[bytes]) -> None:
        def get(part: Sequence[bytes]) -> list[Any]:
            asked = {
                self._table: {"Keys": [self._key(key) for key in part], "ConsistentRead": True}
            }
            answer = self._client.batch_get_item(RequestItems=asked)
            assert not answer["UnprocessedKeys"]
            return [(item["s"]["B"], item) for item in answer["Responses"][self._table]]

        parts = self._threads.map(
            get, [keys[start : start + 100] for start in range(0, len(keys), 100)]
        )
        items = dict(entry for part in parts for entry in part)
        assert None not in [items.get(key) for key in keys]

    def insert_batches(self, batches: Sequence[Entries]) -> None:
        for batch in batches:
            puts = [{"Put": self._insert(key, value)} for key, value in batch]
            self._client.transact_write_items(
                TransactItems=[self._gate, *puts] if self._checked else puts
            )

    def fill(self, entries: Entries) -> None:
        def put(part: Entries) -> None:
            requests = [{"PutRequest": {"Item": self._item(key, value, 1)}} for key, value in part]
            assert not self._client.batch_write_item(RequestItems={self._table: requests})[
                "UnprocessedItems"
            ]

        list(
            self._threads.map(
                put, [entries[start : start + 25] for start in range(0, len(entries), 25)]
            )
        )

    def scan(self) -> int:
        request: dict[str, Any] = {
            "TableName": self._table,
            "KeyConditionExpression": "h = :h",
            "ExpressionAttributeValues": {":h": {"B": b"benchmark"}},
            "ConsistentRead": True,
        }
        count = 0
        while True:
            answer = self._client.query(**request)
            count += len(
                [(item["s"]["B"], item["v"]["N"], item["d"]["B"]) for item in answer["Items"]]
            )
            if "LastEvaluatedKey" not in answer:
                return count
            request["ExclusiveStartKey"] = answer["LastEvaluatedKey"]

    def close(self) -> None:
        self._threads.shutdown()
        self._client.close()

    def _write(self, put: dict[str, Any]) -> None:
        if self._checked:
            self._client.transact_write_items(TransactItems=[self._gate, {"Put": put}])
        else:
            self._client.put_item(**put)

    def _insert(self, key: bytes, value: bytes) -> dict[str, Any]:
        return {**self._condition("attribute_not_exists(h)"), "Item": self._item(key, value, 1)}

    def _condition(self, expression: str) -> dict[str, Any]:
        return {"TableName": self._table, "ConditionExpression": expression}

    def _key(self, key: bytes) -> dict[str, Any]:
        return {"h": {"B": b"benchmark"}, "s": {"B": key}}

    def _item(self, key: bytes, value: bytes, version: int) -> dict[str, Any]:
        return {**self._key(key), "v": {"N": str(version)}, "d": {"B": value}}


@contextmanager
def _opened() -> Iterator[Compared]:
    with start_dynamodb() as server:
        before = dict(os.environ)
        os.environ.update(server.env)
        hands = {
            "plain": DynamoDbByHand(server, checked=False),
            "checked": DynamoDbByHand(server, checked=True),
        }
        try:
            yield Compared(DynamoDbSegments(threads=THREADS), dict(hands))
        finally:
            for hand in hands.values():
                hand.close()
            os.environ.clear()
            os.environ.update(before)


_RATE = "at least 0.8"
DYNAMODB = Store(
    "DynamoDB Local; checked by hand: with the same look for a seal, plain: without",
    _opened,
    singles=500,
    scanned=100_000,
    goals={
        "single conditional inserts": _RATE,
        "single conditional replaces": _RATE,
        "gets of 1,000 keys at once": "at least 0.9",
        "entries in order": "at least 0.7",
    },
)
