"""The rules of docs/rules.md name tests that are there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMED = sorted(
    set(
        re.findall(
            r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/rules.md").read_text(encoding="utf-8")
        )
    )
)


def test_the_page_names_tests() -> None:
    assert len(NAMED) > 20


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_rule_is_held_by_a_test_that_exists(path: str, name: str) -> None:
    assert name in _functions(path)


@cache
def _functions(path: str) -> frozenset[str]:
    """Return the names of all functions and methods of a file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return frozenset(re.findall(r"^ *(?:async )?def (\w+)\(", text, re.MULTILINE))
