"""Any history of calls of a table's public interface answers as a dictionary with versions does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from dagster_adjunct.errors import ConditionsNotMetError
from dagster_adjunct.key_value import (
    BlockingKeyValueTable,
    Insert,
    IteratorState,
    KeyVersion,
    Put,
    Remove,
    Replace,
    TableEntry,
    TableKey,
)
from tests.end_to_end.key_values.worlds import BACKENDS, QUICK, World

Place = tuple[str | None, str]
FAMILY = st.sampled_from(["f", "f", "fa", "é", "\0\1f"])
MAYBE = st.one_of(st.none(), FAMILY)
KEY = st.sampled_from(["", "a", "ab", "b", "é", "\0", "a\0", "\0\1fa"])
VALUE = st.sampled_from(["", "0", "1", "é" * 700])
VERSION = st.sampled_from(["current", "current", "any"])
KIND = st.sampled_from(["insert", "put", "replace", "remove", "remove-any"])


class TableMachine(RuleBasedStateMachine):
    """`held` is the dictionary; `past` are all versions that there ever were, of whichever key."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.held: dict[Place, tuple[KeyVersion, str]] = {}
        self.past = [KeyVersion.from_bytes(bytes(16))]

    @initialize()
    def two_handles(self) -> None:
        table = self.world.table(partitions=2)
        again = self.world.over(self.world.backend(), table)
        self.handles = [BlockingKeyValueTable(table), BlockingKeyValueTable(again)]
        keys = ["", "a", "ab", "b", "\0"]
        for key, version in zip(
            keys, self.table.put_all([(key, "0") for key in keys], family="f"), strict=True
        ):
            self.wrote(("f", key), version, "0")

    def teardown(self) -> None:
        for handle in self.handles:
            handle.close()

    @property
    def table(self) -> BlockingKeyValueTable[str, str]:
        """Both handles in turn, as two processes would."""
        self.handles.reverse()
        return self.handles[0]

    def version(self, place: Place, which: str, number: int) -> KeyVersion:
        if which == "current" and place in self.held:
            return self.held[place][0]
        return self.past[number % len(self.past)]

    def wrote(self, place: Place, version: KeyVersion | None, value: str) -> None:
        if version is None:
            self.held.pop(place, None)
            return
        assert version not in self.past
        self.past.append(version)
        self.held[place] = version, value

    def version_at(self, place: Place) -> KeyVersion | None:
        return self.held[place][0] if place in self.held else None

    def refused(
        self, error: ConditionsNotMetError, expected: dict[Place, KeyVersion | None]
    ) -> None:
        """Check that it names exactly the conditions that fail."""
        reported = {
            (failure.family, failure.key): (failure.expected, failure.found)
            for failure in error.failures
        }
        assert len(reported) == len(error.failures)
        assert reported == {
            place: (version, self.version_at(place))
            for place, version in expected.items()
            if self.version_at(place) != version
        }

    def entry(self, place: Place) -> TableEntry[str, str] | None:
        if place not in self.held:
            return None
        version, value = self.held[place]
        return TableEntry(TableKey(*place, version), value)

    @rule(family=MAYBE, key=KEY, value=VALUE)
    def put(self, family: str | None, key: str, value: str) -> None:
        self.wrote((family, key), self.table.put(key, value, family=family), value)

    @rule(family=MAYBE, key=KEY, value=VALUE)
    def put_if_absent(self, family: str | None, key: str, value: str) -> None:
        self.conditional(
            (family, key), None, value, lambda: self.table.put_if_absent(key, value, family=family)
        )

    @rule(family=MAYBE, key=KEY, value=VALUE, which=VERSION, number=st.integers(0, 99))
    def replace(self, family: str | None, key: str, value: str, which: str, number: int) -> None:
        version = self.version((family, key), which, number)
        self.conditional(
            (family, key),
            version,
            value,
            lambda: self.table.replace(key, value, version, family=family),
        )

    @rule(family=MAYBE, key=KEY, which=VERSION, number=st.integers(0, 99))
    def remove_version(self, family: str | None, key: str, which: str, number: int) -> None:
        version = self.version((family, key), which, number)
        self.conditional(
            (family, key),
            version,
            "",
            lambda: self.table.remove(key, version=version, family=family),
        )

    @rule(family=MAYBE, key=KEY)
    def remove(self, family: str | None, key: str) -> None:
        self.table.remove(key, family=family)
        self.wrote((family, key), None, "")

    def conditional(
        self, place: Place, expected: KeyVersion | None, value: str, write: Any
    ) -> None:
        try:
            version = write()
        except ConditionsNotMetError as error:
            assert self.version_at(place) != expected
            self.refused(error, {place: expected})
        else:
            assert self.version_at(place) == expected
            self.wrote(place, version, value)

    @rule(
        family=FAMILY,
        asked=st.dictionaries(KEY, st.tuples(KIND, VALUE, VERSION, st.integers(0, 99)), max_size=8),
        named=st.booleans(),
    )
    def batch(self, family: str, asked: dict[str, tuple[str, str, str, int]], named: bool) -> None:
        changes: list[Any] = []
        expected: dict[Place, KeyVersion | None] = {}
        for key, (kind, value, which, number) in asked.items():
            version = self.version((family, key), which, number)
            if kind == "insert":
                expected[family, key] = None
            elif kind in ("replace", "remove"):
                expected[family, key] = version
            changes.append(
                {
                    "insert": Insert(key, value),
                    "put": Put(key, value),
                    "replace": Replace(key, value, version),
                    "remove": Remove(key, version),
                    "remove-any": Remove(key),
                }[kind]
            )
        fits = all(self.version_at(place) == version for place, version in expected.items())
        try:
            versions = (
                self.apply(changes, family) if named else self.table.apply(changes, family=family)
            )
        except ConditionsNotMetError as error:
            assert not fits
            self.refused(error, expected)
            return
        assert fits
        for change, version in zip(changes, versions, strict=True):
            self.wrote((family, change.key), version, getattr(change, "value", ""))

    def apply(self, changes: list[Any], family: str) -> list[KeyVersion | None]:
        """Apply a batch by the method that is for its kind alone, where there is one."""
        kinds = {type(change) for change in changes}
        if kinds == {Put}:
            return list(
                self.table.put_all(
                    [(change.key, change.value) for change in changes], family=family
                )
            )
        if kinds == {Replace}:
            entries = [(change.key, change.value, change.version) for change in changes]
            return list(self.table.replace_all(entries, family=family))
        if kinds == {Remove}:
            self.table.remove_all(
                [TableKey(family, change.key, change.version) for change in changes], family=family
            )
            return [None] * len(changes)
        return self.table.apply(changes, family=family)

    @rule(family=MAYBE, key=KEY)
    def get(self, family: str | None, key: str) -> None:
        assert self.table.get(key, family=family) == self.entry((family, key))
        assert self.table.exists(key, family=family) is ((family, key) in self.held)

    @rule(places=st.lists(st.tuples(MAYBE, KEY), max_size=12))
    def get_all(self, places: list[Place]) -> None:
        assert self.table.get_all([TableKey(*place) for place in places]) == [
            self.entry(place) for place in places
        ]

    @rule(
        family=FAMILY,
        bounds=st.tuples(*[st.one_of(st.none(), KEY)] * 3),
        page_size=st.integers(1, 4),
        with_values=st.booleans(),
    )
    def iterate(
        self, family: str, bounds: tuple[str | None, ...], page_size: int, with_values: bool
    ) -> None:
        prefix, start, end = bounds
        expected = [
            self.entry((family, key))
            for key in sorted((key for of, key in self.held if of == family), key=str.encode)
            if key.startswith(prefix or "")
            and (start is None or key.encode() >= start.encode())
            and (end is None or key.encode() < end.encode())
        ]
        given = {"prefix": prefix, "start": start, "end": end, "page_size": page_size}
        matched = self.pages(
            lambda table, state: (table.entries if with_values else table.keys)(
                family, **given, state=state
            ),
            page_size,
        )
        assert matched == (expected if with_values else [entry and entry.key for entry in expected])

    @rule(page_size=st.integers(1, 5), with_values=st.booleans())
    def iterate_all(self, page_size: int, with_values: bool) -> None:
        matched: list[Any] = []
        # PDP-39 says which of the two; here it is enough that each key is in one
        for partition in (0, 1):
            given = {"partitions": [partition], "page_size": page_size}
            matched += self.pages(
                lambda t, state, g=given: (t.all_entries if with_values else t.all_keys)(
                    **g, state=state
                ),
                page_size,
            )
        whole = self.pages(
            lambda t, state: (t.all_entries if with_values else t.all_keys)(
                page_size=page_size, state=state
            ),
            page_size,
        )
        assert whole == matched
        expected = [self.entry(place) for place in self.held]
        keys = {entry.key: entry for entry in expected if entry is not None}
        assert len(matched) == len(keys)
        assert (
            {item.key: item for item in matched} == keys
            if with_values
            else set(matched) == keys.keys()
        )

    def pages(self, iterate: Any, page_size: int) -> list[Any]:
        """Go from page to page, each by another handle, as other processes would; the state goes
        by its bytes.
        """
        items: list[Any] = []
        state = None
        while (page := next(iter(iterate(self.table, state)), None)) is not None:
            assert 1 <= len(page.items) <= page_size
            items += page.items
            state = IteratorState.from_bytes(page.state.to_bytes())
        return items


def check(world: World, examples: int, steps: int) -> None:
    run_state_machine_as_test(
        lambda: TableMachine(world),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.lengthy
@pytest.mark.parametrize("world", QUICK, indirect=True)
def test_any_history_answers_as_a_dictionary_does(world):
    check(world, 4, 25)


@pytest.mark.long
@pytest.mark.parametrize("world", BACKENDS, indirect=True)
def test_any_long_history_answers_as_a_dictionary_does(world):
    check(world, 60, 60)
