"""Versions of bounded datasets that say since when they are valid: what tells it, what is
refused, what is read.
"""

from __future__ import annotations

import datetime as dt
import json
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, FileSource, bounded_dataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy, VersionPartitions
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.valid_time import VersionsOverTime
from dagster_adjunct.assets.rebucketing import repartition_versions
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.validation.validators import min_rows
from dagster_adjunct.assets.versions.leases import list_leases
from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.orchestration.maintenance.delete import delete_dataset
from dagster_adjunct.resources.errors import ConfigurationError, DatasetError, MarkerConflictError
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from tests.faulty_store import Fault, FaultyStore
from tests.orchestration.cli import commands

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PLANES = Schema.of(tailnum="string", seats="int")
Delivered = dict[str, int]


def day(number: int) -> dt.datetime:
    return dt.datetime(2026, 1, number, tzinfo=dt.UTC)


class Place:
    """A lake with a stream and a folder in which versions of one dataset arrive, made without
    Spark.
    """

    def __init__(self, root: Path) -> None:
        self.lake: Lake = open_lake(root / "lake")
        self.streams, self.folder = LakeStreams(self.lake), root / "incoming"
        self.streams.create("planes", schema=PLANES, key=["tailnum"], partitions=2)
        self.sequence = 0

    def dataset(
        self, valid_from: str | None, *, files: bool = False, **options: Any
    ) -> AdjunctDataset:
        source = FileSource(str(self.folder), "csv", PLANES) if files else "lake.planes"
        return bounded_dataset(
            "planes", input=source, key="tailnum", partitions=2, valid_from=valid_from, **options
        )

    def send(self, version: str, seats: Delivered, *, at: dt.datetime | None = None) -> None:
        self.sequence += 1
        rows = pa.table({"tailnum": list(seats), "seats": pa.array(seats.values(), pa.int32())})
        self.streams.append(
            "planes",
            rows,
            producer="p",
            sequence=self.sequence,
            end_of_dataset=version,
            valid_from=at,
        )

    def write(self, version: str, seats: Delivered, completed: str = "") -> None:
        place = self.folder / version
        place.mkdir(parents=True)
        (place / "a.csv").write_text(
            "tailnum,seats\n" + "".join(f"{n},{s}\n" for n, s in seats.items())
        )
        (place / "_SUCCESS").write_text(completed)

    def advance(self, spec: AdjunctDataset) -> Any:
        return advance_dataset(
            spec, lake=self.lake, systems={"lake": self.streams}, spark=IN_PROCESS, by="test"
        )

    def reader(self) -> VersionsOverTime:
        stored = StoredVersions(self.lake, "planes")
        return stored.over_time(stored.require_manifest().versions_over_time or ())

    def spans(self) -> list[tuple[str | None, dt.datetime, dt.datetime | None]]:
        return [(span.version.name, span.start, span.end) for span in self.reader().spans]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize("valid_from", ["", "names", "seats", "%Q", "%H:%M", "%m-%d", "%Y-W%W", 5])
def test_what_reports_no_time_is_refused_where_it_is_declared(
    place: Place, valid_from: Any
) -> None:
    with pytest.raises(ConfigurationError) as failure:
        place.dataset(valid_from)
    assert failure.value.argument == "valid_from"


def test_names_tell_the_time_whatever_the_order_in_which_versions_come(place: Place) -> None:
    spec = place.dataset("name")
    for version in ("2026-01-05", "2026-01-01", "20260103T120000Z"):
        place.send(version, {"N1": len(version), version: 1})
    place.advance(spec)
    noon = day(3).replace(hour=12)
    assert place.spans() == [
        ("2026-01-01", day(1), noon),
        ("20260103T120000Z", noon, day(5)),
        ("2026-01-05", day(5), None),
    ]
    assert place.reader().at(noon - dt.timedelta(microseconds=1)).sealed.name == "2026-01-01"  # type: ignore[union-attr]
    assert place.reader().at(day(1) - dt.timedelta(microseconds=1)) is None
    listed = StoredVersions(place.lake, "planes").versions()
    assert [ref.valid_from for ref in listed] == [day(5), day(1), noon], "a listing says it, too"


def test_a_pattern_reads_names_of_another_form(place: Place) -> None:
    place.write("date=2026-01-02", {"N1": 1})
    place.write("date=2026-01-09", {"N1": 2})
    place.advance(place.dataset("date=%Y-%m-%d", files=True))
    assert place.spans() == [("date=2026-01-02", day(2), day(9)), ("date=2026-01-09", day(9), None)]


