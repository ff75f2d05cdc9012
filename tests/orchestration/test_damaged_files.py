"""A file that was damaged after it was written, as callers in plain Python meet it: named, by an
error of ours.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from py4j.protocol import Py4JJavaError

from dagster_adjunct import (
    Application,
    advance_dataset,
    advance_version_set,
    bounded_dataset,
    run_application,
    version_set,
)
from dagster_adjunct.errors import ManifestMismatchError
from dagster_adjunct.validators import sql_check
from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark
ENTRIES = [(f"k{number:04}", number) for number in range(500)]


def truncate(folder: Path) -> list[str]:
    """Cut every Parquet file below the folder to a half; return their names."""
    files = list(folder.rglob("*.parquet"))
    for file in files:
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2])
    return [file.name for file in files]


@pytest.fixture
def lake(step_world: StepWorld) -> Path:
    step_world.stream("flights", "k", 1, k="string", v="int")
    step_world.stream("planes", "k", 1, k="string", seats="int")
    return step_world.folder / "lake"


@pytest.mark.parametrize("into", ["stream", "table"])
def test_an_application_names_the_damaged_file_of_a_dataset(
    step_world: StepWorld, lake: Path, into: str
) -> None:
    planes = bounded_dataset("planes", input="lake.planes", key="k", broadcast=True)
    app = Application("app")
    joined = app.input_stream("lake.flights").join(app.table(planes), on="k")
    if into == "stream":
        joined.send_to(app.output_stream("lake.out", partitions=1))
    else:
        joined.map("k", "v", "seats as w").send_to(app.table(step_world.table()))
    step_world.send("planes", *ENTRIES, version="v1")
    step_world.advance(planes)
    step_world.send("flights", ("k0001", 1))
    files = truncate(lake / "datasets" / "planes")
    with pytest.raises(ManifestMismatchError) as raised:
        run_application(
            app, lake=step_world.lake, systems=step_world.systems, spark=step_world.spark, run="r1"
        )
    assert any(file in raised.value.problem for file in files)
    assert "adjunct dataset verify" in raised.value.next_step
    assert isinstance(raised.value.__cause__, Py4JJavaError), "what Spark said is kept"


def test_a_dataset_names_the_damaged_file_of_its_stream(step_world: StepWorld, lake: Path) -> None:
    step_world.send("planes", *ENTRIES, version="v1")
    files = truncate(lake / "streams" / "planes")
    planes = bounded_dataset("planes", input="lake.planes", key="k", broadcast=True)
    with pytest.raises(ManifestMismatchError) as raised:
        advance_dataset(
            planes,
            lake=step_world.lake,
            systems=step_world.systems,
            spark=step_world.spark,
            by="test",
        )
    assert any(file in raised.value.problem for file in files)


@pytest.mark.parametrize(
    "together",
    [
        pytest.param(False, id="alone"),
        pytest.param(True, id="in a version set", marks=pytest.mark.long),
    ],
)
def test_a_rule_names_the_damaged_file_of_the_version_served_and_rejects_nothing(
    step_world: StepWorld, lake: Path, together: bool
) -> None:
    lost = sql_check("none_is_lost", "SELECT c.* FROM current c ANTI JOIN version v USING (k)")
    specs = [
        bounded_dataset("planes", input="lake.planes", key="k", broadcast=True, validators=[lost])
    ]
    if together:
        specs.append(bounded_dataset("flights", input="lake.flights", key="k", broadcast=True))
        specs = list(version_set("both", *specs))

    def advance() -> str:
        given = {
            "lake": step_world.lake,
            "systems": step_world.systems,
            "spark": step_world.spark,
            "by": "test",
        }
        if together:
            return advance_version_set(specs, **given)[0].action
        return advance_dataset(specs[0], **given).action

    def deliver(version: str, *more: tuple[str, int]) -> None:
        step_world.send("planes", *ENTRIES, *more, version=version)
        step_world.send("flights", ("k0001", 1), version=version)

    deliver("v1")
    assert advance() == "sealed"
    whole = {file: file.read_bytes() for file in (lake / "datasets" / "planes").rglob("*.parquet")}
    truncate(lake / "datasets" / "planes")
    deliver("v2", ("k9999", 1))
    with pytest.raises(ManifestMismatchError) as raised:
        advance()
    assert any(file.name in raised.value.problem for file in whole)
    for file, data in whole.items():
        file.write_bytes(data)
    assert advance() == "sealed"
