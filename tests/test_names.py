"""Names say what they hold: nothing in the floors is called `each`, `found` or `said`, which could hold anything."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EMPTY = frozenset({"each", "found", "said"})
PUBLIC_FIELDS = {
    "assets/retention/erasing/key_search.py": ["found"],  # KeySearch: the objects that hold one of the keys
    "resources/errors.py": ["found"],  # MarkerConflictError: beside what was expected
    "resources/key_value_errors.py": ["found"],  # FailedCondition: beside what was expected
    "resources/tables/metrics.py": ["found"],  # TableMetrics: keys that had a record
}
"""Fields that users read by these names."""


def empty_names(tree: ast.AST) -> list[str]:
    """Return the empty names that are bound: by assignments, loops, comprehensions, imports, and as parameters."""
    bound = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.append(node.id)
        elif isinstance(node, ast.arg):
            bound.append(node.arg)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            bound.append(node.name)
        elif isinstance(node, ast.alias) and node.asname:
            bound.append(node.asname)
    return [name for name in bound if name in EMPTY]


@pytest.mark.parametrize("floor", ["orchestration", "assets", "resources"])
def test_names_say_what_they_hold(floor: str) -> None:
    names = {
        str(file.relative_to(ROOT)): empty_names(ast.parse(file.read_text(encoding="utf-8")))
        for file in (ROOT / floor).rglob("*.py")
    }
    public = {file: fields for file, fields in PUBLIC_FIELDS.items() if file.startswith(f"{floor}/")}
    assert {file: empty for file, empty in names.items() if empty} == public, "name what they hold"


def test_all_that_binds_a_name_is_counted() -> None:
    code = "\n".join((
        "import json as found",
        "found: int = 1",
        "for each in []: pass",
        "said = [each for each in ()]",
        "def one(found, *, said): ...",
        "lambda each: each",
        "try: ...\nexcept OSError as found: ...",
        "match 1:\n    case [*each]: ...\n    case said: ...",
        "if (found := 1): ...",
        "other.found = found",
    ))  # fmt: skip
    assert Counter(empty_names(ast.parse(code))) == {"found": 5, "each": 4, "said": 3}
