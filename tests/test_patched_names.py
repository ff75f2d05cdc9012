"""Tests replace what is ours by handing in another value; a name of ours is patched where there is no such value.

Constants may be patched: a bound made small, a pause made short.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

# By file: the functions, classes and methods of ours that are replaced there, and why no value could be handed in.
KEPT = {
    "tests/assets/test_file_source.py": {
        "LocalTree.content_tag": "reads are counted: no store tells of a local file's"
    },
    "tests/assets/test_leases.py": {"renewed_object._clock": "a machine that sleeps"},
    "tests/examples/drive.py": {"deliver.load": "a part of the example's data"},
    "tests/examples/test_over_time.py": {"deliver.load": "a part of the example's data"},
    "tests/orchestration/cli/test_cli_unbounded.py": {"registry._systems": "the lake's streams are always there"},
    "tests/orchestration/cli/test_plan_verify.py": {"session_scope.session_scope": "one session for all tests"},
    "tests/orchestration/planner/test_documented_refusals.py": {
        "PlanningError.__post_init__": "where errors are made is noted, also of those that pages catch"
    },
    "tests/orchestration/test_batch_parts.py": {
        "arriving_records.column": "an expression of Spark's can't be made without a session"
    },
    "tests/orchestration/test_compiling_large_graphs.py": {
        "rehearsal.marked": "an expression of Spark's can't be made without a session"
    },
    "tests/orchestration/test_physical_checks.py": {"rehearsal.plan_of": "plans that are made, and not executed"},
    "tests/orchestration/test_step_leases.py": {"renewed_object._clock": "a machine that sleeps"},
    "tests/resources/backends/test_sql_tables.py": {
        "PostgresRequests.forget": "requests that may find nothing are counted",
        "SqliteRequests.forget": "requests that may find nothing are counted",
    },
    "tests/resources/key_value_backends/test_sqlite_segments.py": {
        "sqlite_connections.FileConnection": "a commit that fails though it is done: no disk does that when it is asked"
    },
}


def patched(path: Path) -> Iterator[str]:
    """Give what a file replaces of our functions, classes and methods, as "module.name" or "Class.name"."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = imported(tree)
    chosen = {
        ast.unparse(node.targets[0]): node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr == "setattr" or ast.unparse(node.func) == "patch.object":
                where = chosen.get(ast.unparse(node.args[0]), node.args[0])
                yield from replaced(where, *node.args[1:2], names=names)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute):
                    modules = {one: known for one, known in names.items() if inspect.ismodule(known)}
                    yield from replaced(target.value, ast.Constant(target.attr), names=modules)


def replaced(where: ast.expr, name: ast.expr | None = None, *, names: dict[str, Any]) -> Iterator[str]:
    if isinstance(where, ast.Constant):  # "module.name"
        module, _, text = str(where.value).rpartition(".")
        owners = [resolved(module)] if module.startswith("dagster_adjunct") else []
    else:
        text = str(name.value) if isinstance(name, ast.Constant) else ""  # a name that is computed is not seen
        choices = [where.body, where.orelse] if isinstance(where, ast.IfExp) else [where]
        owners = [owner_of(choice, names) for choice in choices]
    for owner in owners:
        of = owner.__name__ if inspect.ismodule(owner) else getattr(owner, "__module__", "")
        if of.startswith("dagster_adjunct") and callable(getattr(owner, text, None)):
            yield f"{owner.__name__.rpartition('.')[2]}.{text}"


def owner_of(expression: ast.expr, names: dict[str, Any]) -> Any:
    """Return what of ours an expression such as `module.Class` is, None where it is nothing of ours."""
    if isinstance(expression, ast.Attribute):
        return getattr(owner_of(expression.value, names), expression.attr, None)
    return names.get(ast.unparse(expression))


def imported(tree: ast.Module) -> dict[str, Any]:
    """Return the modules, classes and values of ours that a file imports, by the names that it has there."""
    return {
        alias.asname or alias.name: resolved(f"{node.module}.{alias.name}")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dagster_adjunct")
        for alias in node.names
    }


def resolved(name: str) -> Any:
    """Return the module, or what a module has under this name, or a class in it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return getattr(resolved(module), attribute)


def test_only_these_functions_and_classes_of_ours_are_patched_by_name() -> None:
    names = {
        path.relative_to(ROOT).as_posix(): {*patched(path)}
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if re.search(r"setattr|patch\.object|^ +\w+\.\w+ = ", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {file: patched_there for file, patched_there in names.items() if patched_there} == {
        file: {*reasons} for file, reasons in KEPT.items()
    }, "hand in another value, and take it off the list"
