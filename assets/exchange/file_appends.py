"""Appends files to a stream of the lake by hand, each once, however often it is repeated.

A file is its own producer, named by a digest of its bytes before compression; its parts of 500,000
records are the sequences. So a file that was appended before, under any name, adds nothing, and an
interrupted append goes on with the next part. The stream remembers the files that were appended
last (`FILE_PRODUCERS`), separately from its other producers.

All files are read and checked before anything is appended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    SchemaMismatchError,
    translate_file_errors,
)
from dagster_adjunct.resources.files.formats import DeclaredFiles, FileFormat
from dagster_adjunct.resources.files.opened import open_decompressed, translate_read_errors
from dagster_adjunct.resources.files.tree import ListedFile, LocalTree
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.paths import split_path
from dagster_adjunct.resources.streams.declaration import StreamDeclaration
from dagster_adjunct.resources.streams.lake.append import FILE_PRODUCER
from dagster_adjunct.resources.streams.lake.streams import LakeStreams

PART = 500_000
_FORMATS: dict[str, FileFormat] = {
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
_COMPRESSED = (".gz", ".bz2", ".zst")


@dataclass(frozen=True, slots=True)
class AppendedFile:
    """What was done, or would be done, with a file: `records` are those in it, `appended` those
    added now.

    `same_as` is an earlier file of the same call with the same contents.
    """

    file: str
    records: int
    appended: int
    same_as: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-able values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Source:
    """A file to append, and the producer under whose name its records are appended."""

    name: str
    declared: DeclaredFiles
    file: ListedFile
    producer: str

    def parts(self) -> Iterator[pa.Table]:
        """Yield the records in tables of PART records; the last one has the rest, and is empty
        without records.
        """
        waiting = [self.declared.schema.to_arrow().empty_table()]
        for _, table in self.declared.tables(self.file):
            waiting.append(table)
            while sum(each.num_rows for each in waiting) >= PART:
                joined = pa.concat_tables(waiting)
                yield joined.slice(0, PART)
                waiting = [joined.slice(PART)]
        yield pa.concat_tables(waiting)


def append_files(
    lake: Lake,
    stream: str,
    files: Sequence[Path],
    *,
    format: FileFormat | None = None,
    dry_run: bool = False,
) -> list[AppendedFile]:
    """Append each file's records to a stream of the lake, unless it was appended before; return
    what was done.

    The format is that of the file's name, unless `format` names it. Columns and types must be the
    stream's. With `dry_run`, files are only read and checked. Raises SchemaMismatchError with the
    file and line, ConfigurationError for a file that can't be read, StreamNotFoundError, and what
    `LakeStreams.append` raises.
    """
    streams = LakeStreams(lake)
    _, state = streams.state(stream)
    sources = [
        _open_source(path, f"stream lake.{stream}", state.declaration, format) for path in files
    ]
    former = streams.info(stream).former
    records = [_count_checked(source, former) for source in sources]
    firsts: dict[str, _Source] = {}
    done: list[AppendedFile] = []
    for source, count in zip(sources, records, strict=True):
        first = firsts.setdefault(source.producer, source)
        if first is not source:
            done.append(AppendedFile(source.name, count, 0, same_as=first.name))
            continue
        _, state = streams.state(stream)  # anew: another process may append the same file
        sent = state.producers.get(source.producer, ())
        last_sent = sent[-1].sequence if sent else 0  # parts are appended one after the other
        added = 0
        for sequence, part in enumerate(source.parts(), 1):
            if sequence <= last_sent:
                continue
            added += part.num_rows
            if not dry_run:
                streams.append(stream, part, producer=source.producer, sequence=sequence)
        done.append(AppendedFile(source.name, count, added))
    return done


def _explain_former(error: SchemaMismatchError, former: Mapping[str, str]) -> SchemaMismatchError:
    """Return the error with what became of the column that it is about, and of its members, if the
    stream had them under other names.
    """
    became = []
    for path, now in former.items():
        columns = {split_path(name)[:1] for name in (path, now.removeprefix("renamed to "))}
        if error.column is not None and split_path(error.column)[:1] in columns:
            became.append(f"{path} was {now}")
    if not became:
        return error
    step = f"In the stream, {', '.join(became)}: change the file alike."
    return error.reworded(error.problem, f"{step} {error.next_step}")


def _open_source(
    path: Path, what: str, stream: StreamDeclaration, format: FileFormat | None
) -> _Source:
    """Return a file to append, with its producer. Raises ConfigurationError for a file that can't
    be read or whose name tells no format.
    """
    tree = LocalTree(str(path.absolute().parent))
    with translate_file_errors(path, "a file to append"):
        if not path.is_file():
            raise ConfigurationError(
                f"{path} is {'a folder' if path.is_dir() else 'not there'}: expected a file.",
                "Name files; a shell lists those of a folder: FOLDER/*.csv.",
                url=str(path),
            )
        file = tree.listed(path.name)
    schema = stream.columns
    found = format or format_of(path)
    declared = DeclaredFiles(
        tree, found, schema, what, values=not schema.sensitive, required=stream.key
    )
    digest = _contents_digest(path, declared.describe_file(file))
    return _Source(str(path), declared, file, f"{FILE_PRODUCER}{digest}")


def _contents_digest(path: Path, where: str) -> str:
    """Return a digest of a file's contents, the same for a compressed copy of it."""
    digest = hashlib.blake2b(digest_size=16)
    with translate_read_errors(where), open_decompressed(path, path.name) as contents:
        while data := contents.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def format_of(path: Path) -> FileFormat:
    """Return the format that a file's name ends in, before that of a compression. Raises
    ConfigurationError.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    found = None
    if suffixes:
        found = _FORMATS.get(suffixes[-1])
    if found is None:
        raise ConfigurationError(
            f"the name of {path} does not say its format: expected {', '.join(_FORMATS)}.",
            f"Give --format {' or '.join(get_args(FileFormat))}.",
            setting="--format",
            url=str(path),
        )
    return found


def _count_checked(source: _Source, former: Mapping[str, str]) -> int:
    """Return the number of records in a file. Raises what reading it raises; `former` says what
    became of columns that the stream had before.
    """
    try:
        return sum(table.num_rows for _, table in source.declared.tables(source.file))
    except SchemaMismatchError as error:
        raise _explain_former(error, former) from error
