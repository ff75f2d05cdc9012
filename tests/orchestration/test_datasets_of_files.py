"""Datasets that follow a stream of files."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

from dagster_adjunct import (
    IN_PROCESS,
    Lake,
    UnboundedDataset,
    advance_dataset,
    bounded_dataset,
    file_stream,
    open_dataset,
    open_lake,
    unbounded_dataset,
)
from dagster_adjunct.changes import OperationColumn
from dagster_adjunct.errors import ConfigurationError
from dagster_adjunct.resources.file_streams import streams as declared

COLUMNS = "Op string, id int, name string, AR_H_CHANGE_SEQ string"


@pytest.fixture(autouse=True)
def _nothing_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "_declared", {})


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake")


def write(folder: Path, name: str, at: int, *rows: tuple[str, int, str]) -> None:
    """Write a file as AWS DMS does, with a header (addColumnName)."""
    folder.mkdir(exist_ok=True)
    with (folder / name).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Op", "id", "name", "AR_H_CHANGE_SEQ"])
        writer.writerows([*row, f"{at:020}{n:015}"] for n, row in enumerate(rows))
    os.utime(folder / name, (at, at))


def rows(lake: Lake, dataset: UnboundedDataset) -> dict[int, str]:
    advance_dataset(dataset, lake=lake, spark=IN_PROCESS)
    with open_dataset(lake, dataset.name) as opened:
        return {row["id"]: row["name"] for _, row in opened.items()}


@pytest.mark.parametrize("order_by", [None, "AR_H_CHANGE_SEQ"])
def test_a_dataset_follows_the_files_of_aws_dms(
    lake: Lake, tmp_path: Path, order_by: str | None
) -> None:
    folder = tmp_path / "customers"
    stream = file_stream("customers", str(folder), format="csv", schema=COLUMNS, key=["id"])
    customers = unbounded_dataset(
        "customers",
        input=stream,
        key="id",
        partitions=2,
        changes=OperationColumn("Op"),
        order_by=order_by,
    )
    write(folder, "LOAD00000001.csv", 1, ("I", 1, "Ann"), ("I", 2, "Bob"), ("I", 3, "Eve"))
    assert rows(lake, customers) == {1: "Ann", 2: "Bob", 3: "Eve"}
    write(folder, "20261130-100000000.csv", 2, ("U", 2, "Rob"), ("D", 3, "Eve"), ("U", 2, "Bo"))
    write(folder, "20261130-101000000.csv", 3, ("I", 3, "Eva"), ("D", 1, "Ann"))
    assert rows(lake, customers) == {2: "Bo", 3: "Eva"}
    assert rows(lake, customers) == {2: "Bo", 3: "Eva"}


def test_a_bounded_dataset_of_files_is_refused_with_what_there_is_instead(tmp_path: Path) -> None:
    stream = file_stream("items", str(tmp_path), format="csv", schema="item string")
    with pytest.raises(ConfigurationError, match="FileSource") as caught:
        bounded_dataset("items", input=stream, key="item", partitions=1)
    assert (caught.value.argument, caught.value.dataset) == ("input", "items")
