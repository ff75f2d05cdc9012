"""`adjunct new NAME --from FILES`: a project over a stream of the files' records."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dagster_adjunct import Schema, open_lake, run_application
from dagster_adjunct.assets.exchange.file_appends import append_files
from dagster_adjunct.errors import ConfigurationError
from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.orchestration.cli.new import guess_key, infer_beginning
from dagster_adjunct.resources.schemas.inference import infer_schema
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.testing import TestApplication

CSV = "sensor,value,reading_id\na,1.5,r1\nb,2,r2\na,3,r3\n"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made(*arguments: str) -> Any:
    result = CliRunner().invoke(root, ["new", *arguments, "--json"])
    assert result.exit_code == 0, result.exception
    return json.loads(result.output)


def test_the_project_has_the_columns_and_a_key_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "My readings.csv").write_text(CSV)
    project = made("measured", "--from", "My readings.csv")
    assert (project["stream"], project["key"]) == ("my-readings", "reading_id")
    folder = tmp_path / "measured"
    for file in project["files"]:
        text = (folder / file).read_text(encoding="utf-8")
        assert not re.search("new.project|sample-records|record_id", f"{file} {text}"), file
    assert "3 records" in (folder / "measured/columns.py").read_text()
    monkeypatch.syspath_prepend(folder)
    columns = import_module("measured.columns")
    assert Schema.of(sensor="string", value="double", reading_id="string") == columns.SCHEMA
    assert columns.KEY == ["reading_id"]
    deliver = import_module("measured.deliver")
    deliver.create()
    lake = open_lake()
    appended = append_files(lake, "my-readings", [tmp_path / "My readings.csv"])
    assert [each.appended for each in appended] == [3]
    assert LakeStreams(lake).info("my-readings").partitions == 2
    assert f"append my-readings '{tmp_path}/My readings.csv'" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("files", "stream"),
    [
        (["orders-1", "orders-2"], "orders"),
        (["orders", "orders_old"], "orders"),
        (["orders", "ordinals"], "orders"),
        (["2026-01", "2026-02"], "2026-01"),
        (["week-7"], "week-7"),
    ],
)
def test_the_stream_has_the_name_that_the_files_have_in_common(
    tmp_path: Path, files: list[str], stream: str
) -> None:
    for file in files:
        (tmp_path / f"{file}.csv").write_text(CSV)
    assert infer_beginning([f"{file}.csv" for file in files]).stream == stream


VARYING = "".join(f'{{"id": {n}, "sizes": {{"part-{n}": {n}}}}}\n' for n in range(9))


@pytest.mark.parametrize(
    ("name", "file", "text"),
    [
        ("keyed", "records.csv", CSV),
        ("keyless", "records.csv", "a\n1\n1\n"),
        ("keyed_inside", "records.jsonl", '{"x": {"n": "a", "id": 1}}\n'),
        ("mapped", "records.jsonl", VARYING),
    ],
)
def test_its_application_keeps_the_record_of_its_test(
    name: str, file: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / file).write_text(text)
    made(name, "--from", file)
    folder = tmp_path / name
    monkeypatch.syspath_prepend(folder)
    own: dict[str, Any] = {}
    exec((folder / "tests/test_pipeline.py").read_text(), own)
    own["test_it_can_be_planned"]()
    with TestApplication(own["app"], own["STREAMS"]) as test:
        test.input("lake.records", [own["RECORD"]])
        kept = test.run().output("lake.records-kept")
    assert len(kept) == 1


def test_a_nested_sample_is_declared_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "orders.jsonl").write_text('{"id": 1, "lines": [{"sku": "a"}]}\n')
    assert made("orders_in_spring", "--from", "orders.jsonl")["key"] == "id"
    monkeypatch.syspath_prepend(tmp_path / "orders_in_spring")
    declared = import_module("orders_in_spring.columns").SCHEMA
    assert declared == Schema.of(id="bigint", lines=[{"sku": "string"}])


def test_an_object_whose_names_vary_is_declared_as_a_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parts.jsonl").write_text(VARYING)
    made("parts_of_cars", "--from", "parts.jsonl")
    text = (tmp_path / "parts_of_cars/parts_of_cars/columns.py").read_text()
    assert "sizes: 9 different names in 9 objects" in text
    monkeypatch.syspath_prepend(tmp_path / "parts_of_cars")
    declared = import_module("parts_of_cars.columns").SCHEMA
    assert declared == Schema.of(id="bigint", sizes="map<string,bigint>")


@pytest.mark.parametrize(
    ("records", "key"),
    [
        ([{"a": 1, "orderId": "x"}, {"a": 2, "orderId": "y"}], "orderId"),
        ([{"a": 1, "paid": 1}, {"a": 2, "paid": 1}], "a"),
        ([{"id": 1}, {"id": 1}], None),
        ([{"id": 1}, {"id": None}], None),
        ([{"x": {"id": 1}}, {"x": {"id": 2}}], "x.id"),
        ([{"x": {"id": 1}}, {"x": None}], None),
        ([{"x": {"id": 1}, "y": [{"id": 1}]}, {"x": {"id": 1}, "y": [{"id": 2}]}], None),
        ([{"x": {"id": 1}, "code": "a"}, {"x": {"id": 2}, "code": "b"}], "code"),
    ],
)
def test_the_key_is_unique_and_simple_with_a_name_like_id(
    records: list[dict[str, Any]], key: str | None
) -> None:
    assert guess_key(infer_schema(records)) == key


def test_from_files_and_yaml_exclude_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(CSV)
    error = CliRunner().invoke(root, ["new", "both", "--yaml", "--from", "a.csv"]).exception
    assert isinstance(error, ConfigurationError)
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_a_folder_is_a_stream_of_the_files_that_land_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Landed readings").mkdir()
    (tmp_path / "Landed readings/1.csv").write_text(CSV)
    project = made("landed", "--from", "Landed readings")
    assert (project["stream"], project["key"]) == ("landed-readings", "reading_id")
    folder = tmp_path / "landed"
    for file in project["files"]:
        text = (folder / file).read_text(encoding="utf-8")
        assert not re.search("new.project|sample-|record_id|deliver", f"{file} {text}"), file
    monkeypatch.syspath_prepend(folder)
    app = import_module("landed.pipeline").app
    lake = open_lake(tmp_path / "lake")
    assert run_application(app, lake=lake).step.state.records == 3
    (tmp_path / "Landed readings/2.csv").write_text(CSV.replace("r1", "r4"))
    assert run_application(app, lake=lake).step.state.records == 6
    own: dict[str, Any] = {}
    exec((folder / "tests/test_pipeline.py").read_text(), own)
    own["test_it_can_be_planned"]()
    own["test_records_are_kept"]()
