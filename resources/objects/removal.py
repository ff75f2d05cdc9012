"""Deletes what a commit log holds: first the pointer, by a last commit that says so, then the objects.

The last commit and its pointer stay, so that a writer who read the log before loses its race, and that what is made
anew under the name is told from what was there. Whoever is killed half-way is repeated.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.commit_log import Commit, CommitLog

_DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Swept:
    """What was deleted: objects, and their size in bytes. `left`: what is left lies beside something made anew."""

    objects: int
    size: int
    left: bool = False


def is_deleted(commit: Commit | None) -> bool:
    """Whether the last thing that was committed is that all of it is deleted."""
    return commit is not None and _DELETED in commit.body


def deletion(commit: Commit) -> dict[str, Any]:
    """Return what was said when it was deleted: when, by whom, why, and what the caller added."""
    return dict(commit.body[_DELETED])


def commit_deletion(log: CommitLog, parent: Commit, *, reason: str, by: str, **more: Any) -> Commit:
    """Make the deletion the last commit. Raises CommitConflictError where somebody committed after `parent`."""
    record = {"at": log.now().isoformat(), "by": by, "reason": reason, **more}
    return log.commit(parent, {_DELETED: record}, by=by)


def objects_of(log: CommitLog, spared: Collection[str] = ()) -> dict[str, int]:
    """Return the objects below the log's prefix and their sizes, without its pointer, and without those spared."""
    sizes = {item.key: item.size for item in log.store.list(f"{log.prefix}/")}
    return {key: size for key, size in sizes.items() if key != log.pointer_key and key not in spared}


def older_than(log: CommitLog, commit: Commit, keys: Collection[str]) -> list[str]:
    """Return the keys without the manifests of this commit and of later ones, which may be about to be current."""
    manifests = f"{log.prefix}/manifests/"

    def stays(key: str) -> bool:
        number = key.removeprefix(manifests)[:12]
        later = number.isdecimal() and int(number) > commit.number
        return key == commit.manifest_key or (key.startswith(manifests) and later)

    return [key for key in keys if not stays(key)]
