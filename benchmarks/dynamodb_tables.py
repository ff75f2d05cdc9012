"""Records into DynamoDB Local and back: `DynamoDbTable` against boto3's client by hand, with as
many threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from typing import Any

from benchmarks.flight_messages import COLUMNS, Ours, Row, rows
from benchmarks.timing import alternate, show
from dagster_adjunct.resources.table_backends.dynamodb import DynamoDbTable
from tests.servers.dynamodb import DynamoDbServer, start_dynamodb

ROWS = 5000
UPDATED = 1500
ONE_BY_ONE = 500
THREADS = 16


class ByHand:
    """The low-level client without checks and repeats, a connection for each thread, code for
    these columns.
    """

    def __init__(self, server: DynamoDbServer, table: str, threads: int = THREADS) -> None:
        from botocore.config import Config

        config = Config(
            max_pool_connections=threads,
            retries={"total_max_attempts": 1},
            parameter_validation=False,
        )
        where = server.session()
        self.client = where["session"].client(
            "dynamodb", endpoint_url=where["endpoint_url"], config=config
        )
        self.table = table
        self.threads = ThreadPoolExecutor(threads)

    def item(self, row: Row) -> dict[str, Any]:
        key, record, _ = row
        return {
            "tail": {"S": key},
            "seen": {"S": record["seen"].isoformat()},
            "origin": {"S": record["origin"]},
            "flights": {"N": str(record["flights"])},
            "delay": {"N": repr(record["delay"])},
        }

    def put(self, given: Sequence[Row]) -> None:
        def send(part: Sequence[Row]) -> None:
            requests = [{"PutRequest": {"Item": self.item(row)}} for row in part]
            answer = self.client.batch_write_item(RequestItems={self.table: requests})
            assert not answer["UnprocessedItems"]

        list(
            self.threads.map(
                send, [given[start : start + 25] for start in range(0, len(given), 25)]
            )
        )

    def put_one(self, row: Row) -> None:
        self.client.put_item(TableName=self.table, Item=self.item(row))

    def get(self, given: Sequence[Row]) -> None:
        def send(part: Sequence[Row]) -> list[Any]:
            asked = {
                self.table: {
                    "Keys": [{"tail": {"S": key}} for key, _, _ in part],
                    "ConsistentRead": True,
                }
            }
            return [
                (
                    item["tail"]["S"],
                    datetime.fromisoformat(item["seen"]["S"]),
                    item["origin"]["S"],
                    int(item["flights"]["N"]),
                    float(item["delay"]["N"]),
                )
                for item in self.client.batch_get_item(RequestItems=asked)["Responses"][self.table]
            ]

        list(
            self.threads.map(
                send, [given[start : start + 100] for start in range(0, len(given), 100)]
            )
        )

    def update(self, given: Sequence[Row]) -> None:
        list(self.threads.map(self.update_one, given))

    def update_one(self, row: Row) -> None:
        item, position = self.item(row), {"S": row[2]}
        self.client.update_item(
            TableName=self.table,
            Key={"tail": item["tail"]},
            UpdateExpression="SET seen = :s, origin = :o, delay = :d, mark = :p ADD flights :n",
            ConditionExpression="attribute_exists(tail)"
            " AND (attribute_not_exists(seen) OR seen <= :s)"
            " AND (attribute_not_exists(mark) OR mark < :p)",
            ExpressionAttributeValues={
                ":s": item["seen"],
                ":o": item["origin"],
                ":d": item["delay"],
                ":p": position,
                ":n": {"N": "1"},
            },
        )


def run(rounds: int) -> None:
    print(
        f"dynamodb tables: {ROWS:,} rows put and read, {UPDATED:,} updated under conditions,"
        f" {THREADS} threads"
    )
    with start_dynamodb() as server, asyncio.Runner() as runner:
        table = DynamoDbTable(
            "ours", "tail", columns=COLUMNS, create=True, threads=THREADS, **server.session()
        )
        ours, hand = Ours(table), ByHand(server, "hand")
        runner.run(ours.table.open())
        runner.run(
            DynamoDbTable("hand", "tail", columns=COLUMNS, create=True, **server.session()).open()
        )
        for do in (partial(runner.run, ours.put(rows(0, ROWS))), partial(hand.put, rows(0, ROWS))):
            do()  # both find their records there, and a server that is warm

        def measured(
            name: str, number: int, one: Callable[[Row], None] | None, least: float
        ) -> None:
            by_hand, own = getattr(hand, name), getattr(ours, name)
            timings = alternate(
                rounds,
                hand=lambda turn: by_hand(rows(turn + 1, number)),
                ours=lambda turn: runner.run(own(rows(turn + 1, number))),
            )
            print(f"  {name}: {number / timings['hand'].median:,.0f} rows/s by hand, ", end="")
            print(f"{number / timings['ours'].median:,.0f} rows/s ours")
            show(timings, "hand", "ours", f"at least {least}")
            if one is not None:
                began = time.perf_counter()
                for row in rows(rounds + 2, ONE_BY_ONE):
                    one(row)
                call = (time.perf_counter() - began) / ONE_BY_ONE
                print(
                    f"  one call a row: {1 / call:,.0f} rows/s, ours is"
                    f" {call * number / timings['ours'].median:.1f}x\n"
                )

        measured("put", ROWS, hand.put_one, 0.9)
        measured("get", ROWS, None, 0.9)
        runner.run(ours.put(rows(0, ROWS)))
        hand.put(rows(0, ROWS))
        measured("update", UPDATED, hand.update_one, 0.8)
        runner.run(ours.table.close())
        hand.threads.shutdown()
