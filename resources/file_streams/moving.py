"""Moving the folder of a stream: the log keeps what was admitted, and gets another URL.

The log has the names of files below the folder, so they stay. An ETag of a local file also changes
with a copy: that of each file which is found at the new place is replaced by the one that it has
there, or the next look would take the file for one with other contents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.file_streams.folder import FolderDeclaration, FolderStreams
from dagster_adjunct.resources.file_streams.log import (
    AdmittedFile,
    FileContents,
    FileLogState,
    MovedFolder,
)
from dagster_adjunct.resources.files.tree import FileTree, ListedFile, check_folder_url, open_tree
from dagster_adjunct.resources.objects.commit_log import Commit
from dagster_adjunct.resources.times import to_microseconds

Admissions = Mapping[str, Sequence[AdmittedFile]]
"""The admissions of each file in their order, by path."""


@dataclass(frozen=True, slots=True)
class Move:
    """What moving a stream's folder from the URL `before` has found, and the stream's `state` after
    it.

    `same` files are there as they were admitted. `changed` ones are there, but with another size or
    time, and so perhaps with other contents; `missing` ones have records, and are not there.
    """

    before: str
    state: FileLogState
    same: int
    changed: tuple[str, ...]
    missing: tuple[str, ...]


class _Compared(NamedTuple):
    """The new ETags of the files that are as they were admitted, and the others."""

    same: dict[FileContents, str]
    changed: list[str]
    missing: list[str]


def plan_move(
    streams: FolderStreams,
    stream: str,
    state: FileLogState,
    url: str,
    *,
    accept_changed: bool,
    reason: str,
    by: str,
) -> Move:
    """Look at the files in a folder to which those of a stream were moved, and return what was
    found. Commits nothing.

    With `accept_changed`, a file of another time, but the same size, is taken for the one that was
    admitted. Raises ConfigurationError if there is no such folder.
    """
    check_folder_url(url)
    name = f"{streams.name}.{stream}"
    stored = FolderDeclaration.model_validate(state.declared)
    stored.listing.check(url, f"stream '{name}'")
    tree = open_tree(url)
    absence = tree.absence()
    if absence:
        raise errors.ConfigurationError(
            f"stream {name} can't be moved to {tree.url}: {absence}.",
            "Move its files there first, or correct the URL.",
            argument="url",
            stream=name,
        )
    log = streams.file_log(stream)
    admitted: dict[str, list[AdmittedFile]] = {}
    for file in log.files(state):
        admitted.setdefault(file.path, []).append(file)
    found = _compare(admitted, tree, state.oldest, accept_changed=accept_changed)
    moved = MovedFolder(
        before=stored.url, after=url, at=to_microseconds(log.log.now()), by=by, reason=reason
    )
    declared = stored.model_copy(update={"url": url}).model_dump(mode="json")
    after = log.replace_etags(state, found.same).model_copy(
        update={"declared": declared, "moved": (*state.moved, moved)}
    )
    return Move(
        stored.source_url, after, len(found.same), tuple(found.changed), tuple(found.missing)
    )


def commit_move(
    streams: FolderStreams, stream: str, plan: Callable[[FileLogState], Move], *, by: str
) -> Move:
    """Commit the move that `plan` returns for the current state of a stream; if others commit
    meanwhile, it is planned again. What `plan` raises leaves everything as it was.
    """
    log = streams.file_log(stream)
    planned: Move | None = None

    def decide(commit: Commit | None) -> dict[str, Any] | None:
        nonlocal planned
        planned = plan(require_state(streams, stream, log.parse(commit)))
        return planned.state.body()

    log.transact(decide, by=by)
    assert planned is not None
    return planned


def require_state(streams: FolderStreams, stream: str, state: FileLogState | None) -> FileLogState:
    """Return the state of a stream. Raises StreamNotFoundError if its files were never looked
    for.
    """
    if state is not None:
        return state
    name = f"{streams.name}.{stream}"
    raise errors.StreamNotFoundError(
        f"no file of {name} was ever admitted, so there is nothing to move.",
        "Correct the name (adjunct stream list), or declare the stream with the URL.",
        stream=name,
    )


def _compare(
    admitted: Admissions, tree: FileTree, oldest: int, *, accept_changed: bool
) -> _Compared:
    """Compare what was admitted with the files in a folder."""
    present = {file.path: file for file in tree.list()}
    compared = _Compared({}, [], [])
    for path, admissions in sorted(admitted.items()):
        now = present.get(path)
        if now is None:
            if any(file.is_read and file.next > oldest for file in admissions):
                compared.missing.append(path)
            continue
        as_admitted = _find_admission(admissions, now, accept_changed=accept_changed)
        if as_admitted is None:
            compared.changed.append(path)
        else:
            compared.same[as_admitted.contents] = now.etag
    return compared


def _find_admission(
    admissions: Sequence[AdmittedFile], now: ListedFile, *, accept_changed: bool
) -> AdmittedFile | None:
    """Return the last admission of a file that had the contents which the file has now, None if
    that is not known: they have one ETag, or one size and time, or one size if that is enough.
    """
    modified = to_microseconds(now.modified)
    for file in reversed(admissions):
        if file.etag == now.etag:
            return file
    for file in reversed(admissions):
        if file.size == now.size and (accept_changed or file.modified == modified):
            return file
    return None
