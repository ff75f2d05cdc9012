"""What is known of streams of files, for people: their declaration, their files, and deletion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dagster_adjunct.resources.errors import ConfigurationError, PermanentError
from dagster_adjunct.resources.file_streams.log import (
    AdmittedFile,
    FileLog,
    FileLogState,
    list_logged,
)
from dagster_adjunct.resources.file_streams.streams import FileStreams
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects import commit_log
from dagster_adjunct.resources.objects.commit_log import Commit, DeletedObjects
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.system import registered_systems


def open_file_systems(lake: Lake) -> dict[str, FileStreams]:
    """Return the systems of streams of files, by name."""
    found = {}
    for name, factory in registered_systems().items():
        if isinstance(factory, type) and issubclass(factory, FileStreams):
            found[name] = factory(lake)
    return found


def is_of_files(name: str) -> bool:
    """Return whether this is the name of a stream of files, such as "files.clicks"."""
    factory = registered_systems().get(name.partition(".")[0])
    return "." in name and isinstance(factory, type) and issubclass(factory, FileStreams)


def find_file_stream(lake: Lake, name: str) -> tuple[FileStreams, str] | None:
    """Return the system and the short name of a stream of files ("files.clicks"), None for a
    stream of another system.
    """
    if not is_of_files(name):
        return None
    system, stream = split_stream_name(name)
    return open_file_systems(lake)[system], stream


def require_file_stream(lake: Lake, name: str) -> tuple[FileStreams, str]:
    """Return the system and the short name of a stream of files. Raises ConfigurationError."""
    found = find_file_stream(lake, name)
    if found is None:
        systems = ", ".join(f"{system}.NAME" for system in sorted(open_file_systems(lake)))
        raise ConfigurationError(
            f"{name} is no stream of files: it has none to list, to admit or to set aside.",
            f"Name one of {systems}; see adjunct stream list.",
            stream=name,
        )
    return found


def list_stored(lake: Lake) -> list[str]:
    """Return the names of the streams whose files were looked for, such as "files.clicks"."""
    found = []
    for system, streams in open_file_systems(lake).items():
        for stream in list_logged(lake, system):
            if streams.state(stream) is not None:
                found.append(f"{system}.{stream}")
    return found


def count_files(state: FileLogState | None) -> int:
    """Return how many files the log of a stream has, with those that were set aside."""
    if state is None:
        return 0
    return sum(page.count for page in state.pages) + len(state.tail)


def summarize(streams: FileStreams, stream: str) -> dict[str, Any]:
    """Return a line about a stream, as `adjunct stream list` shows it."""
    state = streams.state(stream)
    declared = streams.declaration(stream)
    return {
        "name": f"{streams.name}.{stream}",
        "partitions": declared.partitions,
        "key": list(declared.key),
        "records": 0 if state is None else state.next - state.oldest,
        "files": count_files(state),
    }


class Look(NamedTuple):
    """Why files that are in the source wait, by path, and why no file can be admitted, "" if files
    can be.
    """

    waiting: dict[str, str]
    problem: str


def look_for_waiting(streams: FileStreams, stream: str) -> Look:
    """Return which files wait, and why none can be admitted. Admits nothing."""
    try:
        return Look(streams.waiting(stream), "")
    except PermanentError as error:
        return Look({}, str(error))


def describe(streams: FileStreams, stream: str) -> dict[str, Any]:
    """Return the declaration of a stream, its files and offsets, and which files wait, and why.

    Looks at the source, but admits nothing. `problem` is why files can't be admitted, "" if they
    can.
    """
    declared = streams.declaration(stream).model_dump(mode="json")
    state = streams.state(stream)
    look = look_for_waiting(streams, stream)
    commit = streams.file_log(stream).log.current()
    return {
        **summarize(streams, stream),
        "set_aside": {} if state is None else dict(state.set_aside),
        "waiting": look.waiting,
        "problem": look.problem,
        "oldest": "0" if state is None else str(state.oldest),
        "upcoming": "0" if state is None else str(state.next),
        "commits": 0 if commit is None else commit.number,
        "changed_at": None if commit is None else commit.created_at,
        "moved": [] if state is None else [move.describe() for move in state.moved],
        "declared": {
            name: value
            for name, value in declared.items()
            if name not in ("columns", "key", "partitions")
        },
        "schema": declared["columns"],
    }


def list_present(streams: FileStreams, stream: str) -> Mapping[str, str] | None:
    """Return the ETags of the files that exist, by path; None for a table, and for a source that
    can't be listed.
    """
    try:
        return streams.present_files(stream)
    except PermanentError:
        return None


def list_files(
    streams: FileStreams,
    stream: str,
    *,
    problems: bool = False,
    present: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Return the files of a stream in the order of admission, each with its state; with `problems`,
    only those that are set aside.

    A file is "redelivered" if it was set aside and has been admitted with later contents since, and
    "dropped" if retention has dropped its records. With `present`, the ETags of the files that
    exist by path, admitted files may be "gone" or "overwritten".
    """
    streams.declaration(stream)  # raises the error for a stream that does not exist
    state = streams.state(stream)
    if state is None:
        return []
    files = []
    last: dict[str, AdmittedFile] = {}  # of each file that was ever set aside, its last admission
    for file in streams.file_log(stream).files(state):
        if file.problem or file.path in last:
            last[file.path] = file
        if file.problem or not problems:
            files.append(file)
    found = []
    for file in files:
        is_set_aside = bool(file.problem) and file == last[file.path]
        if problems and not is_set_aside:
            continue
        found.append(
            {
                "file": file.path,
                "state": "set aside" if is_set_aside else _state_of(file, state.oldest, present),
                "offset": file.first,
                "records": file.rows,
                "bytes": file.size,
                "modified": file.modified_at,
                "admitted": file.admitted_at,
                "problem": file.problem,
            }
        )
    return found


def _state_of(file: AdmittedFile, oldest: int, present: Mapping[str, str] | None) -> str:
    """Return the state of a file that is not set aside; `oldest` is the first offset that is
    kept.
    """
    if file.problem:
        return "redelivered"
    if file.rows > 0 and file.next <= oldest:
        return "dropped"
    if present is None or present.get(file.path) == file.etag:
        return "admitted"
    return "overwritten" if file.path in present else "gone"


def list_deletable_objects(log: FileLog, last: Commit) -> dict[str, int]:
    """Return the sizes of the objects that deleting the stream's log deletes, by key."""
    sizes = commit_log.list_log_objects(log.log)
    if not commit_log.is_deletion_commit(last):
        return sizes
    return {key: sizes[key] for key in commit_log.exclude_newer_manifests(log.log, last, sizes)}


def delete_log(log: FileLog, seen: Commit, *, reason: str, by: str) -> DeletedObjects:
    """Forget which files a stream had, or complete an interrupted deletion; the files stay.

    Raises CommitConflictError if the stream has changed since the commit `seen`.
    """
    if not commit_log.is_deletion_commit(seen):
        last = commit_log.commit_deletion(log.log, seen, reason=reason, by=by)
    else:
        last = seen
    sizes = list_deletable_objects(log, last)
    now = log.log.current()
    has_changed = now is None or now.id != last.id
    if has_changed:  # somebody else has deleted the log, or admits files to it again
        return DeletedObjects(0, 0, left=True)
    log.log.store.delete_many([*sizes])
    return DeletedObjects(len(sizes), sum(sizes.values()))
