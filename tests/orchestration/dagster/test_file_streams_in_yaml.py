"""Streams of files in a component's YAML: the same as in Python, and mistakes by their line."""

from __future__ import annotations

import inspect
from datetime import timedelta
from pathlib import Path

import pytest

from dagster_adjunct import FileRetention, FileRules, file_stream, open_lake, run_application
from dagster_adjunct.errors import ComponentError
from dagster_adjunct.orchestration.code_location.component_forms import FileStreamForm, keys_of
from dagster_adjunct.resources.file_streams import streams as declared
from tests.orchestration.dagster.test_components import component

RIGHT = """
file_streams:
  clicks:
    url: landing
    format: jsonl
    schema:
      user: string
      seen: {at: timestamp}
      day: date
      path: string
    key: [user]
    path_columns: [day]
    path_column: path
    pattern: "*.json"
    marker: _SUCCESS
    min_age: 5m
    listing: after-last
    rules: {FileRules: {changed: ignore, damaged: set-aside}}
    retention: {FileRetention: {max_age: 7d}}
applications:
  copy: {steps: [{input_stream: files.clicks}]}
"""


@pytest.fixture(autouse=True)
def _nothing_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "_declared", {})


def test_yaml_declares_what_python_does() -> None:
    component(RIGHT).applications()
    in_yaml = declared._declared["files"].pop("clicks")
    file_stream(
        "clicks",
        "landing",
        format="jsonl",
        schema="user string, seen struct<at: timestamp>, day date, path string",
        key=["user"],
        path_columns=["day"],
        path_column="path",
        pattern="*.json",
        marker="_SUCCESS",
        min_age=timedelta(minutes=5),
        listing="after-last",
        rules=FileRules(changed="ignore", damaged="set-aside"),
        retention=FileRetention(max_age=timedelta(days=7)),
    )
    assert in_yaml == declared._declared["files"]["clicks"]


def test_yaml_has_all_options_of_python() -> None:
    arguments = [*inspect.signature(file_stream).parameters]
    assert keys_of(FileStreamForm) == arguments[1:]


def test_the_files_are_read_by_the_application(tmp_path: Path) -> None:
    landing = tmp_path / "landing"
    landing.mkdir()
    (landing / "1.json").write_text('{"user": "ann"}\n{"user": "bob"}\n')
    text = f"""
file_streams:
  clicks: {{url: '{landing}', format: jsonl, schema: {{user: string}}}}
applications:
  copy:
    engine: auto
    output_streams: {{lake.copy: {{partitions: 1}}}}
    steps: [{{input_stream: files.clicks}}, {{send_to: lake.copy}}]
"""
    (app,) = component(text).applications().values()
    assert run_application(app, lake=open_lake(tmp_path / "lake")).step.state.records == 2


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        ("changed: ignore", "changed: ignored", "'fail', 'ignore' or 'append'"),
        ("{FileRules: {changed: ignore, damaged: set-aside}}", "{changed: ignore}", "FileRules"),
        ("max_age: 7d", "max_age: week", "max_age"),
        ("min_age: 5m", "min_age: 5 minutes", "expected a duration"),
        ("format: jsonl", "format: json", "expected 'parquet'"),
        ("user: string", "user: strng", "'strng'"),
        ("url: landing", "url: 's3://'", "no bucket"),
        ("pattern:", "patern:", "takes no 'patern'"),
        ("key: [user]", "key: [usr]", "'usr'"),
        ("path_columns: [day]", "path_columns: [dy]", "'dy'"),
    ],
)
def test_a_mistake_is_located_by_its_line(
    right: str, wrong: str, problem: str, tmp_path: Path
) -> None:
    text = RIGHT.replace(right, wrong)
    with pytest.raises(ComponentError) as caught:
        component(text, tmp_path).applications()
    message = str(caught.value)
    assert problem in message
    line = int(message.partition("defs.yaml:")[2].partition(":")[0])
    written = (tmp_path / "defs.yaml").read_text().splitlines()
    # An error about a value that is a mapping points at its key or its first line.
    assert any(wrong in text for text in written[line - 1 : line + 1]), message
