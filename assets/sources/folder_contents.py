"""What tells a delivered folder from another one of its name: the contents of its files, not when or where they lie.

Listing costs nothing, and a folder that is listed as before is what it was. Only one that was copied, restored or
completed anew is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from dagster_adjunct.assets.sources.folders import Folder
from dagster_adjunct.assets.versions.deliveries import Delivered, MarkerFacts

if TYPE_CHECKING:
    from dagster_adjunct.resources.files.tree import FileTree

Markers = Mapping[str, MarkerFacts]
# By version name, what the markers of a delivery are that lies there anew with the same contents.
Copies = Mapping[str, Markers]


class FolderContents:
    """What the folders of one tree hold. Folders given are complete."""

    def __init__(self, tree: FileTree) -> None:
        self._tree = tree

    def delivered(self, folder: Folder, rows: int | None) -> dict[str, MarkerFacts]:
        """Return what is kept of a delivery."""
        return self._now(folder, MarkerFacts(offset=0, rows=rows, contents=_contents(self._tree, folder)))

    def markers(self, folder: Folder, before: Markers) -> dict[str, MarkerFacts]:
        """Return what is kept of a delivery whose copy lies there now."""
        assert folder.complete is not None
        return self._now(folder, before[folder.complete.path])

    def differs(self, markers: Markers, folder: Folder, *, asked: bool = False) -> bool:
        """Whether a folder is another delivery than the one that was taken.

        Files that are replaced are no delivery before the completion object is written again, unless the version is
        asked for: they may be copied, or on their way. A delivery whose contents were not kept is told by its listing.
        """
        before = self._before(markers, folder)
        assert folder.complete is not None
        if before is None:
            return False
        if before.checksum != self._tree.content_tag(folder.complete):
            return True
        again = asked or before.completed != folder.complete.modified
        if not again or before.listing is None or before.listing == _listing(folder):
            return False
        return before.contents is None or before.contents != _contents(self._tree, folder)

    def original(self, folder: Folder, deliveries: Iterable[Delivered]) -> str | None:
        """Return the name of the delivery that a folder of another name holds, too."""
        assert folder.complete is not None
        for done in deliveries:
            for marker in done.markers.values():
                kept = marker.contents is not None and marker.checksum == self._tree.content_tag(folder.complete)
                if kept and marker.contents == _contents(self._tree, folder):
                    return done.name
        return None

    def is_known(self, markers: Markers, folder: Folder) -> bool:
        """Whether a folder lies there as it was looked at last."""
        before = self._before(markers, folder)
        assert folder.complete is not None
        now = (folder.complete.modified, _listing(folder))
        return before is not None and (before.completed, before.listing) == now

    def is_copy(self, markers: Markers, folder: Folder) -> bool:
        """Whether a folder that was completed anew holds what was delivered."""
        before = self._before(markers, folder)
        assert folder.complete is not None
        if before is None or before.contents is None or before.completed == folder.complete.modified:
            return False
        if before.checksum != self._tree.content_tag(folder.complete):
            return False
        return before.listing == _listing(folder) or before.contents == _contents(self._tree, folder)

    def _before(self, markers: Markers, folder: Folder) -> MarkerFacts | None:
        assert folder.complete is not None
        return markers.get(folder.complete.path)

    def _now(self, folder: Folder, known: MarkerFacts) -> dict[str, MarkerFacts]:
        complete = folder.complete
        assert complete is not None
        tag = self._tree.content_tag(complete)
        now = {"checksum": tag, "listing": _listing(folder), "completed": complete.modified}
        return {complete.path: known.model_copy(update=now)}


@lru_cache(maxsize=1024)  # sensors look again and again at folders as they were listed
def _contents(tree: FileTree, folder: Folder) -> str:
    """Return what folders with the same data files have in common. Local files are read for it."""
    prefix = f"{folder.path}/" if folder.path else ""
    return _digest([(file.path.removeprefix(prefix), file.size, tree.content_tag(file)) for file in folder.files])


def _listing(folder: Folder) -> str:
    """Return what tells a folder's data files from others: their names, sizes and ETags."""
    return _digest([(file.path, file.size, file.etag) for file in folder.files])


def _digest(told: list[tuple[str, int, str]]) -> str:
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()
