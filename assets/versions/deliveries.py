"""Deliveries recorded in the manifest of a bounded dataset: delivered, awaited, abandoned and lost versions."""

from __future__ import annotations

from pydantic import AwareDatetime

from dagster_adjunct.assets.versions.version import ManifestPart, Offset

MAX_DELIVERIES = 100
MAX_NAMES = 10_000


class MarkerFacts(ManifestPart):
    """The facts of one marker: the number of rows before it, a checksum and a valid-from time, where it states them.

    A marker is a partition's end-of-dataset marker, or the completion object of a folder of files (offset 0). If a
    stream's marker states no rows, `rows` is the counted number. For a folder, `checksum` is that of the completion
    object, `completed` the time it was written, and `contents` a digest of the data files' names and contents.
    `listing` is a digest of names, sizes and ETags, which needs no reading; a copy of the files has a different one.
    """

    offset: int
    rows: int | None = None
    checksum: str | None = None
    listing: str | None = None
    contents: str | None = None
    completed: AwareDatetime | None = None
    valid_from: AwareDatetime | None = None


class Awaited(ManifestPart):
    """A version of which some markers have arrived: the missing markers, and since when it is awaited."""

    version: str | None
    missing: tuple[str, ...]
    since: AwareDatetime


class Delivered(ManifestPart):
    """A completely delivered version: its name, its markers, and the id of the version that holds its content.

    A delivery whose content equals the previous version is held by that one. `freed` is the time since when the name
    can be delivered again as a new version: the time of the rejection for a version rejected and then dropped, or the
    time of the withdrawal.
    """

    name: str
    version: str
    markers: dict[str, MarkerFacts]
    freed: AwareDatetime | None = None


class Abandoned(ManifestPart):
    """A version that an operator abandoned: the records before its markers are dropped."""

    name: str
    reason: str
    by: str
    at: AwareDatetime


class Lost(ManifestPart):
    """Offsets that retention removed from the stream before they were read, by partition, and their versions.

    `versions` are those with markers left; others that ended in these ranges are unknown.
    """

    versions: tuple[str, ...]
    ranges: dict[str, tuple[Offset, Offset]]
    at: AwareDatetime

    def summary(self) -> str:
        """Return the loss as a sentence without a period."""
        ranges = [f"offsets {start} to {int(end) - 1} of {ssp}" for ssp, (start, end) in self.ranges.items()]
        listed = f"{', '.join(ranges[:3])}{f' and of {len(ranges) - 3} more partitions' if len(ranges) > 3 else ''}"
        named = ", ".join(map(repr, self.versions))
        lost = f"not whole any more, and left out: {named}" if named else "versions that ended there are lost"
        return f"retention took {listed} before they were read; {lost}"
