"""What draws, repeats or reads less than it could is marked, so that `make test-long` has it do
all.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def calls_rounds(node: ast.AST) -> bool:
    return any(
        isinstance(each, ast.Call) and getattr(each.func, "id", None) == "rounds"
        for each in ast.walk(node)
    )


def is_marked(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr == "rounds" for each in ast.walk(node))


def unmarked(tree: ast.Module) -> Iterator[str]:
    """Yield the tests of a file that call rounds() and are not marked, nor is their file."""
    marks = [
        each.value
        for each in tree.body
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "pytestmark"
    ]
    if any(map(is_marked, marks)):
        return
    for each in tree.body:
        is_test = isinstance(each, ast.FunctionDef) and each.name.startswith("test_")
        if is_test and calls_rounds(each) and not any(map(is_marked, each.decorator_list)):
            yield each.name


@pytest.mark.lengthy
def test_tests_that_do_less_than_they_could_are_marked() -> None:
    found = []
    for file in sorted(TESTS.rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        if "rounds(" in text:
            found += [f"{file.name}::{name}" for name in unmarked(ast.parse(text))]
    assert found == []
