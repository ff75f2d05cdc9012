"""A stream whose folder is moved: nothing is read twice, and nothing that is not there is passed
over silently.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.maintenance import MoveReport, move_stream
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step.run import run_application
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.file_streams import streams
from dagster_adjunct.resources.file_streams.folder import FileRules, FolderStreams, file_stream
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from tests.resources.file_streams.landing import (
    LocalLanding,
    S3Landing,
    clicks,
    lines,
    look,
    numbers,
    offsets,
    problems,
)

BEGAN = 1_700_000_000


def moved(lake: Lake, url: object, **how: Any) -> MoveReport:
    return move_stream(lake, "files.clicks", str(url), reason="a new disk", by="me", **how)


def put(place: LocalLanding, *names: int) -> None:
    for number in names:
        place.put(f"part/{number:02}", lines(number, number + 100), modified=BEGAN + number)


def declared_at(folder: Path, lake: Lake, **options: Any) -> FolderStreams:
    """Do as a process whose code has this folder."""
    streams._declared.clear()
    return clicks(LocalLanding(folder), lake, **options)


def rename(source: Path, target: Path) -> None:
    source.rename(target)


def copy_and_remove(source: Path, target: Path) -> None:
    """Move a folder to another disk: its files have their times, and other inodes."""
    shutil.copytree(source, target)
    shutil.rmtree(source)


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("take", [rename, copy_and_remove])
def test_a_moved_stream_continues_where_it_was(
    landing: LocalLanding, lake: Lake, tmp_path: Path, take: Any
) -> None:
    put(landing, *range(9))
    system = clicks(landing, lake)
    before = look(system)
    put(landing, 9)  # it has not been admitted
    new = tmp_path / "new place"
    take(landing.root, new)
    with pytest.raises(errors.StreamExistsError) as failure:
        declared_at(new, lake).admit("clicks")
    assert f"adjunct stream move files.clicks '{new}' --reason …" in failure.value.next_step
    planned = moved(lake, new, dry_run=True)
    assert (planned.files, planned.problems) == (9, ())
    with pytest.raises(errors.StreamExistsError):
        declared_at(new, lake).admit("clicks")
    assert moved(lake, new).before == landing.url
    system = declared_at(new, lake)
    assert numbers(system) == before
    assert look(system) == [*before, 9, 109]
    put(LocalLanding(new), 10)
    assert look(system) == [*before, 9, 109, 10, 110]
    state = system.file_log("clicks").read()
    assert state is not None
    (by,) = state.moved
    assert (by.before, by.after, by.by, by.reason) == (landing.url, str(new), "me", "a new disk")


def test_a_declaration_may_write_the_same_folder_in_another_way(
    landing: LocalLanding, lake: Lake
) -> None:
    put(landing, 1)
    look(clicks(landing, lake))
    streams._declared.clear()
    file_stream("clicks", landing.root.as_uri(), format="jsonl", schema="n bigint")
    assert look(FolderStreams(lake)) == [1, 101]


def test_missing_and_changed_files_are_refused_unless_forced(
    landing: LocalLanding, lake: Lake, tmp_path: Path
) -> None:
    put(landing, 1, 2, 3, 4)
    look(clicks(landing, lake))
    new = tmp_path / "new"
    rename(landing.root, new)
    (new / "part/02").unlink()
    os.utime(new / "part/03", (BEGAN, BEGAN))
    (new / "part/04").write_bytes(lines(4, 5, 6, 7))
    report = moved(lake, new, dry_run=True)
    assert (report.files, report.missing) == (1, ("part/02",))
    assert report.changed == ("part/03", "part/04")
    with pytest.raises(errors.AdmittedFileError) as failure:
        moved(lake, new)
    assert failure.value.file == "part/02"
    with pytest.raises(errors.StreamExistsError):  # nothing has changed
        declared_at(new, lake).admit("clicks")
    report = moved(lake, new, force=True)
    assert (report.files, report.missing, report.changed) == (2, ("part/02",), ("part/04",))
    rules = FileRules(changed="ignore", lost="set-aside")
    assert offsets(declared_at(new, lake, rules=rules)) == {0: 1, 1: 101, 4: 3, 5: 103}


def test_files_that_were_restored_into_the_same_folder_are_known_again(
    landing: LocalLanding, lake: Lake, tmp_path: Path
) -> None:
    put(landing, 1, 2)
    system = clicks(landing, lake)
    before = offsets(system) if look(system) else {}
    backup = tmp_path / "backup"
    copy_and_remove(landing.root, backup)
    copy_and_remove(backup, landing.root)
    with pytest.raises(errors.AdmittedFileError):
        look(system)
    assert moved(lake, landing.url).files == 2
    put(landing, 3)
    assert look(system) == [1, 101, 2, 102, 3, 103]
    assert before.items() <= offsets(system).items()


def test_a_process_with_the_old_declaration_reads_nothing_more(
    landing: LocalLanding, lake: Lake, tmp_path: Path
) -> None:
    put(landing, 1, 2)
    system = clicks(landing, lake)
    look(system)
    new = tmp_path / "new"
    shutil.copytree(landing.root, new)  # the old folder stays, and gets another file
    moved(lake, new)
    put(landing, 3)
    with pytest.raises(errors.StreamExistsError):
        look(system)
    with pytest.raises(errors.AdmittedFileError):  # these are other files, as far as is known
        numbers(system)
    assert look(declared_at(new, lake)) == [1, 101, 2, 102]


def test_files_that_were_set_aside_stay_so(
    landing: LocalLanding, lake: Lake, tmp_path: Path
) -> None:
    put(landing, 1, 2, 3)
    landing.put("part/04", b"{", modified=BEGAN + 4)
    rules = FileRules(damaged="set-aside")
    system = clicks(landing, lake, rules=rules)
    look(system)
    system.set_aside("clicks", "part/02", reason="wrong")
    before = problems(system)
    landing.delete("part/01")  # it was cleaned away
    system.set_aside("clicks", "part/01", reason="gone")
    new = tmp_path / "new"
    copy_and_remove(landing.root, new)
    moved(lake, new)
    system = declared_at(new, lake, rules=rules)
    assert look(system) == [3, 103]
    assert problems(system) == {**before, "part/01": "set aside"}


def test_a_folder_that_does_not_exist_or_a_stream_without_one_is_refused(
    landing: LocalLanding, lake: Lake, tmp_path: Path
) -> None:
    clicks(landing, lake)
    with pytest.raises(errors.StreamNotFoundError):
        moved(lake, tmp_path / "new")
    look(clicks(landing, lake))
    for force in (False, True):
        with pytest.raises(errors.ConfigurationError) as failure:
            moved(lake, tmp_path / "new", force=force)
        assert failure.value.argument == "url"
    with pytest.raises(errors.ConfigurationError):
        move_stream(lake, "delta.table", str(tmp_path), reason="a try", by="me")
    with pytest.raises(errors.ConfigurationError):
        move_stream(lake, "files.clicks", str(tmp_path), reason=" ", by="me")


@pytest.mark.server
def test_objects_that_were_copied_to_another_prefix_are_known(
    s3_landing: S3Landing, lake: Lake
) -> None:
    for number in range(3):
        s3_landing.put(f"{number}", lines(number))
    look(clicks(s3_landing, lake))
    for number in range(3):
        source = {"Bucket": s3_landing.bucket, "Key": f"in coming/{number}"}
        s3_landing.client.copy_object(
            Bucket=s3_landing.bucket, Key=f"new/{number}", CopySource=source
        )
        s3_landing.delete(f"{number}")
    url = f"s3://{s3_landing.bucket}/new"
    assert moved(lake, url).files == 3
    streams._declared.clear()
    file_stream("clicks", url, format="jsonl", schema="n bigint")
    assert look(FolderStreams(lake)) == [0, 1, 2]


def test_an_open_batch_is_repeated_from_the_new_folder_only_if_forced(
    landing: LocalLanding, tmp_path: Path
) -> None:
    lake = open_lake(tmp_path / "lake")
    app = Application("copying", engine="auto")
    clicked = app.input_stream("files.clicks", default_offset="oldest")
    clicked.send_to(app.output_stream("lake.copied", partitions=1))

    def run() -> None:
        run_application(app, lake=lake, spark=IN_PROCESS, wait=0)

    put(landing, 1, 2)
    clicks(landing, lake)
    run()
    put(landing, 3, 4)
    clicks(landing, lake).admit("clicks")
    new = tmp_path / "new"
    copy_and_remove(landing.root, new)
    with pytest.raises(errors.AdmittedFileError):
        run()  # it has opened a batch
    assert len(moved(lake, new, dry_run=True).affected) == 1
    with pytest.raises(errors.StillReadError) as failure:
        moved(lake, new)
    assert len(failure.value.readers) == 1
    assert moved(lake, new, force=True).missing == ()
    declared_at(new, lake)
    put(LocalLanding(new), 5)
    run()
    out = LakeStreams(lake)
    rows = out.read_arrow(out.all_ranges("copied")).to_pylist()
    assert [row["n"] for row in rows] == [1, 101, 2, 102, 3, 103, 4, 104, 5, 105]
