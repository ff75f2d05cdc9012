"""MODULE:APP whose module can't be imported: the file and line, and no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dagster_adjunct.orchestration.application.application import load_application
from dagster_adjunct.resources.errors import ConfigurationError

CASES = {
    "absent_import": (
        "x = 1\nimport no_such_package_here\n",
        r"No module named .*, line 2 .import no_such_package",
    ),
    "wrong_name": (
        "from dagster_adjunct import no_such_name\n",
        r"cannot import name .*wrong_name\.py, line 1",
    ),
    "bad_syntax": ("def f(:\n    pass\n", r"invalid syntax: def f\(: at .*bad_syntax\.py, line 1"),
    "exits": (
        "import sys\n\nsys.exit(0)\n",
        r"SystemExit: 0 at .*exits\.py, line 3 .sys\.exit\(0\)",
    ),
    "raises": (
        "\n\ndef f():\n    return 1 / 0\n\nf()\n",
        r"ZeroDivisionError.*raises\.py, line 4 .return 1 / 0",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_module_that_can_not_be_imported_is_reported_with_file_and_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, says = CASES[name]
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigurationError, match=says):
        load_application(f"{name}:app")


def test_a_mistake_within_an_imported_declaration_keeps_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "declared.py").write_text(
        "from dagster_adjunct import Application\napp = Application('a', owner='x')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ConfigurationError, match=r"Application\('a'\) takes no owner=\. Did you mean owners="
    ):
        load_application("declared:app")


@pytest.mark.parametrize(
    ("name", "found"), [("ap", "is not there"), ("number", "is int, not an Application")]
)
def test_a_name_that_is_no_application_is_reported_with_those_that_are(
    name: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "named.py").write_text(
        "from dagster_adjunct import Application\napp = Application('a')\nnumber = 1\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigurationError, match=f"named:{name} {found}; the module has app"):
        load_application(f"named:{name}")


def test_help_lists_the_commands_and_imports_none() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from"
        " dagster_adjunct.orchestration.cli.main import root; shown = CliRunner().invoke(root,"
        " ['--help']).output; heavy = {'pyarrow', 'numpy', 'dagster', 'pyspark'} & {*sys.modules};"
        " print('Manage streams of the lake.' in shown, sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True []\n"
