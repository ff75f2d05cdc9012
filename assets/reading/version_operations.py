"""What is known of a dataset's versions, and what operators do to them, without reading an entry of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import datetime
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.versions.operator_actions import (
    HistoryEntry,
    drop_version,
    force_version,
    pin_version,
    roll_back,
    unpin_version,
    withdraw_version,
)
from dagster_adjunct.assets.versions.stored_manifest import stored_body

if TYPE_CHECKING:
    from dagster_adjunct.assets.versions.bounded_manifest import BoundedManifest
    from dagster_adjunct.assets.versions.dataset_log import DatasetLog
    from dagster_adjunct.assets.versions.manifest import DatasetManifest
    from dagster_adjunct.assets.versions.sealed_version import VersionRef

_HIDDEN = {"format", "version", "delivered", "known", "next_generation", "next_number", "doomed"}


class VersionOperations(ABC):
    """The part of a dataset that reads and writes its log. Every call reads the pointer anew.

    What changes something is one commit, and for a member of a version set one of the whole set. It needs a `reason`
    and who did it (`by`), which the history keeps.
    """

    @property
    @abstractmethod
    def _log(self) -> DatasetLog:
        """The dataset's commits."""

    @abstractmethod
    def _newest(self) -> DatasetManifest:
        """Return the newest manifest. Raises DatasetNotFoundError before the first commit."""

    # -- what is known

    def versions(self) -> tuple[VersionRef, ...]:
        """Return all retained versions of a bounded dataset, in the order in which they were made."""
        return self._newest().listed

    def history(self, limit: int | None = 100) -> list[HistoryEntry]:
        """Return the newest commits, newest first: what was done to which version, by whom, when and why.

        Each says what was served after it, and whether that can still be read.
        """
        commits = list(self._log.history(limit))
        now = commits[0][1] if commits else None
        return [
            HistoryEntry(
                number=commit.number,
                at=commit.created_at,
                by=commit.by,
                action=manifest.change.action if manifest.change else "commit",
                version=manifest.change.version if manifest.change else None,
                reason=manifest.change.reason if manifest.change else "",
                served=manifest.version.id if manifest.version else None,
                readable=now is not None and manifest.version is not None and now.retains(manifest.version.id),
            )
            for commit, manifest in commits
        ]

    def describe(self) -> dict[str, Any]:
        """Return what the dataset is and holds, as JSON-able values. Raises DatasetNotFoundError."""
        manifest = self._newest()
        described = {name: value for name, value in stored_body(manifest).items() if name not in _HIDDEN}
        version = manifest.version
        described["version"] = None
        if version is not None:
            described["version"] = {
                **version.model_dump(mode="json", exclude={"generations", "digest", "positioned"}),
                "stored_rows": version.stored_rows,
                "bytes": sum(generation.size for generation in version.generations),
                "files": sum(len(generation.files) for generation in version.generations),
                "generations": len(version.generations),
            }
        return described

    # -- what operators do

    def pin(self, version: str, *, reason: str, by: str, expires_at: datetime | None = None) -> BoundedManifest:
        """Serve this version, by id or name, whatever seals meanwhile, until `unpin` or expiry."""
        return pin_version(self._log, version, reason=reason, by=by, expires_at=expires_at)

    def unpin(self, *, reason: str, by: str) -> BoundedManifest:
        """Serve again what the last switch chose."""
        return unpin_version(self._log, reason=reason, by=by)

    def rollback(self, to: str | None = None, *, reason: str, by: str) -> BoundedManifest:
        """Serve an earlier version, by id or name (None: the one before), until the next one seals."""
        return roll_back(self._log, to, reason=reason, by=by)

    def withdraw(self, version: str, *, reason: str, by: str) -> BoundedManifest:
        """Never serve this version, by id or name, again; what was served before it takes its place."""
        return withdraw_version(self._log, version, reason=reason, by=by)

    def force(self, version: str, *, reason: str, by: str, make_current: bool = False) -> BoundedManifest:
        """Publish a rejected version, by id or name, after all; one that is older than what is served beside it.

        `make_current` serves it all the same, as `rollback` to it does later.
        """
        return force_version(self._log, version, reason=reason, by=by, make_current=make_current)

    def drop(self, version: str, *, reason: str, by: str) -> BoundedManifest:
        """Forget a rejected or withdrawn version, by id or name; the next discard deletes its files."""
        return drop_version(self._log, version, reason=reason, by=by)
