"""What a bounded dataset remembers of its deliveries: markers, what is waited for, abandoned or lost."""

from __future__ import annotations

from pydantic import AwareDatetime

from dagster_adjunct.assets.versions.version import ManifestPart, Offset

MAX_DELIVERIES = 100
MAX_NAMES = 10_000


class MarkerFacts(ManifestPart):
    """What one marker said: rows before it, a checksum, and since when the version is valid, where it gave them.

    A marker is a partition's end-of-dataset marker, or the completion object of a folder of files (offset 0). Where a
    stream's marker gave no rows, they are those that were counted. Of a folder, `checksum` is of the completion object,
    `completed` is when that was written, and `contents` is of the data files' names and contents. `listing` tells these
    files from others without reading them: a copy has another one.
    """

    offset: int
    rows: int | None = None
    checksum: str | None = None
    listing: str | None = None
    contents: str | None = None
    completed: AwareDatetime | None = None
    valid_from: AwareDatetime | None = None


class Awaited(ManifestPart):
    """The version that some markers have been seen of, the markers that are missing, and since when."""

    version: str | None
    missing: tuple[str, ...]
    since: AwareDatetime


class Delivered(ManifestPart):
    """A version that was delivered whole: its name, its markers, and the sealed version that holds its content.

    A delivery whose content equals the version before it is held by that one. `freed` is set where its version was
    rejected and then dropped, to the time of the rejection, and where it was withdrawn, to the time of that: what is
    delivered under its name since then is a new version.
    """

    name: str
    version: str
    markers: dict[str, MarkerFacts]
    freed: AwareDatetime | None = None


class Abandoned(ManifestPart):
    """A version that an operator ended: its markers close nothing, and the records before them are dropped."""

    name: str
    reason: str
    by: str
    at: AwareDatetime


class Lost(ManifestPart):
    """What retention took of the stream before it was read: the offsets, by partition, and whose they were.

    `versions` are those that had markers left; of others that ended there nothing is known any more.
    """

    versions: tuple[str, ...]
    ranges: dict[str, tuple[Offset, Offset]]
    at: AwareDatetime

    def summary(self) -> str:
        """Return it as a sentence without its period."""
        ranges = [f"offsets {start} to {int(end) - 1} of {ssp}" for ssp, (start, end) in self.ranges.items()]
        told = f"{', '.join(ranges[:3])}{f' and of {len(ranges) - 3} more partitions' if len(ranges) > 3 else ''}"
        named = ", ".join(map(repr, self.versions))
        lost = f"not whole any more, and left out: {named}" if named else "versions that ended there are lost"
        return f"retention took {told} before they were read; {lost}"
