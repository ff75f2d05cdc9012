"""Names say what they hold: `each`, `found` and `said`, which could hold anything, become fewer in every floor."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EMPTY = frozenset({"each", "found", "said"})
LEFT = {"orchestration": 0, "assets": 6, "resources": 29}
"""At most so many such variables and parameters. A number may only fall: whoever renames some lowers it."""


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


@pytest.mark.parametrize("floor", sorted(LEFT))
def test_names_that_could_hold_anything_become_fewer(floor: str) -> None:
    by_folder = Counter(
        str(file.parent.relative_to(ROOT))
        for file in (ROOT / floor).rglob("*.py")
        for _ in empty_names(ast.parse(file.read_text(encoding="utf-8")))
    )
    told = ", ".join(f"{folder}: {count}" for folder, count in by_folder.most_common())
    assert by_folder.total() <= LEFT[floor], f"name what they hold: {told}"


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
