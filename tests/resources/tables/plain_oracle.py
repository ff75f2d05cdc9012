"""What a table must hold after messages, said in plain Python from the messages alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from dagster_adjunct.resources.tables.operation import (
    Changes,
    Conditions,
    Mark,
    Operation,
    OperationKind,
    RowEntries,
    position_of,
)


@dataclass(frozen=True)
class Message:
    source: str
    offset: int
    key: str
    time: int
    amount: int

    def mark(self, epoch: int = 0) -> Mark:
        return Mark(self.source, position_of(epoch, self.offset))


def messages(
    seed: int, *, sources: int = 3, per_source: int = 60, keys: int = 7, times: int = 15
) -> dict[str, list[Message]]:
    """By source, in its order. Times repeat and go back, within a source and between them."""
    random = Random(seed)
    return {
        f"lake.clicks.{source}": [
            Message(
                f"lake.clicks.{source}",
                offset,
                f"k{random.randrange(keys)}",
                random.randrange(times),
                random.randint(1, 9),
            )
            for offset in range(per_source)
        ]
        for source in range(sources)
    }


def totals(sent: Iterable[Message], rounds: int = 1) -> dict[str, int]:
    """What each key's amounts add up to, when every message took effect `rounds` times."""
    total: Counter[str] = Counter()
    for message in sent:
        total[message.key] += message.amount * rounds
    return dict(total)


def newest(sent: Iterable[Message]) -> dict[str, Message]:
    """Of each key the message of the greatest time; of equal ones that of the greatest source,
    then offset.
    """
    kept: dict[str, Message] = {}
    for message in sent:
        here = kept.get(message.key)
        if here is None or (message.time, message.source, message.offset) > (
            here.time,
            here.source,
            here.offset,
        ):
            kept[message.key] = message
    return kept


def counting(batch: Sequence[Message], epoch: int = 0) -> Operation[Any]:
    """Adds each message's amount once, however often it is sent."""
    return Operation(
        OperationKind.UPDATE,
        RowEntries(
            [message.key for message in batch],
            [Changes(add={"total": message.amount}) for message in batch],
            [{"id": message.key, "total": 0} for message in batch],
            [message.mark(epoch) for message in batch],
        ),
        conditions=Conditions(idempotent=True),
    )


def counting_next_to_newest(batch: Sequence[Message], epoch: int = 0) -> Operation[Any]:
    """Adds each message's amount once, and sets what it says if it is the newest."""
    return replace(
        counting(batch),
        entries=RowEntries(
            [message.key for message in batch],
            [Changes(set=record_of(message), add={"total": message.amount}) for message in batch],
            [{"id": message.key} for message in batch],
            [message.mark(epoch) for message in batch],
            [message.time for message in batch],
        ),
        conditions=Conditions(newest_by="seen", idempotent=True),
    )


def keeping_newest(batch: Sequence[Message], epoch: int = 0) -> Operation[Any]:
    """Puts each message, of which a key keeps the newest."""
    return Operation(
        OperationKind.PUT,
        RowEntries(
            [message.key for message in batch],
            [record_of(message) for message in batch],
            marks=[message.mark(epoch) for message in batch],
            newest=[message.time for message in batch],
        ),
        conditions=Conditions(newest_by="seen"),
    )


def record_of(message: Message) -> dict[str, Any]:
    return {
        "id": message.key,
        "seen": message.time,
        "origin": message.source,
        "number": message.offset,
    }


def batches(sent: Sequence[Message], size: int) -> list[Sequence[Message]]:
    return [sent[start : start + size] for start in range(0, len(sent), size)]


def delivered_again(parts: Sequence[Sequence[Message]], random: Random) -> list[Sequence[Message]]:
    """The batches of one source as they come when their reader now and then starts again from an
    older checkpoint.
    """
    order: list[Sequence[Message]] = []
    done = 0
    while done < len(parts):
        order.append(parts[done])
        done += 1
        if random.random() < 0.25:
            done = max(0, done - random.randint(1, 3))
    return order
