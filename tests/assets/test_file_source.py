"""Versions that arrive as folders of files: which one is next, what was promised of it, and what
it holds.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.bounded.advance import advance_version_set
from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    FileSource,
    QuerySource,
    bounded_dataset,
    version_set,
)
from dagster_adjunct.assets.declaration.extractors import Projection
from dagster_adjunct.assets.declaration.policies import VersionPartitions
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.sources import file_source
from dagster_adjunct.assets.sources.file_source import FileVersions
from dagster_adjunct.assets.sources.open_source import open_source
from dagster_adjunct.assets.sources.version_source import Awaiting, Delivery
from dagster_adjunct.assets.versions.manifest import (
    Abandoned,
    DatasetManifest,
    Delivered,
    MarkerFacts,
)
from dagster_adjunct.assets.versions.reports import AdvanceReport
from dagster_adjunct.assets.versions.version import VersionRef
from dagster_adjunct.resources.bucketing.hashing import arrow_checksum
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    DatasetError,
    MarkerConflictError,
    SchemaMismatchError,
    SourceChangedError,
)
from dagster_adjunct.resources.files.tree import LocalTree
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World, no_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.servers.s3 import S3Server

PLANES = Schema.of(tailnum="string", seats="int")


class Place:
    """A folder or prefix where a producer delivers files."""

    def __init__(self, url: str, server: S3Server | None = None) -> None:
        self.url, self._server = url, server

    def put(self, name: str, data: str | bytes = "", *, modified: float | None = None) -> None:
        content = data.encode() if isinstance(data, str) else data
        if self._server is None:
            path = Path(self.url) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            if modified is not None:
                os.utime(path, (modified, modified))
        else:
            bucket, _, prefix = self.url.removeprefix("s3://").partition("/")
            self._server.client().put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=content)

    def csv(
        self,
        version: str,
        rows: Mapping[str, int],
        *,
        done: str | None = "",
        name: str = "part-0.csv",
    ) -> None:
        """Deliver a version of one CSV file; `done` is what its completion object says, None
        leaves it out.
        """
        self.put(
            f"{version}/{name}",
            "tailnum,seats\n" + "".join(f"{key},{value}\n" for key, value in rows.items()),
        )
        if done is not None:
            self.put(f"{version}/_SUCCESS", done or ("" if rows else '{"rows": 0}'))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "deliveries"))


@pytest.fixture
def s3_place(versitygw: S3Server, monkeypatch: pytest.MonkeyPatch) -> Place:
    versitygw.set_in(monkeypatch)
    return Place(f"s3://{versitygw.bucket()}/our deliveries", versitygw)


def dataset(place: Place, **more: Any) -> AdjunctDataset:
    source = FileSource(
        place.url,
        more.pop("format", "csv"),
        more.pop("schema", PLANES),
        more.pop("complete", "_SUCCESS"),
    )
    return bounded_dataset("planes", input=source, key="tailnum", partitions=2, **more)


def versions(spec: AdjunctDataset, partition: str | None = None) -> FileVersions:
    assert isinstance(spec.input, FileSource)
    return FileVersions(spec, spec.input, partition)


def after(manifest: DatasetManifest, *deliveries: Delivery) -> DatasetManifest:
    done = tuple(
        Delivered(name=delivery.version, version="v1", markers=dict(delivery.markers))
        for delivery in deliveries
    )
    return manifest.after(delivered=(*manifest.delivered, *done))


def abandoned(manifest: DatasetManifest, name: str) -> DatasetManifest:
    ended = Abandoned(name=name, reason="never comes", by="me", at=dt.datetime.now(dt.UTC))
    return manifest.after(abandoned=(*manifest.abandoned, ended))


def in_order(
    spec: AdjunctDataset, manifest: DatasetManifest | None = None
) -> tuple[list[str], Awaiting]:
    """Return the names of the versions that are delivered one after another, and what is waited
    for then.
    """
    source = versions(spec)
    manifest = manifest or source.first_manifest()
    names = []
    while isinstance(answer := source.next(manifest), Delivery):
        names.append(answer.version)
        manifest = after(manifest, answer)
    return names, answer


def delivered(spec: AdjunctDataset, partition: str | None = None) -> tuple[FileVersions, Delivery]:
    source = versions(spec, partition)
    answer = source.next(source.first_manifest())
    assert isinstance(answer, Delivery)
    return source, answer


# -- which version is next


def test_each_complete_folder_is_a_version_in_the_natural_order_of_their_names(
    place: Place,
) -> None:
    for name in ("v10", "v2", "v1", "_tmp", ".staging"):
        place.csv(name, {"N1": 1})
    names, awaiting = in_order(dataset(place))
    assert names == ["v1", "v2", "v10"]
    assert awaiting.idle
    assert awaiting.version is None


def test_names_may_have_spaces_and_letters_of_any_script(place: Place) -> None:
    for name in ("version 2", "version 10", "größe 3"):
        place.csv(name, {"N1": 1}, name="teil 1 (endgültig).csv")
    assert in_order(dataset(place))[0] == ["größe 3", "version 2", "version 10"]


def test_an_incomplete_folder_blocks_later_ones_until_it_is_abandoned(place: Place) -> None:
    place.csv("v1", {"N1": 1})
    place.csv("v2", {"N1": 2}, done=None)
    place.csv("v3", {"N1": 3})
    names, awaiting = in_order(dataset(place))
    assert names == ["v1"]
    assert (awaiting.version, awaiting.missing, awaiting.idle) == (
        "v2",
        (f"{place.url}/v2/_SUCCESS",),
        False,
    )
    spec = dataset(place)
    assert in_order(spec, abandoned(versions(spec).first_manifest(), "v2"))[0] == ["v1", "v3"]


def test_a_folder_with_hidden_files_only_has_begun_and_waits(place: Place) -> None:
    place.put("v1/_temporary/0/part-0.csv", "half")
    assert in_order(dataset(place))[1].version == "v1"


def test_a_relative_folder_that_is_missing_is_reported_with_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        f"the folder {tmp_path / 'incoming'} is missing"
        in in_order(dataset(Place("incoming")))[1].notes[0]
    )


def test_an_empty_place_waits_for_a_first_folder_and_reports_the_path(
    place: Place, world: World
) -> None:
    spec = dataset(place, versions=VersionPartitions())
    names, awaiting = in_order(spec)
    assert (names, awaiting.missing, awaiting.idle) == ([], (f"{place.url}/*/_SUCCESS",), True)
    sentence = f"the folder {place.url} is missing or empty"
    assert sentence in world.advance(spec).summary()
    asked = versions(spec, "v1")
    waiting = asked.next(asked.first_manifest())
    assert isinstance(waiting, Awaiting)
    assert sentence in waiting.notes[0]

    place.csv("v1", {}, done=None)
    assert "missing or empty" not in world.advance(spec).summary()
    place.put("v1/_SUCCESS", '{"rows": 0}')
    assert world.advance(spec).action == "sealed"
    shutil.rmtree(place.url)
    report = world.advance(spec)
    assert report.action == "up-to-date"
    assert sentence in report.summary()


def test_a_named_marker_completes_a_folder_and_is_no_data(place: Place) -> None:
    place.csv("v1", {"N1": 1}, done=None)
    place.put("v1/done.json", '{"rows": 1}')
    place.csv("v2", {"N1": 1})
    spec = dataset(place, complete="done.json")
    assert in_order(spec)[0] == ["v1"]
    source, delivery = delivered(spec)
    assert source.check(delivery, no_spark) == 1


def test_a_folder_that_comes_too_late_is_refused_by_name_and_can_be_abandoned(place: Place) -> None:
    place.csv("v2", {"N1": 2})
    spec = dataset(place)
    source, second = delivered(spec)
    manifest = after(source.first_manifest(), second)
    place.csv("v1", {"N1": 1}, done=None)
    assert in_order(spec, manifest)[1].idle
    place.put("v1/_SUCCESS")
    with pytest.raises(MarkerConflictError, match=r"'v1'.*comes before") as caught:
        in_order(spec, manifest)
    assert (caught.value.dataset, caught.value.version) == ("planes", "v2")
    assert in_order(spec, abandoned(manifest, "v1"))[0] == []


def test_versions_that_are_partitions_may_come_later(place: Place) -> None:
    place.csv("2026-01-02", {"N1": 2})
    spec = dataset(place, versions=VersionPartitions("day", start="2026-01-01"))
    source, second = delivered(spec)
    manifest = after(source.first_manifest(), second)
    place.csv("2026-01-01", {"N1": 1})
    assert in_order(spec, manifest)[0] == ["2026-01-01"]


def test_a_delivered_folder_completed_again_with_other_contents_is_reported(place: Place) -> None:
    place.csv("v1", {"N1": 1}, done='{"rows": 1}')
    spec = dataset(place)
    source, first = delivered(spec)
    manifest = after(source.first_manifest(), first)
    place.put("v1/_SUCCESS", '{"rows": 1}', modified=2e9)
    assert in_order(spec, manifest)[1].notes == ()
    place.put("v1/_SUCCESS", '{"rows": 2}')
    place.csv("v2", {"N1": 2})
    names, answer = in_order(spec, manifest)
    assert (names, answer.idle) == (["v2"], True)
    (note,) = answer.notes
    assert re.match(
        r"version 'v1' was delivered, and .*/v1/_SUCCESS was written again at .* with other"
        r" contents",
        note,
    )
    assert "under a new version name" in note
    assert in_order(spec, abandoned(manifest, "v1"))[1].notes == ()
    forgotten = manifest.after(delivered=(), known=("v1",))
    assert in_order(spec, forgotten)[1].notes == ()


def copied(place: Place, *names: str) -> None:
    """Replace what lies there by a copy, as a restore does: other inodes, other times."""
    for name in names:
        folder = Path(place.url) / name
        folder.rename(folder.with_name("_aside"))
        shutil.copytree(folder.with_name("_aside"), folder, copy_function=shutil.copyfile)
        shutil.rmtree(folder.with_name("_aside"))
        for file in folder.rglob("*"):
            os.utime(file, (1.9e9, 1.9e9))


def test_copied_folders_pass_and_changed_ones_are_reported_one_by_one(
    place: Place, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 5):
        place.csv(f"v{number}", {})
    spec = dataset(place)

    def advance() -> AdvanceReport:
        return advance_dataset(spec, lake=world.lake, systems={}, spark=no_spark, by="test")

    assert len(advance().sealed) == 1, "all of them are empty"
    assert StoredVersions(world.lake, "planes").require_manifest().taken == {"v1", "v2", "v3", "v4"}
    copied(place, "v1", "v2", "v3", "v4")
    report = advance()
    assert (report.action, report.note) == ("up-to-date", "nothing new was delivered")

    read: list[str] = []
    tag = LocalTree.content_tag
    monkeypatch.setattr(
        LocalTree, "content_tag", lambda tree, file: read.append(file.path) or tag(tree, file)
    )
    advance()
    assert not [path for path in read if path.endswith(".csv")], "a copy is read once"

    copied(place, "v1", "v3")
    for name in ("v2", "v4"):
        place.csv(name, {"N1": 1})
    place.csv("v5", {})
    report = advance()
    assert (report.action, report.summary().count("was delivered, and")) == ("unchanged", 2)
    assert "version 'v2' was delivered, and" in report.summary()
    assert "version 'v4' was delivered, and" in report.summary()
    assert "v5" in StoredVersions(world.lake, "planes").require_manifest().taken


def test_a_folder_that_comes_too_late_is_refused_when_new_ones_are_taken(
    place: Place, world: World
) -> None:
    place.csv("v2", {})
    spec = dataset(place)
    advance_dataset(spec, lake=world.lake, systems={}, spark=no_spark, by="test")
    place.csv("v1", {"N1": 1})
    place.csv("v3", {})
    with pytest.raises(MarkerConflictError, match=r"'v1'.*comes before") as caught:
        advance_dataset(spec, lake=world.lake, systems={}, spark=no_spark, by="test")
    assert (caught.value.dataset, caught.value.version) == ("planes", "v3")
    assert StoredVersions(world.lake, "planes").require_manifest().taken == {"v2", "v3"}


def test_a_copy_of_a_delivered_folder_next_to_it_is_left_out_and_reported(
    place: Place, world: World
) -> None:
    spec = dataset(place)
    for number in (1, 2):
        place.csv(f"v{number}", {}, done='{"rows": 0}' + " " * number)
    advance_dataset(spec, lake=world.lake, systems={}, spark=no_spark, by="test")
    shutil.copytree(Path(place.url) / "v1", Path(place.url) / "v1-backup")
    report = advance_dataset(spec, lake=world.lake, systems={}, spark=no_spark, by="test")
    assert report.action == "up-to-date"
    assert report.warnings == ("the folder 'v1-backup' is left out: it is a copy of version 'v1'",)


def test_a_copy_of_a_folder_written_in_place_is_the_version_that_it_was(
    place: Place, world: World
) -> None:
    place.put("part-0.csv", "tailnum,seats\n", modified=1_790_000_000)
    place.put("_SUCCESS", '{"rows": 0}', modified=1_790_000_001)
    spec = dataset(place)
    assert (
        advance_dataset(spec, lake=world.lake, systems={}, spark=no_spark, by="test").action
        == "sealed"
    )
    for name, at in (("_SUCCESS", 1_790_000_100), ("part-0.csv", 1_790_000_200)):
        os.utime(Path(place.url) / name, (at, at))
    for _ in range(2):
        report = advance_dataset(spec, lake=world.lake, systems={}, spark=no_spark, by="test")
        assert (report.action, report.note) == ("up-to-date", "nothing new was delivered")
    place.put("part-0.csv", "tailnum,seats\nN1,1\n", modified=1_790_000_300)
    report = advance_dataset(spec, lake=world.lake, systems={}, spark=no_spark, by="test")
    assert report.waiting == (f"{place.url}/_SUCCESS",)
    assert "part-0.csv was written after" in report.summary()


def test_a_folder_completed_twice_in_a_second_with_other_contents_is_reported(
    place: Place, world: World
) -> None:
    place.put("part-0.csv", "tailnum,seats\n", modified=1_790_000_000)
    place.put("_SUCCESS", '{"rows": 0}', modified=1_790_000_001)
    spec = dataset(place)
    assert (
        advance_dataset(spec, lake=world.lake, systems={}, spark=no_spark, by="test").action
        == "sealed"
    )
    place.put("part-0.csv", "tailnum,seats\nN1,1\n", modified=1_790_000_001)
    place.put("_SUCCESS", '{"rows": 0}', modified=1_790_000_001)
    report = advance_dataset(spec, lake=world.lake, systems={}, spark=no_spark, by="test")
    assert "was completed twice in the second that names version" in report.summary()
    assert "_SUCCESS again" in report.summary()


# -- a partition that is asked for


def test_a_partition_is_the_folder_of_exactly_its_name(place: Place) -> None:
    for name in ("v1", "v2", "v10"):
        place.csv(name, {"N1": 1}, done=None if name == "v2" else "")
    spec = dataset(place, versions=VersionPartitions())
    assert delivered(spec, "v10")[1].version == "v10"
    for missing in ("v2", "v3"):
        source = versions(spec, missing)
        answer = source.next(source.first_manifest())
        assert isinstance(answer, Awaiting)
        assert (answer.version, answer.missing, answer.idle) == (
            missing,
            (f"{place.url}/{missing}/_SUCCESS",),
            False,
        )


def test_a_partition_is_built_again_when_it_was_completed_again_or_is_not_retained(
    place: Place,
) -> None:
    place.csv("v1", {"N1": 1})
    spec = dataset(place, versions=VersionPartitions())
    source, first = delivered(spec, "v1")
    manifest = source.first_manifest()
    held = Delivered(name="v1", version="v000001-a", markers=dict(first.markers))
    discarded = manifest.after(delivered=(held,))
    assert isinstance(versions(spec, "v1").next(discarded), Delivery)

    ref = VersionRef(
        id="v000001-a",
        number=1,
        name="v1",
        rows=1,
        sealed_at=dt.datetime.now(dt.UTC),
        document="datasets/x",
        state="sealed",
    )
    retained = discarded.after(versions=(ref,))
    again = versions(spec, "v1").next(retained)
    assert isinstance(again, Awaiting)
    assert again.idle
    rejected = discarded.after(versions=(ref.model_copy(update={"state": "rejected"}),))
    assert isinstance(versions(spec, "v1").next(rejected), Delivery)
    place.put("v1/_SUCCESS", modified=2e9)
    assert isinstance(versions(spec, "v1").next(retained), Awaiting), (
        "the same files, completed again"
    )
    place.put("v1/_SUCCESS", "{}")
    assert isinstance(versions(spec, "v1").next(retained), Delivery)


@pytest.mark.parametrize("change", ["replaced", "added", "removed"])
def test_changed_files_are_another_delivery_once_their_folder_is_completed_again(
    place: Place, world: World, change: str
) -> None:
    place.csv("v1", {})
    place.csv("v1", {}, name="part-1.csv")
    daily = dataset(place, versions=VersionPartitions())

    def asked() -> AdvanceReport:
        return advance_dataset(
            daily, lake=world.lake, systems={}, spark=no_spark, by="test", partition="v1"
        )

    assert asked().action == "sealed"
    assert asked().action == "up-to-date"
    if change == "removed":
        (Path(place.url) / "v1/part-1.csv").unlink()
    elif change == "added":
        place.csv("v1", {}, name="part-2.csv", done=None)
    else:
        place.put("v1/part-1.csv", "seats,tailnum\n", modified=1)
    spec = dataset(place)
    manifest = StoredVersions(world.lake, "planes").require_manifest()
    assert in_order(spec, manifest)[1].idle, "nobody has completed it again"
    place.put("v1/_SUCCESS", '{"rows": 0}', modified=2e9)
    assert re.search(
        r"v1/_SUCCESS was written again at 2033.*with other contents",
        in_order(spec, manifest)[1].notes[0],
    )
    assert "rebuild it as a partition" in in_order(daily, manifest)[1].notes[0]
    assert asked().action == "unchanged", "it was built again: of no records, as before"
    assert asked().action == "up-to-date"
    assert in_order(daily, StoredVersions(world.lake, "planes").require_manifest())[1].idle


# -- one folder, written in place


def test_a_folder_written_in_place_is_a_version_each_time_it_is_completed(place: Place) -> None:
    spec = dataset(place)
    place.put("part-0.csv", "tailnum,seats\nN1,1\n", modified=1_790_000_000)
    names, awaiting = in_order(spec)
    assert (names, awaiting.missing, awaiting.idle) == ([], (f"{place.url}/_SUCCESS",), False)
    place.put("_SUCCESS", modified=1_790_000_001)
    source, first = delivered(spec)
    assert first.version.startswith("20260921T141321Z-")
    assert source.check(first, no_spark) == 1
    manifest = after(source.first_manifest(), first)
    assert in_order(spec, manifest)[1].idle

    place.put("part-0.csv", "tailnum,seats\nN1,1\nN2,2\n", modified=1_790_000_005)
    names, awaiting = in_order(spec, manifest)
    assert (names, awaiting.missing, awaiting.idle) == ([], (f"{place.url}/_SUCCESS",), False)
    place.put("_SUCCESS", modified=1_790_000_006)
    names, _ = in_order(spec, manifest)
    assert len(names) == 1
    assert first.version not in names


def test_a_place_that_is_complete_as_a_whole_and_by_folders_is_refused(place: Place) -> None:
    place.csv("v1", {"N1": 1})
    place.put("_SUCCESS")
    with pytest.raises(
        DatasetError, match=r"'planes'.*_SUCCESS itself and so does its folder 'v1'"
    ):
        in_order(dataset(place))


def test_a_folder_written_in_place_has_no_version_by_name(place: Place) -> None:
    place.put("part-0.csv", "tailnum,seats\n", modified=1)
    place.put("_SUCCESS")
    with pytest.raises(DatasetError, match=r"version 'v1' was requested.*written in place"):
        delivered(dataset(place, versions=VersionPartitions()), "v1")


# -- what was promised


@pytest.mark.parametrize("format", ["csv", "jsonl", "parquet"])
def test_records_are_counted_without_spark_and_hidden_files_are_no_records(
    place: Place, format: str
) -> None:
    for part in range(3):
        table = pa.table(
            {"tailnum": [f"N{part}", f"M{part}"], "seats": pa.array([1, None], pa.int32())}
        )
        if format == "parquet":
            buffer = pa.BufferOutputStream()
            pq.write_table(table, buffer)
            content = buffer.getvalue().to_pybytes()
        elif format == "csv":
            content = b"tailnum,seats\n" + b"".join(f"N{part}{i},\n".encode() for i in range(2))
        else:
            content = b"".join(json.dumps(row).encode() + b"\n" for row in table.to_pylist())
        place.put(f"v1/day={part}/part {part}.x", content)
        place.put(f"v1/.part {part}.x.crc", b"\0crc")
        place.put(f"v1/_metadata/{part}", b"whatever")
    place.put("v1/_SUCCESS", '{"rows": 6}')
    source, delivery = delivered(dataset(place, format=format))
    assert source.check(delivery, no_spark) == 6
    assert delivery.markers["v1/_SUCCESS"].rows == 6


def test_another_number_of_records_than_promised_refuses_the_version(place: Place) -> None:
    place.csv("v1", {"N1": 1}, done='{"rows": 2}')
    source, delivery = delivered(dataset(place))
    with pytest.raises(MarkerConflictError) as failure:
        source.check(delivery, no_spark)
    error = failure.value
    assert (error.dataset, error.version, error.expected, error.found) == (
        "planes",
        "v1",
        "2 records",
        "1 records",
    )


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("done", "neither empty nor JSON"),
        ("[" * 100_000, "neither empty nor JSON"),
        ("[1]", "a JSON list"),
        ('{"rows": "2"}', "states rows '2'"),
        ('{"rows": -1}', "states rows -1"),
        ('{"rows": true}', "states rows True"),
        ('{"checksum": 7}', "states checksum 7"),
        ('{"row": 5}', "unknown member 'row'"),
        ('{"rows": null}', "states rows null"),
        ('{"rows": 1, "checksum": null}', "states checksum null"),
        ('{"rows": 1, "Rows": 5}', "unknown member 'Rows'"),
        ('{"rows": 5, "rows": 1}', "states rows twice"),
        ('{"rows": 1.0}', "states rows 1.0"),
        ('{"valid_from": 20260131}', "states valid_from 20260131"),
        ('{"valid_from": "20260131"}', "states valid_from '20260131'"),
        ('{"valid_from": "2026-01-31T10:00:00+01:70"}', "states valid_from"),
    ],
)
def test_a_completion_object_that_says_nothing_sensible_refuses_the_version(
    place: Place, content: str, problem: str
) -> None:
    place.csv("v1", {"N1": 1}, done=content)
    source, delivery = delivered(dataset(place))
    with pytest.raises(MarkerConflictError, match=problem):
        source.check(delivery, no_spark)


def test_a_version_without_files_or_records_needs_no_spark(place: Place) -> None:
    place.put("v1/_SUCCESS", '{"rows": 0, "checksum": "r2-0000000000000000"}')
    place.csv("v2", {})
    spec = dataset(place)
    source, first = delivered(spec)
    assert source.check(first, no_spark) == 0
    second = source.next(after(source.first_manifest(), first))
    assert isinstance(second, Delivery)
    assert source.check(second, no_spark) == 0


@pytest.mark.parametrize("version", ["v1", ""], ids=["a folder", "in place"])
def test_a_complete_folder_without_data_files_is_refused_unless_it_promises_no_rows(
    place: Place, world: World, version: str
) -> None:
    folder = f"{version}/" if version else ""
    place.put(f"{folder}_SUCCESS", modified=1_790_000_000)
    place.put(f"{folder}_temporary/0/part-0.csv", "tailnum,seats\nN1,1\n", modified=1)
    report = world.advance(dataset(place))
    assert report.action == "rejected"
    assert (
        f"the folder {place.url}/{version}".rstrip("/") + " is complete and holds no data file"
        in report.note
    )
    assert "expected csv files" in report.note
    assert StoredVersions(world.lake, "planes").current() is None

    place.put(f"{folder}_SUCCESS", '{"rows": 0}', modified=1_790_000_001)
    report = world.advance(dataset(place))
    assert (report.action, report.rows) == ("sealed", 0)


def _without_records(format: str) -> dict[str, bytes]:
    table = pa.table({"tailnum": pa.array([], pa.string()), "seats": pa.array([], pa.int32())})
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer)
    return {
        "csv": {
            "header.csv": b"tailnum,seats\n",
            "lines.csv": b"tailnum,seats\n\n\n",
            "begun.csv": b"tailnum,seats",
        },
        "jsonl": {"nothing.jsonl": b"", "blank.jsonl": b"\n \n"},
        "parquet": {
            "a.parquet": buffer.getvalue().to_pybytes(),
            "b.parquet": buffer.getvalue().to_pybytes(),
        },
    }[format]


@pytest.mark.parametrize("format", ["csv", "jsonl", "parquet"])
def test_files_without_a_record_are_refused_unless_the_completion_object_says_so(
    place: Place, world: World, format: str
) -> None:
    files = _without_records(format)
    for name, content in files.items():
        place.put(f"v1/{name}", content)
    place.put("v1/_SUCCESS", '{"checksum": "r2-0000000000000000"}', modified=1_790_000_000)
    report = world.advance(dataset(place, format=format))
    assert (report.action, len(report.rejected)) == ("rejected", 1)
    assert "is rejected: EmptyVersionError: " in report.note
    assert f"{len(files)} data file(s) without a record" in report.note
    assert StoredVersions(world.lake, "planes").current() is None
    place.put("v1/_SUCCESS", '{"rows": 0}', modified=1_790_000_001)
    report = world.advance(dataset(place, format=format))
    assert (report.action, report.rows) == ("sealed", 0)


def test_large_files_without_a_record_are_refused_after_they_were_read(
    place: Place, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_source, "_MAX_LOCAL_BYTES", 10)
    world.spark = IN_PROCESS
    place.csv("v1", {}, done="{}")
    report = world.advance(dataset(place))
    assert report.action == "rejected"
    assert "is rejected: EmptyVersionError: " in report.note
    place.csv("v2", {"N1": 1})
    assert world.advance(dataset(place)).action == "sealed"


def test_an_empty_member_of_a_version_set_refuses_the_version_of_all(
    tmp_path: Path, world: World
) -> None:
    full, bare = Place(str(tmp_path / "full")), Place(str(tmp_path / "bare"))
    sources = {
        name: FileSource(place.url, "csv", PLANES)
        for name, place in (("full", full), ("bare", bare))
    }
    members = [
        bounded_dataset(name, input=files, key="tailnum", partitions=2)
        for name, files in sources.items()
    ]
    fleet = version_set("fleet", *members)
    full.csv("v1", {"N1": 1})
    bare.csv("v1", {}, done="{}")
    reports = advance_version_set(fleet, lake=world.lake, systems={}, spark=IN_PROCESS, by="test")
    assert [report.action for report in reports] == ["rejected", "rejected"]
    full.csv("v2", {"N1": 1})
    bare.csv("v2", {}, done='{"rows": 0}')
    reports = advance_version_set(fleet, lake=world.lake, systems={}, spark=IN_PROCESS, by="test")
    assert [(report.action, report.rows) for report in reports] == [("sealed", 1), ("sealed", 0)]


@pytest.mark.parametrize("change", ["added", "replaced", "completed anew"])
def test_files_that_change_before_they_are_read_are_noticed(place: Place, change: str) -> None:
    place.csv("v1", {"N1": 1})
    source, delivery = delivered(dataset(place))
    if change == "added":
        place.put("v1/part-1.csv", "tailnum,seats\n")
    elif change == "replaced":
        place.csv("v1", {"N1": 2}, done=None)
    else:
        place.put("v1/_SUCCESS", "{}")
    with pytest.raises(SourceChangedError, match="version 'v1'") as caught:
        source.check(delivery, no_spark)
    assert caught.value.dataset == "planes"
    assert str(caught.value.file).startswith(f"{place.url}/v1/")


def test_files_that_are_not_as_declared_are_named_with_dataset_version_and_column(
    place: Place,
) -> None:
    place.put("v1/part 0.csv", "tailnum,seats\nN1,2\nN2,two\n")
    place.put("v1/_SUCCESS")
    source, delivery = delivered(dataset(place))
    with pytest.raises(SchemaMismatchError) as caught:
        source.check(delivery, no_spark)
    assert (caught.value.column, caught.value.line) == ("seats", 3)
    assert str(caught.value.file).endswith("/v1/part 0.csv")


@pytest.mark.parametrize(
    ("argument", "column", "options"),
    [
        ("key", "tail", {"key": "tail"}),
        ("columns", "seat", {"key": "tailnum", "columns": ["tailnum", "seat"]}),
        ("sensitive", "Seats", {"key": "tailnum", "sensitive": ["Seats"]}),
        ("extractor", "N", {"key": "tailnum", "extractor": Projection("tailnum string, N int")}),
        ("key", "seats", {"key": "seats", "extractor": Projection("tailnum string")}),
        ("key", "weight", {"key": "weight"}),
    ],
)
@pytest.mark.parametrize("source", ["files", "query"])
def test_columns_that_files_or_a_query_do_not_have_are_refused_when_declared(
    source: str, argument: str, column: str, options: dict[str, Any]
) -> None:
    schema = Schema((*PLANES.fields, Field("weight", "double")))
    given = FileSource("planes", "csv", schema) if source == "files" else QuerySource("x", schema)
    with pytest.raises(ConfigurationError) as caught:
        bounded_dataset("planes", input=given, broadcast=True, **options)
    error = caught.value
    assert (error.dataset, error.argument, error.column) == ("planes", argument, column)
    assert error.next_step


# -- on S3


def test_versions_on_s3_are_found_complete_counted_and_compared(s3_place: Place) -> None:
    s3_place.csv("v 2", {"N1": 1}, done=None)
    s3_place.csv("v 1", {"N1": 1, "Ñ2": 2}, done='{"rows": 2}', name="größe 1+2%.csv")
    spec = dataset(s3_place)
    names, awaiting = in_order(spec)
    assert (names, awaiting.missing) == (["v 1"], (f"{s3_place.url}/v 2/_SUCCESS",))
    source, first = delivered(spec)
    assert source.check(first, no_spark) == 2
    manifest = after(source.first_manifest(), first)
    s3_place.put("v 1/_SUCCESS", '{"rows": 2}')
    assert in_order(spec, manifest)[1].version == "v 2"
    s3_place.put("v 1/_SUCCESS", '{"rows": 3}')
    assert "v 1/_SUCCESS was written again" in in_order(spec, manifest)[1].notes[0]
    s3_place.csv("v 1", {"N1": 5}, done=None, name="größe 1+2%.csv")
    with pytest.raises(SourceChangedError, match=r"größe 1\+2%\.csv"):
        source.check(first, no_spark)


# -- read by Spark


def test_the_last_record_of_the_last_file_counts_and_bad_values_travel_out_of_spark(
    place: Place, sparkling: World
) -> None:
    place.put("v1/part-10.csv", "seats,tailnum\n5,N1\n")
    place.put("v1/part-9.csv", "tailnum,seats\nN1,1\nN2,2\nN2,3\n")
    place.put("v1/_SUCCESS", '{"rows": 4}')
    spec = dataset(place)
    report = sparkling.advance(spec)
    assert report.action == "sealed"
    assert report.counters["read"] == 4
    view = sparkling.view(spec)
    assert view.get_all(["N1", "N2"]) == {
        "N1": {"tailnum": "N1", "seats": 5},
        "N2": {"tailnum": "N2", "seats": 3},
    }

    spark = sparkling.spark()
    place.put("v2/part-0.csv", "tailnum,seats\nN1,1\nN2,two\n")
    place.put("v2/_SUCCESS")
    report = sparkling.advance(spec)
    assert report.action == "rejected"
    assert "'seats'" in report.note
    source = open_source({}, spec, sparkling.lake)
    _read_changed(place, source, spark)


@pytest.mark.parametrize(
    ("format", "places"), [("csv", "line 3"), ("jsonl", "line 2"), ("parquet", "row 2")]
)
def test_records_without_a_key_are_named_by_file_and_line(
    place: Place, sparkling: World, format: str, places: str
) -> None:
    table = pa.table({"tailnum": ["N1", None], "seats": pa.array([1, 2], pa.int32())})
    if format == "parquet":
        buffer = pa.BufferOutputStream()
        pq.write_table(table, buffer)
        place.put("v1/b.x", buffer.getvalue().to_pybytes())
    elif format == "csv":
        place.put("v1/b.x", "tailnum,seats\nN1,1\n,2\n")
    else:
        place.put("v1/b.x", "".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    place.put("v1/_SUCCESS")
    report = sparkling.advance(dataset(place, format=format))
    assert report.action == "rejected"
    assert f"part of the key (tailnum): {place.url}/v1/b.x, {places}." in report.note


def _read_changed(place: Place, source: Any, spark: SparkSession) -> None:
    """What tasks meet is raised as Adjunct's own error where the job was started."""
    from dagster_adjunct.resources.bucketing.files import BucketLayout
    from dagster_adjunct.resources.bucketing.writer import WriteOptions, write_buckets
    from dagster_adjunct.resources.objects.store import InMemoryStore

    place.csv("v3", {"N1": 1})
    manifest = source.first_manifest().after(known=("v1", "v2"))
    delivery = source.next(manifest)
    frame = source.read(delivery, lambda: spark)
    place.csv("v3", {"N1": 1, "N2": 2}, done=None)
    layout = BucketLayout(PLANES, ("tailnum",), 2, ("tailnum",))
    with pytest.raises(SourceChangedError) as caught:
        write_buckets(frame, InMemoryStore(), "data/x", layout, WriteOptions("planes"), order_by=())
    assert str(caught.value.file).endswith("v3/part-0.csv")


