"""What a listing of files says: which folders there are, which are complete, and what completion objects promise.

Pure decisions over what was listed, without I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from dagster_adjunct.assets.declaration.discard_policy import natural_order
from dagster_adjunct.resources.files import FoundFile


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder as it was listed. `path` is "" for the place itself; `complete` is its completion object."""

    path: str
    files: tuple[FoundFile, ...]
    complete: FoundFile | None


@dataclass(frozen=True, slots=True)
class Promise:
    """What a completion object says of the files; `problem` says why it can't be understood.

    `valid_from` is since when the version is valid; a time without its zone is UTC.
    """

    rows: int | None = None
    checksum: str | None = None
    problem: str = ""
    valid_from: datetime | None = None


def folders_in(files: list[FoundFile], complete: str) -> list[Folder]:
    """Return the folders that hold files, and "" where files lie beside them.

    The place itself is one folder with all that is below it where the completion object lies there. Files called
    `_…` or `.…`, and what is in folders called so, are no data.
    """
    by_name: dict[str, list[FoundFile]] = {}
    for file in files:
        name = file.path.partition("/")[0] if "/" in file.path else ""
        if not _hidden(name):
            by_name.setdefault(name, []).append(file)
    folders = []
    for name, inside in by_name.items():
        marker = f"{name}/{complete}" if name else complete
        data = [file for file in inside if file.path != marker and not any(map(_hidden, file.path.split("/")))]
        ending = next((file for file in inside if file.path == marker), None)
        if name or data or ending:
            folders.append(Folder(name, _by_name(data), ending))
    whole = next((folder for folder in folders if not folder.path and folder.complete), None)
    if whole is None:
        return folders
    rest = [folder for folder in folders if folder.path]
    everything = [file for folder in folders for file in folder.files]
    return [Folder("", _by_name(everything), whole.complete), *rest]


def promise_in(data: bytes) -> Promise:
    """Return what a completion object says: nothing unless it is a JSON object; unknown fields are others' own."""
    try:
        promised = json.loads(data)
    except ValueError:
        return Promise(problem="is neither empty nor JSON") if data.strip() else Promise()
    if not isinstance(promised, dict):
        return Promise(problem=f"holds a JSON {type(promised).__name__} where an object is expected")
    rows, checksum = promised.get("rows"), promised.get("checksum")
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 0):
        return Promise(problem=f"says rows {rows!r}: expected a whole number")
    if checksum is not None and not isinstance(checksum, str):
        return Promise(problem=f"says checksum {checksum!r}: expected a text")
    valid_from = promised.get("valid_from")
    try:
        told = None if valid_from is None else datetime.fromisoformat(valid_from)
    except (ValueError, TypeError):
        return Promise(problem=f"says valid_from {valid_from!r}: expected a time such as 2026-01-31T00:00:00Z")
    return Promise(rows, checksum, valid_from=told if told is None or told.tzinfo else told.replace(tzinfo=UTC))


def _by_name(files: Iterable[FoundFile]) -> tuple[FoundFile, ...]:
    return tuple(sorted(files, key=lambda file: natural_order(file.path)))


def _hidden(name: str) -> bool:
    return name.startswith(("_", "."))
