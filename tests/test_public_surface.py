"""What users import is known: each name has one place, and a change to it shows in
`public_surface.txt`.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

import dagster_adjunct
from dagster_adjunct.resources import errors
from tests.public_names import names_in, public_modules

SURFACE = Path(__file__).with_name("public_surface.txt")
HEAVY = {"boto3", "dagster", "pandas", "pyarrow", "pydantic", "pyspark"}
# What user code imports that Spark's tasks load, too, on machines that may have no Dagster.
FOR_TASKS = (
    "changes",
    "errors",
    "sources",
    "startpoints",
    "streams",
    "kafka",
    "key_value",
    "tables",
    "validators",
    "reading",
    "exchange",
)


def test_the_public_names_are_those_that_are_written_down() -> None:
    lines = []
    for module, contents in public_modules().items():
        lines += [module, *(f"    {name}" for name in sorted(names_in(contents)))]
    assert "\n".join(lines) + "\n" == SURFACE.read_text(encoding="utf-8"), (
        f"if this is meant, change {SURFACE.name}"
    )


def test_a_name_is_in_exactly_one_module() -> None:
    names = Counter(name for module in public_modules().values() for name in names_in(module))
    assert [name for name, places in names.items() if places > 1] == []
    assert set(names) & set(dagster_adjunct._MODULES) == set()


def test_a_name_is_imported_from_where_it_is_and_from_nowhere_else() -> None:
    for module, contents in public_modules().items():
        for name in names_in(contents):
            assert getattr(import_module(module), name) is getattr(contents, name)
    with pytest.raises(ImportError):
        from dagster_adjunct import expire_versions  # noqa: F401
    assert (
        dagster_adjunct.maintenance.expire_versions
        is import_module("dagster_adjunct.maintenance").expire_versions
    )


def test_every_error_is_public() -> None:
    known = vars(errors)
    ours = {
        name
        for name, value in known.items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert ours == set(names_in(dagster_adjunct.errors))


def loaded_by(*statements: str) -> list[set[str]]:
    """Return the top-level packages that a new Python process has loaded after each statement."""
    look = "print(*{name.partition('.')[0] for name in sys.modules})"
    code = "; ".join(f"{statement}; {look}" for statement in ("import sys", *statements))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()[1:]]


def test_importing_the_package_loads_next_to_nothing() -> None:
    (loaded,) = loaded_by("import dagster_adjunct, dagster_adjunct.errors")
    assert loaded & HEAVY == set()


@pytest.mark.lengthy
def test_nothing_is_imported_before_it_is_used() -> None:
    """In one process: what one import loads only adds to what the one before has loaded."""
    with_dagster = {"LakeResource", "SparkResource", "build_definitions"}
    names = sorted({*dagster_adjunct.__all__} - with_dagster)
    for_tasks, without_dagster, definitions, everything = loaded_by(
        f"from dagster_adjunct import {', '.join(FOR_TASKS)}",
        f"from dagster_adjunct import {', '.join(names)}",
        "from dagster_adjunct import build_definitions",
        f"import {', '.join(public_modules())}",
    )
    assert for_tasks & {"dagster", "dagster_pyspark"} == set()
    assert without_dagster & {"dagster", "dagster_pyspark"} == set(), (
        "an application is declared and run without Dagster"
    )
    assert "dagster" in definitions
    assert everything & {"numpy", "pyarrow"} == set()
