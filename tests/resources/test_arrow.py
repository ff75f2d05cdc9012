"""Arrow is imported where it is first used, by any thread: one that ends, or several at once."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dagster_adjunct.resources.lazy_modules import LazyModule

_PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
_IN_THREADS = """
import sys, threading
from dagster_adjunct.resources.lazy_modules import pa

def in_thread(act):
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()

assert "pyarrow" not in sys.modules
in_thread(lambda: pa.int8())
in_thread(lambda: pa.array(["x"] * 5000))
print(pa.array([1, 2]).to_pylist())
"""


@pytest.mark.lengthy
def test_arrow_can_be_used_first_in_a_thread_that_ends() -> None:
    command = [sys.executable, "-c", _IN_THREADS]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "[1, 2]\n"), done.stderr


@pytest.mark.lengthy
def test_threads_can_import_a_package_and_a_module_of_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pyarrow and pyarrow.types, which pyarrow imports: Python ends one of the two imports as
    a deadlock.
    """
    package = tmp_path / "slow_package"
    package.mkdir()
    (package / "__init__.py").write_text("from slow_package import part", encoding="utf-8")
    (package / "part.py").write_text("value = 5", encoding="utf-8")
    begun = threading.Event()

    class SlowLoader(SourceFileLoader):
        def create_module(self, spec: ModuleSpec) -> None:
            begun.set()
            time.sleep(1)

    class SlowFinder:
        def find_spec(
            self, name: str, path: object = None, target: object = None
        ) -> ModuleSpec | None:
            loader = SlowLoader(name, str(package / "__init__.py"))
            return spec_from_file_location(name, loader=loader) if name == "slow_package" else None

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [SlowFinder(), *sys.meta_path])
    with ThreadPoolExecutor(2) as threads:
        whole = threads.submit(lambda: LazyModule("slow_package").part.value)
        assert begun.wait(60)
        part = threads.submit(lambda: LazyModule("slow_package.part").value)
        assert (whole.result(60), part.result(60)) == (5, 5)


def test_the_release_of_pyarrow_that_crashes_in_threads_is_not_installed() -> None:
    listed = map(
        Requirement, tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    )
    (pyarrow,) = (one for one in listed if one.name == "pyarrow")
    assert not pyarrow.specifier.contains("25.0.0")
    assert pyarrow.specifier.contains("25.0.1")