def test_markers_and_completion_objects_tell_the_time(place: Place) -> None:
    place.send("v1", {"N1": 1}, at=day(4))
    place.send("v2", {"N1": 2}, at=day(2).astimezone(dt.timezone(dt.timedelta(hours=5))))
    place.advance(place.dataset("marker"))
    assert place.spans() == [("v2", day(2), day(4)), ("v1", day(4), None)]
    other = Place(place.folder / "other")
    other.write("v1", {"N1": 1}, json.dumps({"valid_from": "2026-01-04T00:00:00+00:00"}))
    other.write("v2", {"N1": 2}, json.dumps({"valid_from": "2026-01-06", "rows": 1}))
    other.advance(other.dataset("marker", files=True))
    assert other.spans() == [("v1", day(4), day(6)), ("v2", day(6), None)]


def test_a_version_whose_time_can_not_be_reported_is_rejected_and_the_next_one_comes(
    place: Place,
) -> None:
    for version in ("2026-01-01", "tuesday", "2026-01-03"):
        place.send(version, {"N1": len(version), version: 7})
    report = place.advance(place.dataset("name"))
    assert len(report.rejected) == 1
    refused = [
        ref for ref in StoredVersions(place.lake, "planes").versions() if ref.state == "rejected"
    ]
    assert (
        "its name does not say since when it is valid: expected a date or time" in refused[0].reason
    )
    assert [name for name, _, _ in place.spans()] == ["2026-01-01", "2026-01-03"]


def test_markers_of_different_times_or_of_none_reject_a_version(place: Place) -> None:
    spec = place.dataset("marker")
    place.send("v1", {"N1": 1})
    for number, partition in enumerate((0, 1)):
        place.streams.append_markers(
            "planes",
            "v2",
            producer="m",
            sequence=number,
            partitions=[partition],
            valid_from=day(3 + number),
        )
    place.advance(spec)
    reasons = [ref.reason for ref in StoredVersions(place.lake, "planes").versions()]
    assert "no marker has a time since when it is valid" in reasons[0]
    assert (
        "its markers have different times (2026-01-03 00:00:00 UTC, 2026-01-04 00:00:00 UTC)"
        in reasons[1]
    )
    with pytest.raises(
        DatasetError, match="has no sealed version that states since when it is valid"
    ):
        place.reader()
    with pytest.raises(ConfigurationError) as caught:
        place.streams.append_markers(
            "planes", "v3", producer="m", sequence=9, valid_from=dt.datetime(2026, 1, 1)
        )
    assert caught.value.argument == "valid_from"


@pytest.mark.parametrize("delivers", [True, False])
@pytest.mark.parametrize("files", [True, False])
def test_times_declared_after_the_first_versions_need_other_versions_or_the_same_again(
    place: Place, files: bool, delivers: bool
) -> None:
    deliver = place.write if files else place.send
    deliver("2026-01-01", {"N1": 1})
    assert "valid_from" not in place.advance(place.dataset(None, files=files)).note
    spec = place.dataset("name", files=files)
    for _ in range(2):
        report = place.advance(spec)
        assert report.action == "up-to-date"
        assert "adjunct dataset delete planes" in report.note
        with pytest.raises(DatasetError) as refused:
            place.reader()
        assert "adjunct dataset delete planes" in refused.value.next_step
    if delivers:
        deliver("2026-01-03", {"N1": 2})
        expected = ["2026-01-03"]
    else:
        delete_dataset(place.lake, "planes", reason="as it says", by="test")
        expected = ["2026-01-01"]
    assert place.advance(spec).note == ""
    assert [name for name, _, _ in place.spans()] == expected


AHEAD, BEHIND = (dt.timezone(dt.timedelta(hours=hours)) for hours in (1, -1))
OUTSIDE = [dt.datetime.min.replace(tzinfo=AHEAD), dt.datetime.max.replace(tzinfo=BEHIND)]


