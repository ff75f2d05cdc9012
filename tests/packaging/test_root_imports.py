"""From the root of a checkout no module can be imported a second time, under its folder's name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "module",
    ["resources", "resources.errors", "assets.versions.version", "orchestration.definitions"],
)
def test_no_module_is_found_by_its_folder_alone(module: str) -> None:
    code = (
        "from importlib import import_module\n"
        f"try:\n    import_module({module!r})\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    folder = module.partition(".")[0]
    expected = f"Import dagster_adjunct.{folder} in place of {folder}.\n"
    assert (done.stdout, done.returncode) == (expected, 0), done.stderr
