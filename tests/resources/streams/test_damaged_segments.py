"""A bit of a stream's file that flips in its store: whoever reads it without Spark gets the records
that were appended, or an error that names the file, and nothing is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from dagster_adjunct.resources.errors import ManifestMismatchError
from dagster_adjunct.resources.objects.arrow_files import open_input
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake import read
from dagster_adjunct.resources.streams.lake.manifest import CompactionPolicy
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import SystemStreamPartition

ROWS = [{"k": f"k{number}", "v": number * 1000} for number in range(30)]
SSP = SystemStreamPartition("lake", "s", 0)


@pytest.fixture
def lake() -> Lake:
    lake = lake_in(InMemoryStore())
    streams = LakeStreams(lake)
    merging = CompactionPolicy(min_segments=2)
    streams.create("s", schema=Schema.of(k="string", v="bigint"), partitions=1, compaction=merging)
    for number in range(3):
        rows = ROWS[number * 10 : number * 10 + 10]
        streams.append("s", rows, producer="p", sequence=number + 1)
    return lake


def damaged(lake: Lake, *, tail: int = 0) -> Iterator[str]:
    """Yield the key of the first file, with a bit flipped here and there, except in the `tail`
    of the file.
    """
    key = min(item.key for item in lake.store.list("streams/s/data/"))
    whole = lake.store.get(key).data
    for place in range(4, len(whole) - tail, 23):
        lake.store.put(key, whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        yield key
    lake.store.put(key, whole)


def records(lake: Lake) -> list[dict[str, Any]]:
    streams = LakeStreams(lake)
    found = streams.read_arrow(streams.all_ranges("s"), columns=["k", "v"])
    return found.select(["k", "v"]).to_pylist()


def read_or_error(lake: Lake) -> Any:
    try:
        return records(lake)
    except ManifestMismatchError as error:
        return error


def time(lake: Lake) -> str:
    return LakeStreams(lake).offset_for_timestamp(SSP, 0)


@pytest.mark.parametrize("read_it", [records, time])
def test_a_damaged_file_is_named_and_never_read_as_other_records(
    lake: Lake, read_it: Callable[[Lake], Any]
) -> None:
    expected = read_it(lake)
    for key in damaged(lake):
        with pytest.raises(ManifestMismatchError) as raised:
            read_it(lake)
        assert raised.value.key == key
    assert read_it(lake) == expected


def test_pages_of_files_that_are_read_in_ranges_are_checked(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "open_input", partial(open_input, most=0))
    first = min(item.key for item in lake.store.list("streams/s/data/"))
    footer = int.from_bytes(lake.store.get(first).data[-8:-4], "little")
    errors = 0
    for key in damaged(lake, tail=footer + 8):
        found = read_or_error(lake)
        if isinstance(found, ManifestMismatchError):
            assert found.key == key
            errors += 1
        else:
            assert found == ROWS
    assert errors > 5


def test_a_compaction_makes_nothing_of_a_damaged_file(lake: Lake) -> None:
    for key in damaged(lake):
        with pytest.raises(ManifestMismatchError) as raised:
            LakeStreams(lake).maintain("s")
        assert raised.value.key == key
    assert LakeStreams(lake).maintain("s").merged_segments
    assert records(lake) == ROWS
