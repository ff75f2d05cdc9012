"""Private interfaces of other libraries are used in one module for each, which names the releases
that it was written for.
"""

from __future__ import annotations

import ast
import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from dagster_adjunct.assets.exchange import iceberg_snapshot
from dagster_adjunct.orchestration.code_location import dagster_internals
from dagster_adjunct.resources.output_tables import iceberg as iceberg_output
from dagster_adjunct.resources.spark import jvm

ROOT = Path(__file__).resolve().parents[1]
ADAPTERS = {
    "assets/exchange/iceberg_snapshot.py",
    "orchestration/code_location/dagster_internals.py",
    "resources/output_tables/iceberg.py",
    "resources/spark/jvm.py",
    "resources/spark/worker_daemon.py",  # runs in place of PySpark's daemon, and so wraps it
}
LIBRARIES = {"dagster", "dagster_pipes", "dagster_shared", "py4j", "pyiceberg", "pyspark"}
# Modules without an underscore in their names that their documentation leaves out.
INTERNAL = {
    "dagster_shared",
    "dagster.components.resolved",
    "dagster.components.scaffold",
    "pyspark.daemon",
    "pyspark.sql.connect.client",
    "pyspark.sql.pandas.types",
    "pyspark.worker",
}
ATTRIBUTES = {
    "_active_spark_context",
    "_ensure_initialized",
    "_gateway",
    "_jc",
    "_jdf",
    "_jsc",
    "_jsparkSession",
    "_jvm",
    "_requires_typed_event_stream",
}


def sources() -> list[Path]:
    folders = ("assets", "orchestration", "resources", "dagster_adjunct")
    listed = subprocess.check_output(
        ["git", "ls-files", *(f"{folder}/*.py" for folder in folders)], cwd=ROOT, text=True
    )
    return [Path(name) for name in listed.split()]


def is_private(module: str, name: str) -> bool:
    parts = module.split(".")
    if parts[0] not in LIBRARIES:
        return False
    is_internal = any(module == known or module.startswith(f"{known}.") for known in INTERNAL)
    hidden = [part for part in (*parts, name) if part.startswith("_") and part[-2:] != "__"]
    return is_internal or bool(hidden)


def find_private(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found += [each.name for each in node.names if is_private(module, each.name)]
        elif isinstance(node, ast.Import):
            found += [each.name for each in node.names if is_private(each.name, "")]
        elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            found.append(node.attr)
        elif isinstance(node, ast.Constant) and node.value in ATTRIBUTES:  # for getattr
            found.append(node.value)
    return found


@pytest.mark.lengthy
def test_private_interfaces_of_libraries_are_used_in_their_adapters_only() -> None:
    # Parsing all files would take seconds.
    named = re.compile(rf"\b(?:{'|'.join(LIBRARIES | ATTRIBUTES)})\b")
    found = set()
    for path in sources():
        text = (ROOT / path).read_text(encoding="utf-8")
        if named.search(text) and find_private(ast.parse(text)):
            found.add(str(path))
    assert found == ADAPTERS


@pytest.mark.parametrize(
    ("library", "adapter"),
    [
        ("dagster", dagster_internals),
        ("pyiceberg", iceberg_snapshot),
        ("pyiceberg", iceberg_output),
        ("pyspark", jvm),
    ],
)
def test_adapters_are_written_for_the_installed_release(library: str, adapter: ModuleType) -> None:
    release = ".".join(version(library).split(".")[:2])
    assert release in adapter.WRITTEN_FOR