@pytest.mark.parametrize("time", OUTSIDE)
def test_times_outside_the_years_of_utc_are_refused_or_reject_a_version(
    place: Place, time: dt.datetime
) -> None:
    with pytest.raises(ConfigurationError, match="of the years 1 to 9999 in UTC"):
        place.send("v1", {"N1": 1}, at=time)
    with pytest.raises(ConfigurationError, match="of the years 1 to 9999 in UTC"):
        place.streams.append_markers("planes", "v1", producer="m", sequence=1, valid_from=time)
    assert place.streams.markers("planes") == []
    place.write("v1", {"N1": 1}, json.dumps({"valid_from": time.isoformat()}))
    place.write("v2", {"N1": 2}, json.dumps({"valid_from": "2026-01-02"}))
    assert len(place.advance(place.dataset("marker", files=True)).rejected) == 1
    refused = [
        ref.reason
        for ref in StoredVersions(place.lake, "planes").versions()
        if ref.state == "rejected"
    ]
    assert "its markers have a time outside the years 1 to 9999 of UTC (" in refused[0]
    assert place.spans() == [("v2", day(2), None)]
    with open_dataset(place.lake, "planes") as opened, pytest.raises(ConfigurationError) as caught:
        opened.valid_at(time)
    assert caught.value.argument == "moment"


def test_a_marker_repeated_with_another_time_is_rejected_and_with_the_same_ignored(
    place: Place,
) -> None:
    spec = place.dataset("marker")
    place.send("v1", {"N1": 1}, at=day(4))
    place.advance(spec)
    for sequence, again in enumerate((day(4), None)):
        place.streams.append_markers(
            "planes", "v1", producer="m", sequence=sequence, valid_from=again
        )
        assert place.advance(spec).sealed == ()
    place.streams.append_markers("planes", "v1", producer="m", sequence=9, valid_from=day(5))
    with pytest.raises(MarkerConflictError) as caught:
        place.advance(spec)
    assert (caught.value.version, caught.value.expected, caught.value.found) == (
        "v1",
        "valid_from 2026-01-04 00:00:00+00:00",
        "valid_from 2026-01-05 00:00:00+00:00",
    )
    assert place.spans() == [("v1", day(4), None)]


def test_equal_content_with_another_time_is_a_version_of_its_own(place: Place) -> None:
    spec = place.dataset("marker")
    for version, number, seats in (("a", 5, 1), ("b", 7, 1), ("c", 7, 1), ("d", 2, 1)):
        place.send(version, {"N1": seats}, at=day(number))
    place.advance(spec)
    assert place.spans() == [("d", day(2), day(5)), ("a", day(5), day(7)), ("b", day(7), None)]
    assert len(StoredVersions(place.lake, "planes").versions()) == 3, (
        "c says what b says, so nothing was made of it"
    )
    assert place.advance(spec).sealed == (), "and its offsets were committed"
    with open_dataset(place.lake, "planes") as opened:
        assert [part.valid_from for part in opened.history_of("N1")] == [day(2)], (
            "readers join what follows itself"
        )


def test_a_version_between_two_of_equal_content_begins_and_ends_at_their_times(
    place: Place,
) -> None:
    spec = place.dataset("name")
    for number, seats in ((1, 10), (5, 10), (3, 20)):
        place.send(f"2026-01-0{number}", {"N1": seats})
        place.advance(spec)
    assert _seats(place) == [(day(1), 10), (day(3), 20), (day(5), 10)]


def test_a_version_of_the_same_content_stays_where_the_one_before_is_revoked(place: Place) -> None:
    spec = place.dataset("name")
    for number, seats in ((1, 10), (3, 20), (5, 20)):
        place.send(f"2026-01-0{number}", {"N1": seats})
        place.advance(spec)
    StoredVersions(place.lake, "planes").revoke("2026-01-03", reason="a mistake", by="me")
    assert _seats(place) == [(day(1), 10), (day(5), 20)]


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 6))]
)
@pytest.mark.parametrize("valid_from", ["name", "marker", "%Y-%m-%d"])
def test_any_order_of_deliveries_and_revocations_is_what_plain_python_says(
    place: Place, seed: int, valid_from: str
) -> None:
    draw = random.Random(seed)
    spec, stored = place.dataset(valid_from), StoredVersions(place.lake, "planes")
    days = draw.sample(range(1, 10), 7)
    said_messages: dict[int, int] = {}
    for step in range(12):
        number = days[step % 7]
        if number in said_messages:  # what was revoked is delivered again
            continue
        said_messages[number] = draw.choice((10, 20, 30 + step))
        content = {"N1": said_messages[number], "step": step}
        place.send(
            f"2026-01-0{number}", content, at=day(number) if valid_from == "marker" else None
        )
        place.advance(spec)
        if len(said_messages) > 2 and draw.random() < 0.6:
            gone = draw.choice([other for other in said_messages if other != number])
            stored.revoke(f"2026-01-0{gone}", reason="a mistake", by="me")
            del said_messages[gone]
        current = stored.require_current()
        assert (current.sealed.valid_from, current.get("N1")["seats"]) == (
            day(max(said_messages)),
            said_messages[max(said_messages)],
        )  # type: ignore[index]
        expected: list[tuple[dt.datetime, int]] = []
        for begun, seats in sorted(said_messages.items()):
            if not expected or expected[-1][1] != seats:
                expected.append((day(begun), seats))
        assert _seats(place) == expected, (days, said_messages)


