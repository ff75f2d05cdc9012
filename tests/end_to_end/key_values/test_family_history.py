"""The checker of histories itself, with histories whose verdict is known."""

from __future__ import annotations

import pytest

from tests.end_to_end.key_values.family_history import (
    ABSENT,
    NotLinearisableError,
    Operation,
    check_linearisable,
)


def put(began: int, ended: int, key: str = "a", value: str = "1", **more: object) -> Operation:
    return Operation(
        began=began, ended=ended, wrote={key: value}, versions={key: f"v{value}"}, **more
    )  # type: ignore[arg-type]


def read(began: int, ended: int, **seen: str | None) -> Operation:
    return Operation(began=began, ended=ended, seen=seen)


POSSIBLE = {
    "one after the other": [put(0, 1), read(2, 3, a="1")],
    "a read sees a write that is under way": [put(0, 9), read(1, 2, a="1"), read(3, 4, a="1")],
    "a read does not see it yet": [put(0, 9), read(1, 2, a=None), read(3, 4, a="1")],
    "of two inserts one is refused": [
        put(0, 5, expected={"a": ABSENT}),
        Operation(began=1, ended=6, expected={"a": ABSENT}, wrote={"a": "2"}, refused={"a": "v1"}),
    ],
    "a batch is refused for the one of its conditions that fails": [
        put(0, 1),
        Operation(
            began=2,
            ended=3,
            expected={"a": ABSENT, "b": ABSENT},
            wrote={"b": "2"},
            refused={"a": "v1"},
        ),
    ],
}
IMPOSSIBLE = {
    "a lost write": [put(0, 1), read(2, 3, a=None)],
    "a stale read": [put(0, 1), put(2, 3, value="2"), read(4, 5, a="1")],
    "a write that is seen and then not": [put(0, 9), read(1, 2, a="1"), read(3, 4, a=None)],
    "two inserts": [
        put(0, 5, expected={"a": ABSENT}),
        put(0, 5, value="2", expected={"a": ABSENT}),
    ],
    "two replace one version": [
        put(0, 1),
        put(2, 5, value="2", expected={"a": "v1"}),
        put(2, 5, value="3", expected={"a": "v1"}),
    ],
    "a version that comes back after a remove": [
        put(0, 1),
        Operation(began=2, ended=3, wrote={"a": None}),
        put(4, 5, value="2", expected={"a": "v1"}),
    ],
    "half a batch": [
        Operation(began=0, ended=9, wrote={"a": "1", "b": "2"}, versions={"a": "v1", "b": "v2"}),
        read(1, 2, a="1", b=None),
    ],
    "half a batch, in two reads": [
        Operation(began=0, ended=9, wrote={"a": "1", "b": "2"}, versions={"a": "v1", "b": "v2"}),
        read(1, 2, a="1"),
        read(3, 4, b=None),
    ],
    "a success that is called a conflict": [
        Operation(began=0, ended=5, expected={"a": ABSENT}, wrote={"a": "1"}, refused={"a": "v1"}),
        Operation(began=6, ended=7, seen={"a": "1"}, versions={"a": "v1"}),
    ],
    "a refusal that names too few keys": [
        put(0, 1),
        put(2, 3, key="b", value="2"),
        Operation(
            began=4,
            ended=5,
            expected={"a": ABSENT, "b": ABSENT},
            wrote={"b": "3"},
            refused={"a": "v1"},
        ),
    ],
    "one version of two values": [
        put(0, 1),
        Operation(began=2, ended=3, wrote={"a": "2"}, versions={"a": "v1"}),
    ],
}


@pytest.mark.parametrize("name", POSSIBLE)
def test_what_can_have_happened_is_taken(name):
    check_linearisable(POSSIBLE[name])


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_have_happened_is_refused(name):
    with pytest.raises(NotLinearisableError):
        check_linearisable(IMPOSSIBLE[name])
