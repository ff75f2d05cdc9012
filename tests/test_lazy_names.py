"""Public modules whose names are imported when they are first used."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import dagster_adjunct
from dagster_adjunct import code_location, tables


@pytest.mark.parametrize("module", [dagster_adjunct, code_location, tables])
def test_names_for_type_checkers_are_those_that_are_imported_when_used(module: object) -> None:
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))  # type: ignore[attr-defined]
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    declared: dict[str, set[str]] = defaultdict(set)
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        declared[str(node.module)] |= {alias.name for alias in node.names}
    names = module._NAMES  # type: ignore[attr-defined]
    assert {source: set(each) for source, each in names.items()} == declared
    assert module.__all__ == sorted(name for each in names.values() for name in each)  # type: ignore[attr-defined]


@pytest.mark.lengthy
def test_imports_of_names_leave_the_garbage_collector_as_it_is() -> None:
    code = "import gc; gc.disable = None; from dagster_adjunct import Lake; print(gc.isenabled())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
