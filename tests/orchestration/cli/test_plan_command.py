"""`adjunct plan`: in every format, into a file, and against a stored plan."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from pyspark import SparkContext
from pyspark.sql import SparkSession

from dagster_adjunct import Lake, LakeStreams, Schema, open_lake
from dagster_adjunct.errors import ConfigurationError, PlanningError, ZoneRulesError
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog, RenamedNames
from dagster_adjunct.orchestration.operators.windows import zone_rules
from dagster_adjunct.resources.spark.in_process import has_running_session
from dagster_adjunct.resources.spark.session import syntax_errors
from dagster_adjunct.resources.streams.system import SystemStreamPartition
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
class Project:
    lake: Lake
    folder: Path

    def write(self, more: str, module: str = "shop_app") -> None:
        (self.folder / f"{module}.py").write_text(APP.format(more=more))
        forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith("shop_")]:
        del sys.modules[name]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    lake = open_lake(str(tmp_path / "lake"))
    LakeStreams(lake).create(
        "orders", schema=Schema.of(k="string", n="int"), key=["k"], partitions=2
    )
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made = Project(lake, folder)
    made.write("")
    yield made
    forget()


def test_a_plan_is_displayed_in_every_format_and_written_to_files(
    project: Project, tmp_path: Path
) -> None:
    displayed = {
        form: printed(project, "plan", "shop_app:app", "--format", form)
        for form in ("text", "json", "mermaid")
    }
    assert displayed["text"].startswith("Application shop\n")
    assert json.loads(displayed["json"])["format"] == 1
    assert document(project, "plan", "shop_app:app") == json.loads(displayed["json"])
    assert displayed["mermaid"].startswith("flowchart TD\n")
    file = tmp_path / "plan.mmd"
    written = printed(project, "plan", "shop_app:app", "--format", "mermaid", "--output", str(file))
    assert written == f"The plan of shop is in {file}.\n"
    assert file.read_text() == displayed["mermaid"]
    assert document(project, "plan", "shop_app:app", "--output", str(file)) == {"output": str(file)}
    assert file.read_text() == displayed["json"]
    assert "can't be written" in refused(
        project, "plan", "shop_app:app", "--output", str(tmp_path / "no" / "file")
    )


def test_output_tables_are_compared_with_what_is_stored(project: Project, tmp_path: Path) -> None:
    path = tmp_path / "paid"
    more = f'.send_to(app.output_table(DeltaLakeTable("{path}", partition_by=["k"])))'
    (project.folder / "shop_app.py").write_text(
        "from dagster_adjunct.exchange import DeltaLakeTable\n" + APP.format(more=more)
    )
    file = tmp_path / "plan.json"
    printed(project, "plan", "shop_app:app", "--format", "json", "--output", str(file))
    (sent,) = json.loads(file.read_text())["output_tables"]
    assert (sent["changes"], sent["unchecked"]) == (["the table is created, partitioned by k"], "")
    assert "the table is created, partitioned by k" in printed(project, "plan", "shop_app:app")
    write_deltalake(path, pa.table({"k": ["a"], "m": [1]}), partition_by=["k"])
    (stored,) = document(project, "plan", "shop_app:app")["output_tables"]
    assert stored["changes"] == ["n (int) is added", "__epoch (int) is added"]
    compared = printed(project, "plan", "shop_app:app", "--against", str(file))
    assert compared == f"The plan equals the one in {file}.\n"  # what is stored is no difference
    shutil.rmtree(path)
    write_deltalake(path, pa.table({"k": ["a"], "n": ["b"]}), partition_by=["k"])
    result = invoke(project, "plan", "shop_app:app")
    assert isinstance(result.exception, PlanningError)
    assert result.exception.table == f"delta:{path}"


def test_a_stored_plan_is_compared_in_words(project: Project, tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    printed(project, "plan", "shop_app:app", "--format", "json", "--output", file)
    assert (
        printed(project, "plan", "shop_app:app", "--against", file)
        == f"The plan equals the one in {file}.\n"
    )
    project.write('.filter("n > 0")')
    result = invoke(project, "plan", "shop_app:app", "--against", file)
    assert result.exit_code == 4
    assert result.output.splitlines()[0] == "operator filter-2 is new: n > 0"
    reported = json.loads(
        invoke(project, "plan", "shop_app:app", "--against", file, "--json").output
    )
    assert reported["differences"] == result.output.splitlines()


def test_a_comparison_notes_who_has_written_the_outputs_as_no_difference(
    project: Project, tmp_path: Path
) -> None:
    """As where the application was renamed since."""
    plain, noted = str(tmp_path / "plain.json"), str(tmp_path / "noted.json")
    printed(project, "plan", "shop_app:app", "--format", "json", "--output", plain)
    log = BatchLog(project.lake, "before")
    logged = log.read()
    read = {SystemStreamPartition("lake", "orders", 0): "5"}
    wrote = logged.state.model_copy(
        update={"batch": 3, "totals": {"lake.out": {"rows": 5}}, "checkpoint": read}
    )
    log.commit(logged, wrote, by="a test")
    (note,) = document(project, "plan", "shop_app:app")["notes"]
    assert "'before' has written lake.out" in note
    printed(project, "plan", "shop_app:app", "--format", "json", "--output", noted)
    for against in (plain, noted):
        reported = printed(project, "plan", "shop_app:app", "--against", against)
        assert reported == f"The plan equals the one in {against}.\nNote: {note}\n"
        assert document(project, "plan", "shop_app:app", "--against", against)["notes"] == [note]
    project.write('.filter("n > 0")')
    result = invoke(project, "plan", "shop_app:app", "--against", noted)
    assert result.exit_code == 4
    assert result.output.splitlines()[-1] == f"Note: {note}"
    assert "note is" not in result.output


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": 99}', "\x00", pytest.param("[" * 100_000, id="deep")]
)
def test_a_file_that_is_no_plan_is_refused(project: Project, tmp_path: Path, content: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(content)
    assert "--format json" in refused(project, "plan", "shop_app:app", "--against", str(file))


@pytest.mark.parametrize("name", ["HEAD", "."])
def test_a_plan_to_compare_with_that_is_no_file_is_refused(project: Project, name: str) -> None:
    error = invoke(project, "plan", "shop_app:app", "--against", name).exception
    assert isinstance(error, ConfigurationError)
    assert error.setting == "--against"
    assert "can't be read" in error.problem


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
def test_sql_that_spark_can_not_read_fails_the_plan(project: Project, sql: str) -> None:
    project.write(sql)
    error = invoke(project, "plan", "shop_app:app").exception
    assert isinstance(error, PlanningError)
    assert error.operator in ("map-2", "filter-2")
    assert error.declared_at == "shop_app.py:5"


@pytest.mark.spark
@pytest.mark.parametrize(
    "dataset",
    [
        'bounded_dataset("d", input=QuerySource("selec * from t", SCHEMA), key="k", partitions=2)',
        (
            'bounded_dataset("d", input=QuerySource("select {version} from t where n >", SCHEMA),'
            ' key="k", partitions=2)'
        ),
        (
            'bounded_dataset("d", input="lake.orders", key="k", partitions=2,'
            ' validators=[sql_check("known", "n is nul")])'
        ),
        (
            'bounded_dataset("d", input="lake.orders", key="k", partitions=2, '
            'extractor=Projection("k STRING, n INT", where="n in ()"))'
        ),
        (
            'unbounded_dataset("d", input="lake.orders", key="k", partitions=2,'
            ' initial=QuerySnapshot(sql="select k from t where n = = 1", position={"0": "0", "1":'
            ' "0"}))'
        ),
    ],
)
def test_sql_of_a_dataset_that_spark_can_not_read_fails_the_plan(
    project: Project, dataset: str
) -> None:
    (project.folder / "shop_app.py").write_text(DATASET_APP.format(dataset=dataset))
    forget()
    error = invoke(project, "plan", "shop_app:app").exception
    assert isinstance(error, PlanningError), error
    assert error.dataset == "d"


@pytest.mark.spark
def test_mistakes_of_sql_are_the_same_next_to_a_session_and_after_it(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [("n > 1", False), ("n >", False), ("select n from t", True), ("selec n from t", True)]
    nearby = syntax_errors(asked)
    assert [bool(mistake) for mistake in nearby] == [False, True, False, True]
    # what PySpark put over py4j stays
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    assert syntax_errors(asked) == nearby


@pytest.mark.lengthy
def test_a_client_of_spark_connect_parses_sql_in_a_jvm_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect = ModuleType("pyspark.sql.connect.session")
    connect.SparkSession = SimpleNamespace(getActiveSession=object)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, connect.__name__, connect)
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    monkeypatch.setattr(SparkContext, "_jvm", None)
    assert has_running_session()
    assert [bool(each) for each in syntax_errors([("n > 1", False), ("n >", False)])] == [
        False,
        True,
    ]


@pytest.mark.lengthy
def test_sql_that_only_spark_reads_passes_the_plan(project: Project) -> None:
    project.write(
        """.filter("n >>> 1 = 0 or k like all ('a', 'b') -- n >").map("k", "n >>> 1 as m")"""
    )
    assert "Application shop" in printed(project, "plan", "shop_app:app")


def test_a_plan_needs_no_java(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    project.write('.map("k", "n + 1 as m")')
    assert "Application shop" in printed(project, "plan", "shop_app:app")


WINDOWS = (
    '.window(Tumbling(days=1, zone="America/New_York"), by="k", name="days", aggregates={"n":'
    " Count()})"
)


def test_a_plan_is_refused_where_java_has_other_rules_of_a_zone(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    LakeStreams(project.lake).create(
        "sales", schema=Schema.of(k="string", at="timestamp"), key=["k"], partitions=2
    )
    text = APP.format(more=WINDOWS).replace('"lake.orders"', '"lake.sales", event_time="at"')
    (project.folder / "shop_days.py").write_text(
        f"from dagster_adjunct.windows import Count, Tumbling\n{text}"
    )
    assert "America/New_York" in printed(project, "plan", "shop_days:app")
    changes = zone_rules.clock_changes
    monkeypatch.setattr(zone_rules, "clock_changes", lambda zone: changes("America/Chicago"))
    error = invoke(project, "plan", "shop_days:app").exception
    assert isinstance(error, ZoneRulesError)
    assert error.zone == "America/New_York"


def test_the_marks_of_a_renamed_application_are_those_of_its_former_name(
    project: Project, tmp_path: Path
) -> None:
    table = """
from dagster_adjunct.tables import RemoteTable, SqliteTable
columns = {"k": "string", "n": "bigint"}
store = SqliteTable("t.sqlite", "t", "k", columns=columns, create=True)
totals = app.table(RemoteTable("t", key="k", write_function=store, idempotent=True))
stream.update(totals, add={"n": "n"}, if_missing=[])
"""
    module = project.folder / "shop_app.py"
    module.write_text(APP.format(more="") + table)
    forget()
    file = str(tmp_path / "plan.json")
    printed(project, "plan", "shop_app:app", "--format", "json", "--output", file)
    module.write_text(module.read_text().replace('Application("shop")', 'Application("stand")'))
    forget()

    def marks_differ() -> bool:
        result = invoke(project, "plan", "shop_app:app", "--against", file, "--json")
        return any("marks" in line for line in json.loads(result.output)["differences"])

    assert marks_differ(), "an application of another name"
    log = BatchLog(project.lake, "stand")
    logged = log.read()
    log.commit(
        logged,
        logged.state.model_copy(update={"names": RenamedNames(writes_as="shop")}),
        by="a test",
    )
    assert not marks_differ()
