"""A lake: one root in an object store, below which streams, datasets and applications live."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import ConfigurationError, LakeNotFoundError
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.objects.commit_log import CommitLog
from dagster_adjunct.resources.objects.lake_address import LakeSettings, store_at
from dagster_adjunct.resources.objects.lake_document import read_lake_document
from dagster_adjunct.resources.objects.lake_to_be_made import lake_to_be_made
from dagster_adjunct.resources.times import utc_now

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from dagster_adjunct.resources.objects.object_store import ObjectStore, StoreDescriptor


class Lake:
    """An opened lake. Picklable: it travels as its store's descriptor and is not probed again.

    `clock` gives the time, with a zone; another process goes by its machine's.
    """

    def __init__(
        self, store: ObjectStore, lake_id: str, *, shared: bool = False, clock: Callable[[], datetime] = utc_now
    ) -> None:
        self.store = store
        self._id = lake_id
        self.shared = shared
        self._clock = clock

    def now(self) -> datetime:
        """Return the time that everything in this lake is dated with: that of its clock."""
        now = self._clock()
        if now.tzinfo is None:
            raise ConfigurationError(
                f"the clock of the lake {self.url} says {now}, which names no zone.",
                "Give one that does: clock=lambda: datetime.now(UTC).",
                argument="clock",
                url=self.url,
            )
        return now

    @property
    def id(self) -> str:
        """The lake's own id; "" while nothing has been written to it."""
        if not self._id:
            document = read_lake_document(self.store)
            self._id = document.id if document is not None else ""
        return self._id

    @property
    def url(self) -> str:
        return self.store.url

    def exists(self) -> bool:
        """Whether anything has ever been written to the lake. One request while there is none."""
        return bool(self.id)

    def stream_prefix(self, name: str) -> str:
        return f"streams/{check_name('stream', name)}"

    def dataset_prefix(self, name: str) -> str:
        return f"datasets/{check_name('dataset', name)}"

    def application_prefix(self, name: str) -> str:
        return f"applications/{check_name('application', name)}"

    def commit_log(self, prefix: str, kind: str) -> CommitLog:
        """Return the log of what is committed below `prefix`."""
        return CommitLog(self.store, prefix, kind, clock=self.now)

    def __reduce__(self) -> tuple[object, tuple[StoreDescriptor, str, bool]]:
        return (_reopen, (self.store.descriptor, self.id, self.shared))

    def __repr__(self) -> str:
        return f"Lake({self.url!r})"


def open_lake(
    url: str | os.PathLike[str] | None = None, *, settings: LakeSettings | None = None, create: bool = True
) -> Lake:
    """Return the lake at `url`: `s3://BUCKET/PREFIX`, a folder, `file:///…` or `memory://NAME`.

    Without a URL: ADJUNCT_LAKE, else `.adjunct/lake`. One GET, which creates nothing. Where there is no lake yet, the
    first write makes one, and logs so: it probes the store's conditional writes (ConditionalWritesUnsupportedError) and
    writes `_adjunct/lake.json`. With `create=False`, a lake that is not there is a LakeNotFoundError.
    """
    settings = settings or LakeSettings()
    lake = lake_in(store_at(url, settings), shared=settings.shared)
    if not create and not lake.exists():
        raise LakeNotFoundError(
            f"there is no lake at {lake.url}.",
            "Check --lake and ADJUNCT_LAKE; the first command or program that writes to a lake makes it.",
            url=lake.url,
        )
    return lake


def lake_in(store: ObjectStore, *, shared: bool = False) -> Lake:
    """Return the lake at a store's root; where there is none yet, the first write makes it, after a probe."""
    document = read_lake_document(store)
    if document is None:
        return Lake(lake_to_be_made(store), "", shared=shared)
    return Lake(store, document.id, shared=shared)


def _reopen(descriptor: StoreDescriptor, lake_id: str, shared: bool) -> Lake:
    return Lake(descriptor.open(), lake_id, shared=shared)
