"""Places where files land, and what a stream over them has read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dagster_adjunct.resources.file_streams.folder import FolderStreams, file_stream
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.system import (
    OFFSET,
    OffsetRange,
    StreamSystem,
    SystemStreamPartition,
)

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

CLICKS = SystemStreamPartition("files", "clicks", 0)


class Landing(Protocol):
    """A folder into which others write files."""

    @property
    def url(self) -> str: ...

    def put(self, name: str, data: bytes) -> None: ...

    def delete(self, name: str) -> None: ...


class LocalLanding:
    """A local folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return str(self.root)

    def put(self, name: str, data: bytes, modified: float | None = None) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # As whoever replaces a file should: then it is another one, however quick that was.
        aside = path.with_name(f".{path.name}.new")
        aside.write_bytes(data)
        if modified is not None:
            os.utime(aside, (modified, modified))
        aside.replace(path)

    def delete(self, name: str) -> None:
        (self.root / name).unlink()


class S3Landing:
    """A prefix of a bucket."""

    def __init__(self, client: S3Client, bucket: str) -> None:
        self.client = client
        self.bucket = bucket

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/in coming"

    def put(self, name: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"in coming/{name}", Body=data)

    def delete(self, name: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=f"in coming/{name}")


def lines(*numbers: int) -> bytes:
    """Return a file with these records."""
    return "".join(json.dumps({"n": number}) + "\n" for number in numbers).encode()


def clicks(place: Landing, lake: Lake, **options: Any) -> FolderStreams:
    """Declare the stream "clicks" over a place; return its system."""
    file_stream("clicks", place.url, format="jsonl", schema="n bigint", **options)
    return FolderStreams(lake)


def numbers(system: StreamSystem, start: int | None = None) -> list[int]:
    """Return the records that can be read now, without looking for new ones, in offset order."""
    found = offsets(system, start)
    return [found[offset] for offset in sorted(found)]


def offsets(system: StreamSystem, start: int | None = None) -> dict[int, int]:
    """Return the records that can be read now by their offsets."""
    first = system.oldest([CLICKS])[CLICKS] if start is None else str(start)
    span = OffsetRange(first, system.upcoming([CLICKS])[CLICKS])
    rows = system.read_arrow({CLICKS: span}).to_pylist()
    return {row[OFFSET]: row["n"] for row in rows}


def look(system: FolderStreams, **options: Any) -> list[int]:
    """Look for new files; return all records."""
    system.admit("clicks", **options)
    return numbers(system)


def problems(system: FolderStreams) -> dict[str, str]:
    """Return which rule has set which files aside."""
    log = system.file_log("clicks")
    state = log.read()
    assert state is not None
    return {one.path: one.problem.partition(":")[0] for one in log.files(state) if one.problem}


def counts(system: FolderStreams) -> dict[str, int]:
    """Return how many files were set aside, by rule."""
    state = system.file_log("clicks").read()
    assert state is not None
    return dict(state.set_aside)


def waiting(system: FolderStreams) -> set[str]:
    """Return the names of files that wait."""
    from dagster_adjunct.resources.file_streams.streams import _Known

    log = system.file_log("clicks")
    state = log.read()
    assert state is not None
    feed = system.declaration("clicks").feed(system.lake)
    return set(feed.find(_Known(log, state)).waiting)


def flat(groups: Iterable[Iterable[int]]) -> list[int]:
    return [number for group in groups for number in group]
