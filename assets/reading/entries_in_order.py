"""The iteration over one version's entries, which stays in use until the iteration ends or is dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import AdjunctError, ManifestMismatchError

if TYPE_CHECKING:
    from dagster_adjunct.assets.reading.served_version import ServedVersion
    from dagster_adjunct.assets.reading.version_in_use import HeldVersion
    from dagster_adjunct.assets.reading.version_reader import Entry, VersionReader


class EntriesInOrder(Iterator[tuple[Any, "Entry"]]):
    """Yields (key, entry) of the version that is read when this is made.

    Where a file turns out to be damaged or discarded before the first entry, another version may take its place;
    after it the iteration fails.
    """

    def __init__(self, served: ServedVersion, read: Callable[[VersionReader], Iterator[tuple[Any, Entry]]]) -> None:
        self._served, self._read = served, read
        self._begun = False
        self._held: HeldVersion | None = None
        self._open()

    def __next__(self) -> tuple[Any, Entry]:
        while self._held is not None:
            try:
                item = next(self._rows)
            except StopIteration:
                break
            except ManifestMismatchError as error:
                held = self._held
                self.close()
                if self._begun:
                    self._served.explain(held.reader.version)
                    raise
                self._served.take_another(held, error)
                self._open()
            else:
                self._begun = True
                return item
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Leave the version."""
        held, self._held = self._held, None
        if held is not None:
            self._served.leave(held)

    def __del__(self) -> None:
        self.close()

    def _open(self) -> None:
        self._held = self._served.enter(leased=True)
        try:
            self._rows = self._read(self._held.reader)
        except AdjunctError:
            self.close()
            raise
