"""`adjunct plan`: in every format, into a file, and against a stored plan or a revision of git."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from dagster_adjunct import Lake, LakeStreams, Schema, open_lake
from dagster_adjunct.errors import PlanningError
from dagster_adjunct.resources.spark.spark_parser import syntax_errors
from tests.orchestration.cli.commands import document, invoke, printed, refused

APP = """
from dagster_adjunct import Application

app = Application("shop")
stream = app.input_stream("lake.orders"){more}
stream.send_to(app.output_stream("lake.out", partitions=2, key="k"))
"""

DATASET_APP = """
from dagster_adjunct import Application, Schema, bounded_dataset, unbounded_dataset
from dagster_adjunct.changes import Projection
from dagster_adjunct.sources import QuerySnapshot, QuerySource
from dagster_adjunct.validators import sql_check

SCHEMA = Schema.of(k="string", n="int")
dataset = {dataset}
app = Application("shop")
stream = app.input_stream("lake.orders").join(app.table(dataset), on="k", select=["n as m"])
stream.send_to(app.output_stream("lake.out", partitions=2, key="k"))
"""


@dataclass
class Repository:
    lake: Lake
    folder: Path

    def write(self, more: str, module: str = "shop_app") -> None:
        (self.folder / f"{module}.py").write_text(APP.format(more=more))
        forget()

    def git(self, *arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *who, *arguments], cwd=self.folder, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(self, message: str) -> str:
        self.git("add", "-A")
        self.git("commit", "-qm", message)
        return self.git("rev-parse", "HEAD")


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith("shop_")]:
        del sys.modules[name]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    lake = open_lake(str(tmp_path / "lake"))
    LakeStreams(lake).create("orders", schema=Schema.of(k="string", n="int"), key=["k"], partitions=2)
    folder = tmp_path / "project" / "pipelines"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made = Repository(lake, folder)
    made.write("")
    subprocess.run(["git", "init", "-q", ".."], cwd=folder, check=True)
    yield made
    forget()


def test_a_plan_is_shown_in_every_format_and_written_to_files(repository: Repository, tmp_path: Path) -> None:
    shown = {
        form: printed(repository, "plan", "shop_app:app", "--format", form) for form in ("text", "json", "mermaid")
    }
    assert shown["text"].startswith("Application shop\n")
    assert json.loads(shown["json"])["format"] == 1
    assert document(repository, "plan", "shop_app:app") == json.loads(shown["json"])
    assert shown["mermaid"].startswith("flowchart TD\n")
    file = tmp_path / "plan.svg"
    printed(repository, "plan", "shop_app:app", "--format", "svg", "--output", str(file))
    assert ElementTree.fromstring(file.read_text()).tag.endswith("svg")
    assert "can't be written" in refused(repository, "plan", "shop_app:app", "--output", str(tmp_path / "no" / "file"))


def test_a_stored_plan_is_compared_in_words(repository: Repository, tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    printed(repository, "plan", "shop_app:app", "--format", "json", "--output", file)
    assert printed(repository, "plan", "shop_app:app", "--against", file) == f"The plan is the one of {file}.\n"
    repository.write('.filter("n > 0")')
    result = invoke(repository, "plan", "shop_app:app", "--against", file)
    assert result.exit_code == 4
    assert result.output.splitlines()[0] == "operator filter-2 is new: n > 0"
    told = json.loads(invoke(repository, "plan", "shop_app:app", "--against", file, "--json").output)
    assert told["differences"] == result.output.splitlines()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99}', "\x00"])
def test_a_file_that_is_no_plan_is_refused(repository: Repository, tmp_path: Path, content: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(content)
    assert "--format json" in refused(repository, "plan", "shop_app:app", "--against", str(file))


def test_a_revision_is_planned_as_it_was_and_the_repository_stays_as_it_is(repository: Repository) -> None:
    (repository.folder / ".gitattributes").write_text("*.py export-ignore\n")
    hook = repository.folder.parent / ".git" / "hooks" / "post-index-change"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text('#!/bin/sh\ntouch "$(git rev-parse --show-toplevel)/hooked"\n')
    first = repository.commit("one")
    repository.write('.filter("n > 0")')
    repository.commit("two")
    repository.write('.filter("n > 1")')
    before = repository.git("status", "--porcelain"), repository.git("worktree", "list")
    hook.chmod(0o755)
    told = invoke(repository, "plan", "shop_app:app", "--against", first)
    assert told.exit_code == 4
    assert told.output.splitlines() == [
        "operator filter-2 is new: n > 1",
        "operator send-to-3 takes the records of filter-2, took those of input-1",
    ]
    assert not (repository.folder.parent / "hooked").exists()
    hook.unlink()
    assert (repository.git("status", "--porcelain"), repository.git("worktree", "list")) == before
    repository.write('.filter("n > 0")')
    assert printed(repository, "plan", "shop_app:app", "--against", "HEAD") == "The plan is the one of HEAD.\n"


def test_what_can_not_be_planned_of_a_revision_is_refused_by_its_name(repository: Repository, tmp_path: Path) -> None:
    repository.write("", module="shop_other")
    repository.commit("one")
    for name in ("no-such-branch", "--output=/tmp/x", "-n", "HEAD:pipelines", "HEAD^{tree}"):
        assert "git knows no such revision" in refused(repository, "plan", "shop_app:app", f"--against={name}"), name
    repository.write('.filter("n > 1")', module="shop_third")
    assert "'shop_third' is not found" in refused(repository, "plan", "shop_third:app", "--against", "HEAD")
    repository.write('.partition_by("nothing")', module="shop_other")
    repository.commit("two")
    repository.write("", module="shop_other")
    told = refused(repository, "plan", "shop_other:app", "--against", "HEAD")
    assert "shop_other:app of revision HEAD" in told
    assert "'nothing'" in told
    (repository.folder / "shop_other.py").write_text("import os\nos._exit(7)\n")
    repository.commit("three")
    repository.write("", module="shop_other")
    assert "its process ended with 7" in refused(repository, "plan", "shop_other:app", "--against", "HEAD")


def test_a_module_that_is_not_of_the_repository_is_not_compared_with_itself(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.commit("one")
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "shop_installed.py").write_text(APP.format(more=""))
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.setenv("PYTHONPATH", str(installed))
    told = refused(repository, "plan", "shop_installed:app", "--against", "HEAD")
    assert f"comes from {installed / 'shop_installed.py'}, not from the revision" in told


@pytest.mark.long
def test_modules_beside_the_application_are_those_of_the_revision(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = repository.folder.parent / "library"
    library.mkdir()
    monkeypatch.syspath_prepend(str(library))
    monkeypatch.setenv("PYTHONPATH", str(library))
    (library / "shop_condition.py").write_text('CONDITION = "n > 0"\n')
    repository.write(".filter(__import__('shop_condition').CONDITION)")
    repository.commit("one")
    (library / "shop_condition.py").write_text('CONDITION = "n > 1"\n')
    told = invoke(repository, "plan", "shop_app:app", "--against", "HEAD").output
    assert told == "operator filter-2 does n > 1, did n > 0\n"


def test_outside_of_a_repository_a_name_that_is_no_file_is_refused(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(repository.folder))
    assert "git knows no such revision" in refused(repository, "plan", "shop_app:app", "--against", "HEAD")


@pytest.mark.spark
@pytest.mark.parametrize(
    "sql",
    [
        '.filter("n >")',
        '.filter("n > > 1")',
        '.filter("n in ()")',
        '.filter("n is nul")',
        '.map("k", "case when n then 1 as x")',
        '.map("k", "n as 1")',
        '.map("k", "cast(n as inttt) as m")',
        '.map("k", "date \'2026-13-01\' as day")',
        '.map("k", "transform(array(n), x ->) as m")',
    ],
)
def test_sql_that_spark_can_not_read_fails_the_plan(repository: Repository, sql: str) -> None:
    repository.write(sql)
    error = invoke(repository, "plan", "shop_app:app").exception
    assert isinstance(error, PlanningError)
    assert error.operator in ("map-2", "filter-2")
    assert error.declared_at == "shop_app.py:5"


@pytest.mark.spark
@pytest.mark.parametrize(
    "dataset",
    [
        'bounded_dataset("d", input=QuerySource("selec * from t", SCHEMA), key="k", partitions=2)',
        'bounded_dataset("d", input=QuerySource("select {version} from t where n >", SCHEMA), key="k", partitions=2)',
        'bounded_dataset("d", input="lake.orders", key="k", partitions=2, validators=[sql_check("known", "n is nul")])',
        'bounded_dataset("d", input="lake.orders", key="k", partitions=2, '
        'extractor=Projection("k STRING, n INT", where="n in ()"))',
        'unbounded_dataset("d", input="lake.orders", key="k", partitions=2, '
        'initial=QuerySnapshot(sql="select k from t where n = = 1", position={"0": "0", "1": "0"}))',
    ],
)
def test_sql_of_a_dataset_that_spark_can_not_read_fails_the_plan(repository: Repository, dataset: str) -> None:
    (repository.folder / "shop_app.py").write_text(DATASET_APP.format(dataset=dataset))
    forget()
    error = invoke(repository, "plan", "shop_app:app").exception
    assert isinstance(error, PlanningError), error
    assert error.dataset == "d"


@pytest.mark.spark
def test_mistakes_of_sql_are_the_same_beside_a_session_and_after_it(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [("n > 1", False), ("n >", False), ("select n from t", True), ("selec n from t", True)]
    beside = syntax_errors(asked)
    assert [bool(mistake) for mistake in beside] == [False, True, False, True]
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)  # what PySpark put over py4j stays
    assert syntax_errors(asked) == beside


def test_sql_that_only_spark_reads_passes_the_plan(repository: Repository) -> None:
    repository.write(""".filter("n >>> 1 = 0 or k like all ('a', 'b') -- n >").map("k", "n >>> 1 as m")""")
    assert "Application shop" in printed(repository, "plan", "shop_app:app")


def test_a_plan_needs_no_java(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    repository.write('.map("k", "n + 1 as m")')
    assert "Application shop" in printed(repository, "plan", "shop_app:app")
