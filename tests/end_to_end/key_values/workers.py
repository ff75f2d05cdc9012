"""What processes do to a key-value table while others do it too; each notes what it did, and
when.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dagster_adjunct.errors import (
    ConditionsNotMetError,
    KeyValueTableNotFoundError,
    KeyValueTableSealedError,
)
from dagster_adjunct.key_value import (
    BlockingKeyValueTable,
    Insert,
    KeyVersion,
    Put,
    Remove,
    Replace,
    TableEntry,
)
from tests.end_to_end.key_values.family_history import ABSENT
from tests.end_to_end.key_values.worlds import Notes, Table

FAMILY = "few"
KEYS = ("a", "b", "c")
Blocking = BlockingKeyValueTable[str, str]


def anything(path: Path, table: Table, name: str, operations: int, at_one_moment: bool) -> None:
    """Do anything that a table offers to a few keys of one family, at random, and note it as
    `Operation`s.
    """
    with BlockingKeyValueTable(table) as blocking:
        actor = _Actor(blocking, name, Notes(path))
        for number in range(operations):
            actor.act(f"{name}.{number}", at_one_moment)


def counting(path: Path, table: Table, name: str) -> None:
    """Count in two keys of a family of its own, one batch after the other, until the table takes
    no more.
    """
    notes, count = Notes(path), 0
    with BlockingKeyValueTable(table) as blocking:
        while True:
            began = time.monotonic_ns()
            try:
                blocking.put_all([("left", str(count + 1)), ("right", str(count + 1))], family=name)
            except (KeyValueTableSealedError, KeyValueTableNotFoundError) as error:
                notes.add({"ended": type(error).__name__, "count": count})
                return
            count += 1
            notes.add({"count": count, "began": began})


class _Actor:
    def __init__(self, table: Blocking, name: str, notes: Notes) -> None:
        self.table, self.notes = table, notes
        self.random = random.Random(name)
        # what it last knew of each key
        self.known: dict[str, KeyVersion | None] = dict.fromkeys(KEYS)

    def act(self, value: str, at_one_moment: bool) -> None:
        key, choice = self.random.choice(KEYS), self.random.random()
        if choice < 0.25:
            self.read(key)
        elif choice < 0.4:
            self.read_all(at_one_moment)
        elif choice < 0.75:
            self.write([self.change(key, value)])
        else:
            keys = self.random.sample(KEYS, self.random.choice((2, 3)))
            self.write([self.change(own, f"{value}.{own}") for own in keys])

    def change(
        self, key: str, value: str
    ) -> Insert[str, str] | Put[str, str] | Replace[str, str] | Remove[str]:
        known, choice = self.known[key], self.random.random()
        if choice < 0.15:
            return Put(key, value)
        if choice < 0.2:
            return Remove(key)
        if known is None:
            return Insert(key, value)
        return Replace(key, value, known) if choice < 0.85 else Remove(key, known)

    def write(
        self, changes: list[Insert[str, str] | Put[str, str] | Replace[str, str] | Remove[str]]
    ) -> None:
        wrote = {
            change.key: None if isinstance(change, Remove) else change.value for change in changes
        }
        expected = {change.key: ABSENT for change in changes if isinstance(change, Insert)}
        for change in changes:
            if isinstance(change, Replace | Remove) and change.version is not None:
                expected[change.key] = change.version.to_bytes().hex()
        reported: dict[str, Any] = {"expected": expected, "wrote": wrote}
        began = time.monotonic_ns()
        try:
            written = self.apply(changes)
        except ConditionsNotMetError as error:
            ended = time.monotonic_ns()
            versions = {failure.key: failure.found for failure in error.failures}
            self.known |= versions
            self.note(
                began,
                ended,
                **reported,
                refused={key: _hex(version) for key, version in versions.items()},
            )
            return
        ended = time.monotonic_ns()
        self.known |= written
        self.note(
            began,
            ended,
            **reported,
            versions={key: _hex(version) for key, version in written.items() if version},
        )

    def apply(
        self, changes: list[Insert[str, str] | Put[str, str] | Replace[str, str] | Remove[str]]
    ) -> dict[str, KeyVersion | None]:
        """Apply them by the method that is named after them, where there is one."""
        if len(changes) > 1:
            versions = self.table.apply(changes, family=FAMILY)
            return dict(zip([change.key for change in changes], versions, strict=True))
        (change,) = changes
        if isinstance(change, Remove):
            self.table.remove(change.key, version=change.version, family=FAMILY)
            return {change.key: None}
        if isinstance(change, Put):
            return {change.key: self.table.put(change.key, change.value, family=FAMILY)}
        if isinstance(change, Insert):
            return {change.key: self.table.put_if_absent(change.key, change.value, family=FAMILY)}
        return {
            change.key: self.table.replace(change.key, change.value, change.version, family=FAMILY)
        }

    def read(self, key: str) -> None:
        began = time.monotonic_ns()
        entry = self.table.get(key, family=FAMILY)
        self.saw(began, time.monotonic_ns(), {key: entry})

    def read_all(self, at_one_moment: bool) -> None:
        by_pages = self.random.random() < 0.3
        began = time.monotonic_ns()
        if by_pages:
            entries = {
                entry.key.key: entry
                for page in self.table.entries(FAMILY, page_size=2)
                for entry in page.items
            }
            by_key = {key: entries.get(key) for key in KEYS}
        else:
            by_key = dict(zip(KEYS, self.table.get_all(KEYS, family=FAMILY), strict=True))
        ended = time.monotonic_ns()
        if at_one_moment and not by_pages:
            self.saw(began, ended, by_key)
            return
        for key in KEYS:  # each at a moment of its own
            self.saw(began, ended, {key: by_key[key]})

    def saw(
        self, began: int, ended: int, entries: Mapping[str, TableEntry[str, str] | None]
    ) -> None:
        self.known |= {key: entry and entry.version for key, entry in entries.items()}
        self.note(
            began,
            ended,
            seen={key: entry and entry.value for key, entry in entries.items()},
            versions={key: _hex(entry.version) for key, entry in entries.items() if entry},
        )

    def note(self, began: int, ended: int, **reported: Any) -> None:
        self.notes.add({"began": began, "ended": ended, **reported})


def _hex(version: KeyVersion | None) -> str | None:
    return None if version is None else version.to_bytes().hex()
