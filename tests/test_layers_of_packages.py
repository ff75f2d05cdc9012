"""What an `__init__.py` imports lies below it: any import of a file in its folder runs it first.

The import linter knows a layer by its folder, so nothing there sees what the `__init__.py` of a floor imports, nor what
that of a folder inside a layer takes from beside it.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "dagster_adjunct"
# From the top down, as the linter has them.
FLOORS = ("orchestration", "assets", "resources")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
INITS = [file for floor in FLOORS for file in sorted((ROOT / floor).rglob("__init__.py"))]


def levels_of(floor: str) -> dict[str, int]:
    """Return how low each folder and file of a floor is: 0 is the top layer."""
    layers = next(contract["layers"] for contract in CONTRACTS if contract["name"] == f"layers of {floor}")
    return {name: level for level, names in enumerate(layers) for name in names.split(" | ")}


def imported_by(code: str) -> Iterator[str]:
    """Yield the modules of this project that a file names: in any import, and in any text that is one."""
    for node in ast.walk(ast.parse(code)):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "imports here say the whole name"
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        yield from (name for name in names if name.startswith(f"{PACKAGE}."))


def is_at_or_below(module: str, folder: tuple[str, ...]) -> bool:
    """Whether a folder's `__init__.py` may import this: what is in the folder, or in a layer below its own."""
    floor, *inside = module.removeprefix(f"{PACKAGE}.").split(".")
    if floor not in FLOORS or FLOORS.index(floor) < FLOORS.index(folder[0]):
        return False
    if floor != folder[0]:
        return True
    if len(folder) == 1 or not inside:  # whatever is imported from a floor runs the floor's own file first
        return False
    levels = levels_of(floor)
    return (floor, *inside)[: len(folder)] == folder or levels[inside[0]] > levels[folder[1]]


@pytest.mark.parametrize("file", INITS, ids=lambda file: str(file.parent.relative_to(ROOT)))
def test_what_a_folder_imports_when_any_of_its_files_is_imported_lies_in_it_or_below(file: Path) -> None:
    folder = file.parent.relative_to(ROOT).parts
    modules = set(imported_by(file.read_text(encoding="utf-8")))
    assert {module for module in modules if not is_at_or_below(module, folder)} == set()


@pytest.mark.parametrize(
    ("code", "folder"),
    [
        (
            "def later():\n    from dagster_adjunct.resources.key_value_backends.object_segments import x\n",
            ("resources",),
        ),
        ("import dagster_adjunct.resources.errors\n", ("resources",)),
        ("import_module('dagster_adjunct.resources.metadata')\n", ("resources", "objects")),
        ("from dagster_adjunct.assets.versions.manifest import x\n", ("resources", "objects")),
        ("from dagster_adjunct.resources.streams.lake.lake_reads import x\n", ("resources", "streams", "kafka")),
        ("from dagster_adjunct.streams import x\n", ("orchestration", "cli")),
    ],
)
def test_an_import_from_above_or_beside_is_seen(code: str, folder: tuple[str, ...]) -> None:
    (module,) = imported_by(code)
    assert not is_at_or_below(module, folder)