def test_spark_seals_files_on_s3_with_any_names_after_comparing_their_checksum(
    s3_place: Place, sparkling: World, versitygw: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dagster_adjunct.resources.bucketing.hashing import records_checksum

    for (
        variable,
        value,
    ) in versitygw.env.items():  # Spark's workers were started before the server's keys were known
        monkeypatch.setitem(sparkling.spark().sparkContext.environment, variable, value)
    rows = [("N 1", 1), ("Ñ2", None), ("N3", 3)]
    checksum = records_checksum(sparkling.spark().createDataFrame(rows, PLANES.ddl()), PLANES)
    table = pa.table(
        {
            "tailnum": [key for key, _ in rows],
            "seats": pa.array([value for _, value in rows], pa.int32()),
        }
    )
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, row_group_size=1)
    content = buffer.getvalue().to_pybytes()
    s3_place.put("v1/a *[b]{c} %20+ü.parquet", content)
    s3_place.put("v1/_SUCCESS", json.dumps({"rows": 3, "checksum": checksum}))
    spec = dataset(s3_place, format="parquet")
    report = sparkling.advance(spec)
    assert (report.action, report.rows) == ("sealed", 3)
    assert sparkling.view(spec).get_all(["N 1", "Ñ2"]) == {
        "N 1": {"tailnum": "N 1", "seats": 1}, "Ñ2": {"tailnum": "Ñ2", "seats": None}
    }  # fmt: skip
    s3_place.put("v2/a.parquet", content)
    s3_place.put("v2/_SUCCESS", json.dumps({"checksum": "r2-" + "f" * 16}))
    report = sparkling.advance(spec)
    assert report.action == "rejected"
    assert f"checksum r2-{'f' * 16}, the files hold checksum {checksum}" in report.note


