"""The version that a reader's calls read: entered and left by each call, replaced between calls, kept by a lease."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError, DatasetError

if TYPE_CHECKING:
    from dagster_adjunct.assets.reading.version_reader import VersionReader
    from dagster_adjunct.resources.objects.lake import Lake


@dataclass(slots=True, eq=False)
class HeldVersion:
    """One version that is read, by how many calls, and the lease that keeps it from being discarded."""

    reader: VersionReader
    lease: Lease | None = None
    users: int = 0

    @property
    def leased(self) -> bool:
        """Whether a lease is held on it, and not lost."""
        return self.lease is not None and not self.lease.lost


class Holding:
    """One version at a time. Whoever changes it holds `moving`; calls that run keep the one that they entered.

    A lease is given back when its version has been replaced and the last call has left it.
    """

    def __init__(
        self, lake: Lake, name: str, first: VersionReader | AdjunctError, *, leases: bool, holder: str
    ) -> None:
        """Begin with `first`, or with the error that calls raise while there is nothing to read."""
        self._lake, self._name = lake, name
        self.leases, self._holder = leases, holder
        self._held: HeldVersion | None = None if isinstance(first, AdjunctError) else HeldVersion(first)
        self._ended: AdjunctError | None = first if isinstance(first, AdjunctError) else None
        self._lock = threading.Lock()  # never held over a request
        self.moving = threading.RLock()

    @property
    def held(self) -> HeldVersion | None:
        """The version that the next call enters; None where there is none any more."""
        return self._held

    def require(self) -> HeldVersion:
        """Return the version that the next call enters, or raise why there is none."""
        held, ended = self._held, self._ended
        if held is None:
            assert ended is not None
            raise ended.reworded(ended.problem, ended.next_step)
        return held

    def enter(self, *, leased: bool) -> HeldVersion:
        """Return the version for a call, which leaves it in the end; with a lease on it if that is asked for.

        Raises VersionDiscardedError where it was discarded before it could be leased.
        """
        leased = leased and self.leases
        while True:
            with self._lock:
                held = self.require()
                if not leased or held.leased:
                    held.users += 1
                    return held
            with self.moving:
                if held is self._held and not held.leased:
                    held.lease = self._acquire(held.reader.version)

    def leave(self, held: HeldVersion) -> None:
        """End a call."""
        with self._lock:
            held.users -= 1
            idle = not held.users and held is not self._held
        if idle:
            _let_go(held)

    def move_to(self, reader: VersionReader) -> None:
        """Let calls that begin from now on read this version; it is leased first if the one before was."""
        with self.moving:
            leased = self._held is not None and self._held.lease is not None
            self._replace(HeldVersion(reader, self._acquire(reader.version) if leased else None), None)

    def end(self, why: AdjunctError) -> None:
        """Let calls that begin from now on raise this error."""
        with self.moving:
            self._replace(None, why)

    def hold_all(self, versions: Sequence[str]) -> Lease | None:
        """Return a lease on these versions; None without leases. Raises VersionDiscardedError."""
        return self._acquire(*versions) if self.leases else None

    def drop(self) -> None:
        """Let go of the version, waiting for nothing: nobody is left who could enter it. What was lent stays leased."""
        held, self._held = self._held, None
        if held is not None and not held.users and held.lease is not None:
            held.lease.release_later()

    def _replace(self, held: HeldVersion | None, why: AdjunctError | None) -> None:
        with self._lock:
            before, self._held, self._ended = self._held, held, why
            idle = before is not None and not before.users
        if before is not None and idle:
            _let_go(before)

    def _acquire(self, *versions: str) -> Lease:
        try:
            return Lease.acquire(self._lake, self._name, versions, holder=self._holder)
        except ConfigurationError as error:
            raise DatasetError(
                f"dataset {self._name!r}: a reader could not write its lease: {error.problem}",
                f"Allow it to write below datasets/{self._name}/leases, or open with lease=False: versions may then "
                "be discarded while they are read.",
                dataset=self._name,
            ) from error


def _let_go(held: HeldVersion) -> None:
    lease, held.lease = held.lease, None
    if lease is not None:
        lease.release()
