"""A name means one thing: in the floors no two files, and no two classes, are called the same."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = ("orchestration", "assets", "resources")
TWINS = {"errors", "validators"}
"""Public modules that give away what the file of their name in a floor holds. No other is called as a file there is."""


def code_of_the_floors() -> list[Path]:
    return [file for floor in FLOORS for file in (ROOT / floor).rglob("*.py") if file.stem != "__init__"]


def standing_twice(named: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the places of each name that has several, of pairs of a name and where it stands."""
    places = defaultdict(list)
    for name, place in named:
        places[name].append(place)
    return {name: sorted(where) for name, where in places.items() if len(where) > 1}


def names_of_classes(tree: ast.AST) -> list[str]:
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def test_no_two_files_are_called_the_same() -> None:
    assert standing_twice((file.stem, str(file.relative_to(ROOT))) for file in code_of_the_floors()) == {}


def test_public_modules_that_are_called_as_a_file_is_are_named() -> None:
    public = {file.stem for file in (ROOT / "dagster_adjunct").glob("*.py")}
    assert public & {file.stem for file in code_of_the_floors()} == TWINS


def test_no_two_classes_are_called_the_same() -> None:
    named = (
        (name, str(file.relative_to(ROOT)))
        for file in code_of_the_floors()
        for name in names_of_classes(ast.parse(file.read_text(encoding="utf-8")))
    )
    assert standing_twice(named) == {}, "rename one to what it is where it stands"


def test_all_places_of_a_name_are_told() -> None:
    assert standing_twice([("kinds", "sql"), ("batch", "tables"), ("kinds", "nodes")]) == {"kinds": ["nodes", "sql"]}
    assert sorted(names_of_classes(ast.parse("class A:\n  class B: ...\nif x:\n  class C: ..."))) == ["A", "B", "C"]
