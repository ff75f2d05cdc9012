"""Which files a look finds, in which order, and what it asks the store for."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.endpoint import Endpoint

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.file_streams import folder, listing
from dagster_adjunct.resources.file_streams.folder import (
    FileRules,
    FolderStreams,
    OnFile,
    file_stream,
)
from dagster_adjunct.resources.files.formats import FileFormat
from dagster_adjunct.resources.files.tree import open_tree
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema
from tests.resources.file_streams.landing import (
    Landing,
    LocalLanding,
    S3Landing,
    clicks,
    counts,
    flat,
    lines,
    look,
    waiting,
)
from tests.resources.file_streams.written_files import WRITERS


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count boto3's requests by operation."""
    made: Counter[str] = Counter()
    send = Endpoint.make_request

    def make(endpoint: Any, operation: Any, request: Any) -> Any:
        made[operation.name] += 1
        return send(endpoint, operation, request)

    with monkeypatch.context() as patched:
        patched.setattr(Endpoint, "make_request", make)
        yield made


def test_files_are_admitted_in_the_order_in_which_they_were_modified(
    landing: LocalLanding, lake: Lake
) -> None:
    system = clicks(landing, lake)
    for name, number, at in (("b", 1, 300), ("a/x", 2, 200), ("c", 3, 200)):
        landing.put(name, lines(number), modified=1_700_000_000 + at)
    assert look(system) == [2, 3, 1]
    landing.put("0", lines(4), modified=1_700_000_000)
    assert look(system) == [2, 3, 1, 4]
    assert look(system) == [2, 3, 1, 4]


def test_names_that_grow_are_admitted_in_their_order_and_older_ones_are_late(
    either: Landing, lake: Lake
) -> None:
    system = clicks(either, lake, listing="after-last")
    for name, number in (("d1/b", 2), ("d1/a", 1), ("d2/a", 3), ("größe", 4)):
        either.put(name, lines(number))
    assert look(system) == [1, 2, 3, 4]
    either.put("größen/2", lines(6))
    either.put("d1/aa", lines(9))
    either.put("größe 1", lines(5))
    assert look(system) == [1, 2, 3, 4, 5, 6]
    assert look(system, all_files=True) == [1, 2, 3, 4, 5, 6, 9]
    either.put("größen/3", lines(7))
    assert look(system) == [1, 2, 3, 4, 5, 6, 9, 7]
    assert look(system, all_files=True) == [1, 2, 3, 4, 5, 6, 9, 7]