@pytest.mark.parametrize("valid_from", ["name", "marker"])
def test_a_version_that_comes_later_and_is_valid_from_before_is_not_served(
    place: Place, valid_from: str
) -> None:
    spec, stored = place.dataset(valid_from), StoredVersions(place.lake, "planes")
    for number in (1, 5, 3):
        place.send(
            f"2026-01-0{number}", {"N1": number}, at=day(number) if valid_from == "marker" else None
        )
        report = place.advance(spec)
    assert (report.action, report.version, report.rows) == (
        "sealed",
        stored.require_current().version,
        1,
    )
    late = (
        "version '2026-01-03' (valid from 2026-01-03 00:00:00 UTC) is sealed but not served:"
        " '2026-01-05'"
    )
    assert late in report.note
    assert f"adjunct dataset rollback planes {report.sealed[0]}" in report.note
    assert stored.require_current().get("N1") == {"tailnum": "N1", "seats": 5}
    assert _seats(place) == [(day(1), 1), (day(3), 3), (day(5), 5)]
    assert stored.rollback(reason="wrong", by="me").version.name == "2026-01-03", (
        "which is the one before, by time"
    )
    place.send("2026-01-06", {"N1": 6}, at=day(6) if valid_from == "marker" else None)
    place.advance(spec)
    assert stored.require_current().get("N1") == {"tailnum": "N1", "seats": 6}


def test_late_versions_take_the_place_of_what_is_revoked_after_them(place: Place) -> None:
    spec, stored = place.dataset("name"), StoredVersions(place.lake, "planes")
    for number in (8, 2, 6, 4, 9):
        place.send(f"2026-01-0{number}", {"N1": number})
        place.advance(spec)
    for gone, left in ((9, 8), (8, 6), (4, 6), (6, 2)):
        stored.revoke(f"2026-01-0{gone}", reason="wrong", by="me")
        assert stored.require_current().get("N1") == {"tailnum": "N1", "seats": left}


def test_a_forced_version_that_is_valid_from_before_is_not_served(place: Place) -> None:
    spec, stored = (
        place.dataset("name", validators=[min_rows(2)]),
        StoredVersions(place.lake, "planes"),
    )
    for number, content in (
        (1, {"N1": 1, "N2": 1}),
        (4, {"N1": 4, "N2": 4}),
        (3, {"N1": 3}),
        (6, {"N1": 6}),
    ):
        place.send(f"2026-01-0{number}", content)
        place.advance(spec)
    assert stored.accept("2026-01-03", reason="right", by="me").version.name == "2026-01-04"
    assert stored.accept("2026-01-06", reason="right", by="me").version.name == "2026-01-06"
    for gone, left in ((6, 4), (4, 3)):
        stored.revoke(f"2026-01-0{gone}", reason="wrong", by="me")
        assert stored.require_current().get("N1") == {"tailnum": "N1", "seats": left}


def test_versions_that_tell_no_time_come_before_all_that_do(place: Place) -> None:
    stored = StoredVersions(place.lake, "planes")
    place.send("2026-01-09", {"N1": 9})
    place.advance(place.dataset(None))
    for number, current in ((5, 5), (3, 5)):
        place.send(f"2026-01-0{number}", {"N1": number})
        place.advance(place.dataset("name"))
        assert stored.require_current().get("N1") == {"tailnum": "N1", "seats": current}
    place.send("2026-01-02", {"N1": 2})
    place.advance(place.dataset(None))
    assert stored.require_current().get("N1") == {"tailnum": "N1", "seats": 2}, (
        "where nothing tells it, arrival counts"
    )


