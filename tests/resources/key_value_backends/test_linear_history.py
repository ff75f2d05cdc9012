"""The checker of histories finds what can't have been, and nothing else."""

from __future__ import annotations

import pytest

from tests.resources.key_value_backends.linear_history import Observation, contradictions


def seen(kind: str, before: str | None, after: str | None, began: int, ended: int) -> Observation:
    return Observation("key", kind, before, after, began, ended)


FIRST = seen("write", None, "one", 10, 20)
SECOND = seen("write", "one", "two", 30, 40)


@pytest.mark.parametrize(
    "more",
    [
        [],
        [seen("read", None, None, 0, 15), seen("read", None, "one", 12, 14), seen("read", "one", "two", 39, 50)],
        [seen("read", None, "one", 31, 60), seen("read", None, "two", 35, 36)],  # both while it is written
        [seen("refused", None, "two", 35, 45), seen("refused", "one", "two", 41, 42)],
    ],
)
def test_what_can_have_been_is_no_contradiction(more):
    assert contradictions([*more, SECOND, FIRST]) == []


@pytest.mark.parametrize(
    "wrong",
    [
        seen("write", "one", "other", 32, 35),  # two replaced the same
        seen("read", None, "three", 50, 60),  # nobody wrote it
        seen("read", None, "one", 41, 50),  # older than what had been written
        seen("read", None, None, 21, 22),
        seen("read", None, "two", 21, 29),  # before it was written
        seen("refused", None, "one", 45, 50),
        seen("refused", "two", "two", 45, 50),
    ],
)
def test_what_can_not_have_been_is_told(wrong):
    assert contradictions([FIRST, SECOND, wrong]) != []


def test_a_reader_does_not_go_back_behind_another_reader():
    readers = [seen("read", None, "two", 31, 32), seen("read", None, "one", 33, 34)]
    assert contradictions([FIRST, SECOND, *readers]) != []
