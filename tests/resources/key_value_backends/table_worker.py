"""A process that works on a table with others, and tells on its output what it did. Its task comes as JSON.

`history`: random reads and conditional writes of a few keys, a line each: [key, kind, version before, version after,
began, ended]; a version is hexadecimal or null, and times are the machine's, in nanoseconds. `batches`: all keys are
written together, again and again, until it is killed; a line each time.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

from dagster_adjunct.key_value import (
    KeyValueTable,
    KeyValueTableConfiguration,
    KeyVersion,
    TableEntry,
    TextSerializer,
)
from dagster_adjunct.resources.key_value.backend_names import backend_from
from dagster_adjunct.resources.key_value.table_segment import TableId
from dagster_adjunct.resources.key_value_errors import ConditionsNotMetError

FAMILY = "shared"


def opened(task: dict[str, Any]) -> KeyValueTable[str, str]:
    text = TextSerializer()
    configuration = KeyValueTableConfiguration(partitions=1)
    return KeyValueTable(TableId(*task["table"]), configuration, backend_from(task["backend"]), text, text)


async def history(task: dict[str, Any]) -> None:
    chosen = random.Random(task["seed"])
    known: dict[str, KeyVersion | None] = dict.fromkeys(task["keys"])
    async with opened(task) as table:
        for number in range(task["requests"]):
            key = chosen.choice(task["keys"])
            before = known[key]
            began = time.monotonic_ns()
            if chosen.random() < 0.4:
                entry = await table.get(key, family=FAMILY)
                kind, after = "read", None if entry is None else entry.version
            else:
                value = f"{task['seed']}, {number}"
                try:
                    if before is None:
                        after = await table.put_if_absent(key, value, family=FAMILY)
                    else:
                        after = await table.replace(key, value, before, family=FAMILY)
                    kind = "write"
                except ConditionsNotMetError as error:
                    kind, after = "refused", error.failures[0].found
            ended = time.monotonic_ns()
            known[key] = after
            print(json.dumps([key, kind, _text(before), _text(after), began, ended]))


async def batches(task: dict[str, Any]) -> None:
    async with opened(task) as table:
        number = 0
        while True:
            entries: list[Any] = await table.get_all(task["keys"], family=FAMILY)
            value = f"{task['seed']}, {number}"
            try:
                await table.replace_all([TableEntry(entry.key, value) for entry in entries], family=FAMILY)
            except ConditionsNotMetError:
                continue
            number += 1
            print(number, flush=True)


def _text(version: KeyVersion | None) -> str | None:
    return None if version is None else str(version)


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    asyncio.run({"history": history, "batches": batches}[task["work"]](task))