def test_a_checksum_of_large_text_files_is_compared_without_a_number_of_records(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagster_adjunct.assets.sources.file_source._MAX_LOCAL_BYTES", 0)
    checksum = arrow_checksum(
        pa.table({"tailnum": ["N1"], "seats": pa.array([1], pa.int32())}), PLANES
    )
    place.csv("v1", {"N1": 1}, done=json.dumps({"checksum": checksum}))
    source, delivery = delivered(dataset(place))
    assert source.check(delivery, IN_PROCESS) is None
    other = "r2-" + "f" * 16
    place.csv("v1", {"N1": 1}, done=json.dumps({"checksum": other}))
    source, delivery = delivered(dataset(place))
    with pytest.raises(MarkerConflictError) as failure:
        source.check(delivery, IN_PROCESS)
    assert (failure.value.expected, failure.value.found) == (
        f"checksum {other}",
        f"checksum {checksum}",
    )


def test_marker_facts_of_a_delivery_are_those_of_its_completion_object(place: Place) -> None:
    place.csv("v1", {"N1": 1}, done='{"rows": 1, "checksum": "sha256:abc"}')
    _, delivery = delivered(dataset(place))
    facts = delivery.markers["v1/_SUCCESS"]
    assert (facts.offset, facts.rows) == (0, 1)
    assert isinstance(facts, MarkerFacts)
    assert facts.checksum


# -- tried again


def refused(manifest: DatasetManifest, delivery: Delivery, at: dt.datetime) -> DatasetManifest:
    number = len(manifest.versions) + 1
    ref = VersionRef(
        id=f"v{number:06d}-a",
        number=number,
        name=delivery.version,
        rows=None,
        sealed_at=at,
        document=None,
        state="rejected",
        reason="bad",
    )
    done = Delivered(name=delivery.version, version=ref.id, markers=dict(delivery.markers))
    return manifest.after(versions=(*manifest.versions, ref), delivered=(*manifest.delivered, done))


def test_a_refused_version_is_tried_again_when_it_was_completed_again(place: Place) -> None:
    now = dt.datetime.now(dt.UTC)
    place.csv("v1", {"N1": 1}, done=None)
    place.put("v1/_SUCCESS", modified=(now - dt.timedelta(minutes=5)).timestamp())
    spec = dataset(place)
    source, first = delivered(spec)
    manifest = refused(source.first_manifest(), first, now)
    assert in_order(spec, manifest)[1].idle
    place.put("v1/_SUCCESS", modified=(now + dt.timedelta(minutes=5)).timestamp())
    assert delivered_next(spec, manifest) == "v1"
    place.put("v1/_SUCCESS", "{}", modified=(now - dt.timedelta(minutes=4)).timestamp())
    assert delivered_next(spec, manifest) == "v1"
    assert delivered_next(spec, abandoned(manifest, "v1")) is None

    place.csv("v2", {"N1": 2})
    second = versions(spec).next(abandoned(manifest, "v1"))
    assert isinstance(second, Delivery)
    assert delivered_next(spec, after(manifest, second)) is None


def test_a_store_whose_clock_is_ahead_does_not_have_a_refused_version_tried_for_ever(
    place: Place,
) -> None:
    now = dt.datetime.now(dt.UTC)
    place.csv("v1", {"N1": 1}, done=None)
    place.put("v1/_SUCCESS", modified=(now + dt.timedelta(hours=1)).timestamp())
    source, first = delivered(dataset(place))
    assert isinstance(source.next(refused(source.first_manifest(), first, now)), Awaiting)


@pytest.mark.parametrize("dropped", [False, True])
def test_a_lake_whose_clock_is_ahead_takes_a_refused_folder_that_is_completed_again(
    place: Place, dropped: bool
) -> None:
    ahead = dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)
    place.csv("v1", {"N1": 1})
    source, first = delivered(dataset(place))
    manifest = refused(source.first_manifest(), first, ahead)
    if dropped:
        done = manifest.delivered[0].model_copy(update={"freed": ahead})
        manifest = manifest.after(versions=(), delivered=(done,))
    assert delivered_next(dataset(place), manifest) is None
    place.put("v1/_SUCCESS", modified=(ahead - dt.timedelta(minutes=30)).timestamp())
    assert delivered_next(dataset(place), manifest) == "v1"


def delivered_next(spec: AdjunctDataset, manifest: DatasetManifest) -> str | None:
    answer = versions(spec).next(manifest)
    return answer.version if isinstance(answer, Delivery) else None


@pytest.mark.parametrize(
    ("argument", "value"),
    [("url", ""), ("complete", ""), ("complete", "a/b"), ("complete", "../_SUCCESS")],
)
def test_a_url_and_a_name_without_folders_are_required(argument: str, value: str) -> None:
    given = {"url": "file:///data", "complete": "_SUCCESS"} | {argument: value}
    with pytest.raises(ConfigurationError) as refused:
        FileSource(given["url"], "csv", PLANES, complete=given["complete"])
    assert refused.value.argument == argument


@pytest.mark.parametrize(
    "url",
    ["http://host/in", "gs://bucket/in", "abfss://in", "s3:///in", "s3://", "s3://b/*", "in/*.csv"],
)
def test_what_is_no_folder_is_refused_when_it_is_declared(url: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        FileSource(url, "csv", Schema.of(k="string"))
    assert refused.value.argument == "url"
    assert url in refused.value.problem
