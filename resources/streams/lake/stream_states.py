"""What the lake holds of its streams: which there are, and of each the commits, the current state and its pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import MalformedDocumentError, StreamNotFoundError
from dagster_adjunct.resources.objects.removal import is_deleted
from dagster_adjunct.resources.streams.lake.segment_index import Pages
from dagster_adjunct.resources.streams.lake.stream_manifest import KIND, StreamState

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.commit_log import Commit, CommitLog
    from dagster_adjunct.resources.objects.lake import Lake

NAMES = "streams/_names"


class StreamStates:
    """The states of a lake's streams. Safe to use from threads and from many processes."""

    name = "lake"

    def __init__(self, lake: Lake) -> None:
        self.lake = lake
        self._pages: dict[str, Pages] = {}

    def list_streams(self) -> list[str]:
        names = [item.key.rsplit("/", 1)[-1] for item in self.lake.store.list(f"{NAMES}/")]
        return sorted(name for name in names if self._is_there(name))

    def log(self, stream: str) -> CommitLog:
        """Internal: the stream's commit log."""
        return self.lake.commit_log(self.lake.stream_prefix(stream), KIND)

    def state(self, stream: str) -> tuple[Commit, StreamState]:
        """Internal: the current commit and what its manifest says."""
        commit = self._there(stream, self.log(stream).current())
        return commit, self._parse(commit)

    def _is_there(self, stream: str) -> bool:
        try:
            commit = self.log(stream).current()
        except MalformedDocumentError:
            return True  # and says so when it is opened
        return commit is not None and not is_deleted(commit)

    def _there(self, stream: str, commit: Commit | None) -> Commit:
        if commit is None or is_deleted(commit):
            there = ", ".join(self.list_streams()) or "none"
            raise StreamNotFoundError(
                f"there is no stream {stream!r} in {self.lake.url}: there are {there}.",
                f"Check the name and the lake, or create the stream first: streams.create({stream!r}, schema=…, "
                "partitions=…).",
                stream=f"lake.{stream}",
            )
        return commit

    def _parse(self, commit: Commit) -> StreamState:
        return StreamState.parse(commit.body, f"the stream index {commit.manifest_key!r} in {self.lake.url}")

    def pages_of(self, stream: str) -> Pages:
        """Internal: the stored pages of the stream's index."""
        return self._pages.setdefault(stream, Pages(self.lake.store, self.lake.stream_prefix(stream)))

    def now_ms(self) -> int:
        """Internal: the time of appends, in ms since the epoch."""
        return int(self.lake.now().timestamp() * 1000)
