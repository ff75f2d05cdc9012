"""What pages and docstrings say of the structure holds: paths and classes are there, layers are those of the linter."""

from __future__ import annotations

import ast
import re
import tomllib
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("orchestration", "assets", "resources")
ARCHITECTURE = ROOT / "docs/architecture.md"
PAGES = [ARCHITECTURE, ROOT / "docs/rules.md", ROOT / "CONTRIBUTING.md"]
HOW_TO = sorted((ROOT / "docs/contributing").glob("*.md"))
# Made by make, and not in the repository.
MADE = ".venv"
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[\w.-]+/[\w./-]*|[\w-]+\.(py|md|toml|txt|yml)")
_FILE = re.compile(r"[\w/]+\.py\b")
_CLASS = re.compile(r"[A-Z][a-z]+[A-Z]\w*")


@cache
def code_of_the_floors() -> tuple[Path, ...]:
    return tuple(file for floor in FLOORS for file in (ROOT / floor).rglob("*.py"))


@cache
def below_the_floors() -> frozenset[str]:
    """Return files with code, and folders with code, by their paths from the root."""
    files = {file.relative_to(ROOT) for file in code_of_the_floors()}
    return frozenset(map(str, files | {folder for file in files for folder in file.parents}))


def is_there(path: str) -> bool:
    """Whether a path is there from the root, else somewhere in a floor, as `step.py`; NAME and FOLDER are any."""
    pattern = re.sub("NAME|FOLDER", "*", path.rstrip("/"))
    if (ROOT / pattern.partition("/")[0]).exists():
        return any(ROOT.glob(pattern))
    return any(fnmatch(known, f"*/{pattern}") for known in below_the_floors())


def code_in(page: Path, kind: re.Pattern[str]) -> set[str]:
    return {code for code in _CODE.findall(page.read_text(encoding="utf-8")) if kind.fullmatch(code)}


@pytest.mark.parametrize("page", [*PAGES, *HOW_TO], ids=lambda page: page.stem)
def test_the_paths_that_a_page_names_are_there(page: Path) -> None:
    named = code_in(page, _PATH)
    assert named
    assert [path for path in sorted(named) if not path.startswith(MADE) and not is_there(path)] == []


def test_the_classes_that_the_pages_name_are_there() -> None:
    named = {name for page in [*PAGES, *HOW_TO] for name in code_in(page, _CLASS)}
    code = "\n".join(file.read_text(encoding="utf-8") for file in code_of_the_floors())
    assert named
    assert named - set(re.findall(r"^class (\w+)", code, re.MULTILINE)) == set()


def files_named_in_the_docstring_of(code: str) -> list[str]:
    if not _FILE.search(code):
        return []
    return _FILE.findall(ast.get_docstring(ast.parse(code)) or "")


@pytest.mark.parametrize("floor", FLOORS)
def test_the_files_that_docstrings_of_a_floor_name_are_there(floor: str) -> None:
    known = {*below_the_floors(), *(str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("*.py"))}
    named = [
        (str(file.relative_to(ROOT)), name)
        for file in (ROOT / floor).rglob("*.py")
        for name in files_named_in_the_docstring_of(file.read_text(encoding="utf-8"))
    ]
    assert named
    assert [where for where in named if not any(f"/{path}".endswith(f"/{where[1]}") for path in known)] == []


@pytest.mark.parametrize("floor", FLOORS)
def test_the_layers_of_a_floor_are_those_that_the_linter_holds(floor: str) -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["name"] == f"layers of {floor}")
    levels = {name: level for level, names in enumerate(layers) for name in names.split(" | ")}
    table = ARCHITECTURE.read_text(encoding="utf-8").partition(f"\n`{floor}/`: ")[2].partition("|\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    told = [[name.removesuffix("/").removesuffix(".py") for name in _CODE.findall(row)] for row in rows]
    order = [levels[name] for names in told for name in names]
    assert order == sorted(order), "what stands above another row lies above it"
    # Of the lowest layers a row may leave some out, and says so.
    last = levels[told[-2][0]] if "…" in rows[-1] else len(layers)
    assert {name for name, level in levels.items() if level <= last} <= {name for names in told for name in names}