def test_what_is_kept_for_being_new_is_so_by_time(place: Place) -> None:
    spec = place.dataset("name", discard=DiscardPolicy(keep=2, grace=dt.timedelta(0)))
    for number in (5, 7, 1, 6):
        place.send(f"2026-01-0{number}", {"N1": number})
    place.advance(spec)
    discard(place.lake, "planes", by="test")
    assert [name for name, _, _ in place.spans()] == ["2026-01-06", "2026-01-07"]


def test_partitions_whose_markers_tell_times_are_current_by_these(place: Place) -> None:
    spec = place.dataset("marker", files=True, versions=VersionPartitions())
    for name, number in (("a", 3), ("c", 5), ("z", 4)):
        place.write(name, {"N1": number}, json.dumps({"valid_from": f"2026-01-0{number}"}))
        place.advance(spec)
    assert StoredVersions(place.lake, "planes").require_current().get("N1") == {
        "tailnum": "N1",
        "seats": 5,
    }


def test_a_revoked_folder_is_taken_again_once_it_is_completed_again(place: Place) -> None:
    spec, stored = place.dataset("name", files=True), StoredVersions(place.lake, "planes")
    for number in (1, 3, 5):
        place.write(f"2026-01-0{number}", {"N1": number})
    place.advance(spec)
    stored.revoke("2026-01-03", reason="wrong", by="me")
    assert place.advance(spec).action == "up-to-date", (
        "the folder that lies there is what was revoked"
    )
    shutil.rmtree(place.folder / "2026-01-03")
    place.write("2026-01-03", {"N1": 4})
    assert place.advance(spec).action == "sealed"
    assert _seats(place) == [(day(1), 1), (day(3), 4), (day(5), 5)]
    assert stored.require_current().get("N1") == {"tailnum": "N1", "seats": 5}
    place.write("2026-01-02", {"N1": 2})
    with pytest.raises(MarkerConflictError) as refused:
        place.advance(spec)
    assert (refused.value.dataset, refused.value.version) == ("planes", "2026-01-05")
    assert "Rename" not in str(refused.value), "the name would tell another time"


def _seats(place: Place) -> list[tuple[dt.datetime, int | None]]:
    with open_dataset(place.lake, "planes") as opened:
        return [
            (part.valid_from, part.entry and part.entry["seats"])
            for part in opened.history_of("N1")
        ]


def test_of_two_versions_of_one_time_the_later_counts_and_a_revoked_one_does_not(
    place: Place,
) -> None:
    place.send("a", {"N1": 1}, at=day(1))
    place.send("b", {"N1": 2}, at=day(2))
    place.send("c", {"N1": 3}, at=day(2))
    place.advance(place.dataset("marker"))
    assert [name for name, _, _ in place.spans()] == ["a", "c"]
    StoredVersions(place.lake, "planes").revoke("c", reason="a mistake", by="me")
    assert place.spans() == [("a", day(1), day(2)), ("b", day(2), None)]


def test_an_open_batch_meets_the_versions_that_it_was_begun_with(place: Place) -> None:
    spec = place.dataset("name")
    place.send("2026-01-01", {"N1": 1})
    place.advance(spec)
    pinned = place.reader().versions
    place.send("2026-01-02", {"N1": 2})
    place.advance(spec)
    StoredVersions(place.lake, "planes").revoke("2026-01-01", reason="a mistake", by="me")
    again = StoredVersions(place.lake, "planes").over_time(pinned)
    assert isinstance(again, VersionsOverTime)
    assert again.versions == pinned
    assert [span.end for span in again.spans] == [None]


@pytest.mark.lengthy
def test_a_reader_leases_all_versions_before_it_opens_one(tmp_path: Path) -> None:
    held_again = 0
    for nth in range(1, 40):
        place = Place(tmp_path / str(nth))
        spec = place.dataset("name", discard=DiscardPolicy(keep=2, grace=dt.timedelta(0)))

        def publish(*numbers: int, place: Place = place, spec: AdjunctDataset = spec) -> None:
            for number in numbers:
                place.send(f"2026-01-0{number}", {"N1": number})
                place.advance(spec)
            discard(place.lake, "planes", by="test")

        publish(1, 2)
        store = FaultyStore(place.lake.store)
        with open_dataset(Lake(store, place.lake.id), "planes") as opened:
            begun = len(store.requests)
            store.plan = (
                Fault("*", begun + nth, "meanwhile", lambda publish=publish: publish(3, 4)),
            )
            seats = [part.entry and part.entry["seats"] for part in opened.history_of("N1")]
            assert seats in ([1, 2], [3, 4])
            made = store.requests[begun:]
        held_again += sum(request == "put_if_absent" for request, _ in made) > 1
        assert list_leases(place.lake, "planes") == []
        if len(made) < nth:
            break
    assert held_again, "some came between the choice of the versions and their lease"


