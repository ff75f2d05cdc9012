"""`adjunct new`: the project that it makes, and the names that it refuses. Its page runs the
project.
"""

from __future__ import annotations

import json
import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from dagster_adjunct.errors import ConfigurationError
from dagster_adjunct.orchestration.cli.main import root
from tests.doc_blocks import blocks_of


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_project_has_its_own_name_everywhere(tmp_path: Path) -> None:
    result = CliRunner().invoke(root, ["new", "price-2-lists", "--json"])
    assert result.exit_code == 0, result.exception
    made = json.loads(result.output)
    folder = tmp_path / "price-2-lists"
    assert made["folder"] == str(folder)
    assert {
        ".gitignore",
        "dagster.yaml",
        "price_2_lists/pipeline.py",
        "tests/test_pipeline.py",
    } <= set(made["files"])
    for file in made["files"]:
        text = (folder / file).read_text(encoding="utf-8")
        assert not re.search("new.project", f"{file} {text}", re.IGNORECASE), file
        if file.endswith(".py"):
            compile(text, file, "exec")
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    dagster = {"module_name": "price_2_lists.definitions", "code_location_name": "price_2_lists"}
    assert project["tool"]["dagster"] == dagster
    # Without it, `dg` and components take the folder's name, and warn about the other one.
    assert project["tool"]["dg"]["project"]["code_location_name"] == dagster["code_location_name"]
    assert (
        yaml.safe_load((folder / "dagster.yaml").read_text())["concurrency"]["pools"][
            "default_limit"
        ]
        == 1
    )


def test_its_readme_names_what_there_is(tmp_path: Path) -> None:
    assert CliRunner().invoke(root, ["new", "prices"]).exit_code == 0
    readme = tmp_path / "prices/README.md"
    named = re.findall(r"^\| `([^`]+)`", readme.read_text(), re.MULTILINE)
    assert len(named) == 5
    assert all((tmp_path / "prices" / file).exists() for file in named)
    commands = " ".join(block.text for block in blocks_of(readme))
    modules = re.findall(r"(prices\.\w+)", commands)
    assert {*modules} == {"prices.deliver", "prices.pipeline"}


def test_in_yaml_it_declares_the_same_application(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in (["prices"], ["prices-in-yaml", "--yaml"]):
        assert CliRunner().invoke(root, ["new", *arguments]).exit_code == 0
        monkeypatch.syspath_prepend(tmp_path / arguments[0])
    folder = tmp_path / "prices-in-yaml"
    named = re.findall(r"^\| `([^`]+)`", (folder / "README.md").read_text(), re.MULTILINE)
    assert all((folder / file).exists() for file in named)
    assert not (folder / "prices_in_yaml/defs/orders/deliver.py").exists()
    one, other = (import_module(f"{name}.pipeline").app for name in ("prices", "prices_in_yaml"))
    assert [(operator.id, operator.spec) for operator in one.operators] == [
        (operator.id, operator.spec) for operator in other.operators
    ]
    assert (one.name, other.name) == ("prices", "prices-in-yaml")
    assert one.datasets == other.datasets
    definitions = import_module("prices_in_yaml.definitions").defs()
    assert definitions.resolve_job_def("prices_in_yaml") is not None


@pytest.mark.parametrize(
    "name",
    [
        "Prices",
        "1st",
        "my orders",
        "../orders",
        "class",
        "a--b",
        "",
        "my.orders",
        "-x-",
        "on",
        "output",
    ],
)
def test_a_name_that_is_no_modules_is_refused(name: str, tmp_path: Path) -> None:
    error = CliRunner().invoke(root, ["new", "--", name]).exception
    assert isinstance(error, ConfigurationError)
    assert error.argument == "name"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["json", "dagster", "numpy"])
def test_a_name_that_would_hide_another_module_is_refused(name: str, tmp_path: Path) -> None:
    error = CliRunner().invoke(root, ["new", name]).exception
    assert isinstance(error, ConfigurationError)
    assert f"{name}-streams" in error.next_step
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "prices").mkdir()
    (tmp_path / "prices/notes.txt").write_text("ours")
    error = CliRunner().invoke(root, ["new", "prices"]).exception
    assert isinstance(error, ConfigurationError)
    assert [path.name for path in (tmp_path / "prices").iterdir()] == ["notes.txt"]