@pytest.mark.server
def test_beside_many_old_files_a_look_sends_a_few_requests(
    s3_landing: S3Landing, lake: Lake, small_pages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = clicks(s3_landing, lake, listing="after-last")
    for number in range(30):
        s3_landing.put(f"{number:03}", lines(number))
    assert look(system) == [*range(30)]
    s3_landing.put("030", lines(30))
    with counted(monkeypatch) as made:
        system.admit("clicks")
    assert made == {"ListObjectsV2": 1, "GetObject": 1}
    with counted(monkeypatch) as made:
        system.admit("clicks")
    assert made == {"ListObjectsV2": 1}


def test_a_listing_after_a_name_opens_only_folders_that_may_have_later_ones(
    landing: LocalLanding, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a/b/c", "a/b/d", "a/b.d", "a/c", "a0", "b/a", "b/b/a", "c"]
    for name in names:
        landing.put(name, b"")
    tree = open_tree(landing.url)
    opened: list[str] = []
    scan = os.scandir

    def scandir(path: str) -> Any:
        opened.append(os.path.relpath(path, landing.url))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    for after in ("", "a", "a/", "a/b", "a/b/c", "a/b/cc", "a/b0", "b/", "b/a", "b/b", "b/c", "z"):
        found = [file.path for file in tree.list(after=after)]
        assert found == sorted(name for name in names if name > after), after
    opened.clear()
    tree.list(after="b/a")
    assert sorted(opened) == [".", "b", "b/b"]


def test_a_file_that_waits_is_not_passed_by_later_names(landing: LocalLanding, lake: Lake) -> None:
    system = clicks(landing, lake, listing="after-last", marker="*.done")
    for name in ("a", "b", "c"):
        landing.put(name, lines(ord(name)))
    for name in ("a.done", "c.done"):
        landing.put(name, b"")
    assert look(system) == [97, 99]
    assert waiting(system) == {"b"}
    landing.put("d", lines(100))
    landing.put("d.done", b"")
    assert look(system) == [97, 99, 100]
    landing.put("b.done", b"")
    assert look(system) == [97, 99, 100, 98]
    assert waiting(system) == set()


def test_a_marker_before_the_last_name_is_found(either: Landing, lake: Lake) -> None:
    system = clicks(either, lake, listing="after-last", marker="_SUCCESS")
    either.put("d1/a", lines(1))
    either.put("d1/_SUCCESS", b"")
    assert look(system) == [1]
    either.put("d1/b", lines(2))
    either.put("d2/a", lines(3))
    assert look(system) == [1, 2]
    either.put("d2/_SUCCESS", b"")
    assert look(system) == [1, 2, 3]


def test_hidden_and_unfinished_files_and_other_patterns_are_left_out(
    landing: LocalLanding, lake: Lake
) -> None:
    system = clicks(landing, lake, pattern="*.jsonl*")
    for name in ("_temporary/0/a.jsonl", ".a.jsonl", "b.jsonl.tmp", "b.jsonl.part", "c.csv"):
        landing.put(name, lines(1))
    landing.put("_day=3/a.jsonl", lines(2))
    landing.put("deep/er/a.jsonl", lines(3))
    assert sorted(look(system)) == [2, 3]


def test_a_file_waits_for_its_age(landing: LocalLanding, lake: Lake) -> None:
    system = clicks(landing, lake, listing="after-last", min_age=timedelta(hours=1))
    landing.put("a", lines(1), modified=time.time() - 3700)
    landing.put("b", lines(2))
    landing.put("c", lines(3), modified=time.time() - 3700)
    assert look(system) == [1, 3]
    os.utime(landing.root / "b", (1, 1))
    assert look(system) == [1, 3, 2]


@pytest.fixture
def today(monkeypatch: pytest.MonkeyPatch) -> list[datetime]:
    """The time that looks go by; may be changed."""
    now = [datetime(2026, 3, 10, 12, tzinfo=UTC)]

    class Moved(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return now[0]

    monkeypatch.setattr(listing, "datetime", Moved)
    return now


def test_only_the_folders_of_the_last_days_are_listed(
    landing: LocalLanding, lake: Lake, today: list[datetime], monkeypatch: pytest.MonkeyPatch
) -> None:
    system = clicks(landing, lake, date_prefix="day=%Y-%m-%d/", days_back=1)
    landing.put("day=2025-01-01/a", lines(1), modified=1)
    landing.put("day=2026-03-10/a", lines(2), modified=2)
    assert look(system) == [1, 2]
    landing.put("day=2026-03-11/a", lines(3), modified=3)
    landing.put("day=2026-03-09/a", lines(4), modified=4)
    landing.put("day=2026-03-08/a", lines(9), modified=5)
    landing.put("else/where", lines(8), modified=6)
    assert look(system) == [1, 2, 3, 4]
    assert look(system, all_files=True) == [1, 2, 3, 4, 9, 8]
    # Nobody looks for a week: all of its days are listed.
    today[0] += timedelta(days=7)
    landing.put("day=2026-03-12/a", lines(5), modified=7)
    landing.put("day=2026-03-09/b", lines(6), modified=8)
    assert look(system) == [1, 2, 3, 4, 9, 8, 5, 6]
    landing.put("day=2026-03-12/b", lines(7), modified=9)
    assert 7 not in look(system)
    today[0] += timedelta(days=365)
    assert look(system)[-1] == 7


def test_a_day_on_which_files_wait_stays_listed(
    landing: LocalLanding, lake: Lake, today: list[datetime]
) -> None:
    system = clicks(landing, lake, date_prefix="%Y/%m/%d/", days_back=0, marker="*.done")
    landing.put("2026/03/10/a", lines(1))
    assert look(system) == []
    today[0] += timedelta(days=3)
    landing.put("2026/03/13/a", lines(2))
    landing.put("2026/03/13/a.done", b"")
    assert look(system) == [2]
    landing.put("2026/03/10/a.done", b"")
    assert look(system) == [2, 1]
    today[0] += timedelta(days=1)
    landing.put("2026/03/10/b", lines(3))
    landing.put("2026/03/10/b.done", b"")
    system.admit("clicks")
    today[0] += timedelta(days=1)
    assert look(system) == [2, 1]


def test_another_way_of_listing_begins_with_a_look_at_all_files(
    landing: LocalLanding, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dagster_adjunct.resources.file_streams import streams

    landing.put("b", lines(1))
    assert look(clicks(landing, lake, listing="after-last")) == [1]
    landing.put("a", lines(2))
    for options in ({}, {"date_prefix": "%Y/%m/%d/"}, {"listing": "after-last"}):
        monkeypatch.setattr(streams, "_declared", {})
        landing.put(f"0{len(str(options))}", lines(3))
        system = clicks(landing, lake, **options)
        found = look(system)
    assert sorted(found) == [1, 2, 3, 3, 3]
    assert counts(system) == {}


def test_more_files_than_one_commit_has_are_admitted_at_once(
    landing: LocalLanding, lake: Lake, small_pages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "MOST_AT_ONCE", 3)
    for number in range(20):
        landing.put(f"{number:02}", lines(number), modified=1_700_000_000 + number)
    system = clicks(landing, lake)
    view = system.snapshot("clicks")
    assert [*view.upcoming([folder_partition()]).values()] == ["20"]
    assert look(system) == [*range(20)]


@pytest.mark.parametrize("options", [{"listing": "after-last"}, {"date_prefix": "d=%Y%m%d/"}])
def test_a_first_look_in_parts_loses_nothing(
    landing: LocalLanding, lake: Lake, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(folder, "_BYTES_AT_ONCE", 1)
    expected = []
    for number in range(7):
        landing.put(f"{number}", lines(number, number), modified=1_700_000_000 + number)
        expected.append((number, number))
    system = clicks(landing, lake, **options)
    for _ in range(3):
        system._admit_once("clicks")
    assert look(system) == flat(expected)


@pytest.mark.parametrize(
    ("format", "limit", "first"),
    [("parquet", "_BYTES_AT_ONCE", 1), ("avro", "_AVRO_BYTES_AT_ONCE", 1), ("parquet", "", 3)],
)
def test_a_commit_has_no_more_files_than_are_read_in_a_while(
    tmp_path: Path,
    lake: Lake,
    monkeypatch: pytest.MonkeyPatch,
    format: FileFormat,
    limit: str,
    first: int,
) -> None:
    for number in range(3):
        data = WRITERS[format](Schema.of(k="bigint"), [{"k": number}])
        (tmp_path / f"{number}").write_bytes(data)
    rule: OnFile = "fail"
    monkeypatch.setattr(folder, "_BYTES_AT_ONCE", 1)
    if limit:
        monkeypatch.setattr(folder, "_BYTES_AT_ONCE", 1024**3)
        monkeypatch.setattr(folder, limit, 1)
        rule = "set-aside"
    rules = FileRules(damaged=rule)
    file_stream("clicks", str(tmp_path), format=format, schema="k bigint", rules=rules)
    system = FolderStreams(lake)
    assert system._admit_once("clicks").state.next == first
    assert system.admit("clicks").next == 3


def folder_partition() -> Any:
    from tests.resources.file_streams.landing import CLICKS

    return CLICKS


@pytest.mark.parametrize(
    "options",
    [
        {"listing": "after-last", "date_prefix": "%Y/%m/%d/"},
        {"date_prefix": "%Y/%m/"},
        {"date_prefix": "%Y-%m-%d"},
        {"date_prefix": "/%Y-%m-%d/"},
        {"date_prefix": "%Y-%m-%dT%H/"},
        {"notifications": "https://sqs.eu-west-1.amazonaws.com/1/q"},
        {"notifications": "queue"},
        {"days_back": -1},
    ],
)
def test_ways_of_listing_that_can_not_work_are_refused(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(errors.ConfigurationError):
        file_stream("clicks", str(tmp_path), format="jsonl", schema="n bigint", **options)