def test_versions_of_other_partitions_are_refused_until_they_are_repartitioned(
    place: Place,
) -> None:
    place.send("2026-01-01", {"N1": 1})
    place.advance(place.dataset("name"))
    (old,) = [span.version for span in place.reader().spans]
    repartition_versions(place.lake, "planes", 4, reason="more", by="me")
    (new,) = [span.version for span in place.reader().spans]
    assert (new.valid_from, new.partitions) == (day(1), 4), "it keeps its time"
    later = new.after(number=2, valid_from=day(2))
    with pytest.raises(DatasetError, match=r"different partitions \(2 and 4\)") as caught:
        VersionsOverTime(place.lake.store, "planes", [old, later])
    assert "adjunct dataset repartition" in str(caught.value)


def test_versions_of_another_type_are_discarded_as_the_error_says(place: Place) -> None:
    texts = Schema.of(tailnum="string", seats="string")
    for version, schema in (("2026-01-01", PLANES), ("2026-01-02", texts)):
        place.write(version, {"N1": 1})
        source = FileSource(str(place.folder), "csv", schema)
        spec = bounded_dataset(
            "planes", input=source, key="tailnum", partitions=2, valid_from="name"
        )
        place.advance(spec)
    with pytest.raises(DatasetError, match="its column 'seats'") as caught:
        place.reader()
    command = caught.value.next_step.partition("(adjunct ")[2].partition(";")[0]
    run = CliRunner().invoke(root, [*command.split(), "--lake", place.lake.url])
    assert run.exit_code == 0, run.output
    assert place.spans() == [("2026-01-02", day(2), None)]


@pytest.mark.lengthy
def test_one_entry_over_all_versions_is_reported_with_the_time_in_which_it_was_missing(
    place: Place,
) -> None:
    spec = place.dataset("name")
    for number, seats in (
        (1, {"N2": 5}),
        (2, {"N1": 1}),
        (3, {"N1": 1, "N2": 2}),
        (4, {"N2": 2}),
        (6, {"N1": 4}),
    ):
        place.send(f"2026-01-0{number}", seats)
    place.advance(spec)
    with open_dataset(place.lake, "planes") as opened:
        parts = [
            (part.valid_from, part.valid_to, part.entry and part.entry["seats"])
            for part in opened.history_of("N1")
        ]
        assert parts == [(day(2), day(4), 1), (day(4), day(6), None), (day(6), None, 4)]
        assert opened.history_of("N9") == []
    reported = commands.document(place, "dataset", "history", "planes", "N2")
    assert [(part["valid_to"], part["is_current"]) for part in reported][-1] == (None, False)
    assert "valid from" in commands.printed(place, "dataset", "versions", "planes")


@pytest.mark.spark
def test_all_versions_are_one_scan_of_what_was_valid_when(
    place: Place, spark: SparkSession
) -> None:
    versions: dict[int, Delivered] = {
        1: {f"N{number}": number for number in range(20)},
        4: {f"N{number}": number * 2 for number in range(5, 25)},
        6: {f"N{number}": number * 2 for number in range(0, 25, 3)},
    }
    spec = place.dataset("name")
    for number, seats in versions.items():
        place.send(f"2026-01-0{number}", seats)
    place.advance(spec)
    frame = place.reader().history_frame(spark)
    expected = {
        (tailnum, seats, day(start), end and day(end), start == 1, False)
        for (start, held), end in zip(versions.items(), (4, 6, None), strict=True)
        for tailnum, seats in held.items()
    }
    utc = [
        (row[0], row[1], *(time and time.astimezone(dt.UTC) for time in row[2:4]), *row[4:])
        for row in frame.collect()
    ]
    assert len(utc) == len(expected)
    assert set(utc) == expected
    plan = frame.groupBy("tailnum").count()._jdf.queryExecution().executedPlan().toString()
    assert "Exchange" not in plan
