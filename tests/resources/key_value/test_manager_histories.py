"""Any history of managers, some of which die and some of which race: their answers are those of
one plain table.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.resources.errors import (
    CommitStateUnknownError,
    KeyValueTableExistsError,
    KeyValueTableNotFoundError,
    StoreUnavailableError,
)
from dagster_adjunct.resources.key_value.manager import KeyValueTableManager
from dagster_adjunct.resources.key_value.segment import KeyValueTableConfiguration
from dagster_adjunct.resources.key_value.serializers import TextSerializer
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.resources.key_value.control_plane_world import Died, RememberedTables

TEXT = TextSerializer()
OPERATIONS = ("create 1", "create 2", "seal", "delete", "open", "partitions")
Plain = tuple[int, bool] | None
"""A table as it should be: its partitions and whether it is sealed; None is no table."""


def plainly(operation: str, table: Plain) -> tuple[object, Plain]:
    """Return what an operation should answer, and the table after it."""
    name, _, count = operation.partition(" ")
    if name == "create":
        if table is None:
            return True, (int(count), False)
        return (False if table[0] == int(count) else "refused"), table
    if name == "delete":
        return table is not None, None
    if table is None:
        return "missing", table
    if name == "seal":
        return not table[1], (table[0], True)
    return (table[0] if name == "partitions" else "opened"), table


def asked(manager: KeyValueTableManager, operation: str) -> object:
    name, _, count = operation.partition(" ")
    try:
        match name:
            case "create":
                return manager.create("plant", "t", KeyValueTableConfiguration(int(count)))
            case "seal":
                return manager.seal("plant", "t")
            case "delete":
                return manager.delete("plant", "t")
            case "open":
                manager.open("plant", "t", key=TEXT, value=TEXT)
                return "opened"
            case _:
                return manager.get_configuration("plant", "t").partitions
    except KeyValueTableExistsError:
        return "refused"
    except KeyValueTableNotFoundError:
        return "missing"


@pytest.mark.lengthy
@given(
    st.lists(
        st.tuples(
            st.sampled_from(OPERATIONS),
            st.none()
            | st.tuples(
                st.sampled_from(["before", "after"]),
                st.sampled_from(["create", "seal", "delete", "ask"]),
            ),
        ),
        max_size=12,
    )
)
@settings(max_examples=150)
def test_managers_that_die_leave_what_the_next_one_finishes(
    history: Sequence[tuple[str, tuple[str, str] | None]],
) -> None:
    lake = lake_in(InMemoryStore())
    backend = RememberedTables(lake.url)
    KeyValueTableManager(lake).create_scope("plant")
    table: Plain = None
    for operation, death in history:
        backend.before = backend.after = lambda step: None
        if death is not None:
            backend.die_at(*death)
        expected, after = plainly(operation, table)
        try:
            assert asked(KeyValueTableManager(lake, backend), operation) == expected
        except Died as died:
            # It has happened, as deaths are behind the commit; unless what others had left came
            # first, or it was asked whether it may be done.
            came_first = {"create": "delete", "seal": "create"}.get(operation.partition(" ")[0])
            table = table if str(died) in (came_first, "ask") else after
        else:
            table = after
            if operation not in ("partitions", "open"):
                expected_physical = [] if table is None else ["sealed" if table[1] else "open"]
                if expected not in ("refused", "missing"):
                    assert list(backend.tables.values()) == expected_physical
    backend.before = backend.after = lambda step: None
    KeyValueTableManager(lake, backend).delete("plant", "t")
    assert backend.tables == {}


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "kind", ["crash-before", "crash-after", "lost-after", "lost-before", "throttle"]
)
def test_a_fault_at_any_request_for_metadata_leaves_each_step_done_or_not_done(kind: Any) -> None:
    story = ("create 1", "seal", "delete")
    broken = 0
    for nth in range(1, 1000):
        lake = lake_in(InMemoryStore())
        backend = RememberedTables(lake.url)
        KeyValueTableManager(lake).create_scope("plant")
        store = FaultyStore(lake.store, [Fault("*", nth, kind)])
        manager = KeyValueTableManager(Lake(store, lake.id), backend)
        for step in story:
            try:
                assert asked(manager, step) is True
            except (Crash, StoreUnavailableError, CommitStateUnknownError):
                broken += 1
                manager = KeyValueTableManager(lake, backend)
                assert asked(manager, step) in (True, False)
            table = {"create 1": ["open"], "seal": ["sealed"], "delete": []}[step]
            assert list(backend.tables.values()) == table
        assert KeyValueTableManager(lake).list("plant") == ()
        if len(store.requests) < nth:
            break
    assert nth > 20
    assert broken > 0 or kind not in ("crash-before", "crash-after")


@dataclass(frozen=True)
class Event:
    """An operation as it was seen from outside; times are from one clock."""

    operation: str
    answer: object
    began: float
    ended: float


def in_some_order(events: Sequence[Event]) -> bool:
    """Whether one after the other, each between its beginning and its end, gives these answers."""

    @cache
    def possible(done: frozenset[int], table: Plain) -> bool:
        left = [number for number in range(len(events)) if number not in done]
        if not left:
            return True
        first_end = min(events[number].ended for number in left)
        for number in left:
            if events[number].began <= first_end:
                answer, after = plainly(events[number].operation, table)
                if answer == events[number].answer and possible(done | {number}, after):
                    return True
        return False

    return possible(frozenset(), None)


def test_the_checker_reports_right_from_wrong() -> None:
    made = [Event("create 1", True, 0, 2), Event("create 1", False, 1, 3)]
    assert in_some_order(made)
    assert not in_some_order([Event("create 1", True, 0, 2), Event("create 1", True, 1, 3)])
    assert not in_some_order([*made, Event("seal", "missing", 4, 5)])
    assert not in_some_order([Event("create 1", False, 0, 1), Event("create 1", True, 2, 3)])


@pytest.mark.parametrize("seed", range(20))
def test_what_racing_managers_answer_could_have_come_one_after_the_other(seed: int) -> None:
    lake = lake_in(InMemoryStore())
    KeyValueTableManager(lake).create_scope("plant")
    start = threading.Barrier(4)
    events: list[Event] = []

    def manage(number: int) -> None:
        chance = random.Random(seed * 10 + number)
        backend = RememberedTables(lake.url)
        backend.before = backend.after = lambda step: time.sleep(
            chance.choice([0, 0, 0.001, 0.003])
        )
        manager = KeyValueTableManager(lake, backend)
        start.wait()
        for operation in chance.choices(OPERATIONS[:5], weights=[4, 1, 2, 3, 1], k=6):
            began = time.monotonic()
            answer = asked(manager, operation)
            events.append(Event(operation, answer, began, time.monotonic()))

    threads = [threading.Thread(target=manage, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(events) == 24
    assert in_some_order(sorted(events, key=lambda event: event.began))
    manager = KeyValueTableManager(lake, RememberedTables(lake.url))
    manager.delete("plant", "t")
    assert RememberedTables(lake.url).tables == {}
