"""The oracle of stores: what operations leave behind and say of each entry, in plain Python, one
entry at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass
class Message:
    """One entry; `change` is of updates: {"set": {…}, "add": {…}, "append": {…}, "remove": […]}."""

    key: str
    record: dict[str, Any] = field(default_factory=dict)
    change: dict[str, Any] = field(default_factory=dict)
    default: dict[str, Any] | None = None
    source: str = "s.0"
    place: tuple[int, int, int] = (0, 0, 0)  # epoch, offset, ordinal
    time: Any = None


class PlainStore:
    """Records without their nulls, and for each key what was applied to it."""

    def __init__(self) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        self.newest: dict[str, tuple[Any, ...]] = {}
        self.last: dict[tuple[str, str], tuple[int, int, int]] = {}

    def send(
        self,
        kind: str,
        messages: Sequence[Message],
        newest_by: str | None = None,
        idempotent: bool = False,
    ) -> list[str]:
        """Do it; return "done", "skipped" or "missing" for each message."""
        return [self._one(kind, message, newest_by, idempotent) for message in messages]

    def _one(self, kind: str, message: Message, newest_by: str | None, idempotent: bool) -> str:
        key, order = (
            message.key,
            (message.time, message.source.partition("~")[0], *message.place[1:]),
        )
        of_source, never = (key, message.source), (-1, 0, 0)
        if idempotent and message.place <= self.last.get(of_source, never):
            return "skipped"
        if newest_by is not None:
            known = self.newest.get(key)
            if known is None and self.records.get(key, {}).get(newest_by) is not None:
                known = (self.records[key][newest_by], "", 0, 0)
            if known is not None and order < known:
                if kind != "update" or not idempotent:
                    return "skipped"
                return self._late(message, of_source)
        done = getattr(self, f"_{kind}")(message)
        if done == "done":
            if idempotent:
                self.last[of_source] = message.place
            if newest_by is not None:
                self.newest[key] = order
        return done

    def _put(self, message: Message) -> str:
        self.records[message.key] = without_nulls(message.record)
        return "done"

    def _put_if_absent(self, message: Message) -> str:
        return "skipped" if message.key in self.records else self._put(message)

    def _delete(self, message: Message) -> str:
        self.records.pop(message.key, None)
        return "done"

    def _late(self, message: Message, of_source: tuple[str, str]) -> str:
        """Only add the numbers and append the values, once: where there is no record to take
        them, none gets them.
        """
        numbers = {
            n: v for n, v in message.change.get("add", {}).items() if not isinstance(v, dict | None)
        }
        lists = {n: v for n, v in message.change.get("append", {}).items() if v}
        if not (numbers or lists):
            return "skipped"
        self.last[of_source] = message.place
        if message.key not in self.records:
            return "skipped"
        return self._update(replace(message, change={"add": numbers, "append": lists}))

    def _update(self, message: Message) -> str:
        if message.key not in self.records:
            if message.default is None:
                return "missing"
            self.records[message.key] = without_nulls(message.default)
        record = dict(self.records[message.key])
        for name, value in message.change.get("set", {}).items():
            record[name] = value
        for name, value in message.change.get("add", {}).items():
            if isinstance(value, dict):
                record[name] = {**record.get(name, {}), **value}
            elif value is not None:
                record[name] = record.get(name, 0) + value
        for name, values in message.change.get("append", {}).items():
            if values:
                record[name] = record.get(name, []) + values
        for name in message.change.get("remove", []):
            record[name] = None
        self.records[message.key] = without_nulls(record)
        return "done"


def without_nulls(record: dict[str, Any]) -> dict[str, Any]:
    """The record as stores agree on it: a column that is null is as one that is not there."""
    return {name: value for name, value in record.items() if value is not None}
