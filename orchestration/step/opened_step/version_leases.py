"""The leases of a run on the dataset versions that its batches read: taken before an intent names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.assets.unbounded.transient_version import is_transient
from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.resources.errors import VersionDiscardedError

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects import Lake


class VersionLeases:
    """One lease a dataset, on what the newest batch reads of it; `close` lets go of all."""

    def __init__(self, lake: Lake, holder: str) -> None:
        self._lake, self._holder = lake, holder
        self._leases: dict[str, Lease] = {}

    def take(
        self,
        versions: Mapping[str, str | None],
        over_time: Mapping[str, Sequence[str]] | None = None,
        *,
        reopened: bool = False,
    ) -> list[str]:
        """Lease what a batch reads, before its intent says so; from then on the open intent keeps it as well.

        Raises VersionDiscardedError, but for what a `reopened` batch was begun with: that may be gone from the versions
        that there are, and its intent alone keeps it. The datasets are returned of which that is so.
        """
        left: list[str] = []
        for name, version in versions.items():
            if version is None or is_transient(version):
                continue
            held, wanted = self._leases.get(name), {version, *(over_time or {}).get(name, ())}
            if held is not None and wanted <= set(held.versions):
                continue
            try:
                self._leases[name] = Lease.acquire(self._lake, name, sorted(wanted), holder=self._holder)
            except VersionDiscardedError:
                if not reopened:  # else an erasure has rewritten it since
                    raise
                left.append(name)
                continue
            if held is not None:
                held.release()
        return left

    def check_held(self) -> None:
        """Raise LeaseLostError if a version that is being read is held no more."""
        for lease in self._leases.values():
            lease.check()

    def close(self) -> None:
        """Let go of the versions that were read."""
        for lease in self._leases.values():
            lease.release()
