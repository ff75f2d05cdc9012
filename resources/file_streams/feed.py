"""What a stream of files is made of: its declaration, and where its files come from."""

from __future__ import annotations

import shlex
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.file_streams.log import AdmittedFile, FileLogState, FileRetention
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.declaration import StreamDeclaration

MOST_AT_ONCE = 10_000
"""How many files of a folder are admitted in one commit at most; the next one admits others."""


class KnownFiles(Protocol):
    """What was admitted before, as a source of files asks for it."""

    @property
    def cursor(self) -> str:
        """The cursor of the last look, "" before the first one."""

    @property
    def all_files(self) -> bool:
        """Whether files are wanted wherever they are, not only where new ones are expected."""

    def by_path(self) -> dict[str, AdmittedFile]:
        """Return the last admission of each file, by path. Reads all pages of the log."""

    def among(self, paths: Collection[str]) -> dict[str, AdmittedFile]:
        """Return the last admission of those of these files that were admitted, by path. Reads the
        pages that may have one of them.
        """

    def has_contents(self, path: str, etag: str) -> bool:
        """Return whether a file was admitted with these contents, and was not set aside since."""


@dataclass(frozen=True, slots=True)
class Found:
    """The files to admit, in their order, and the cursor after them.

    `waiting` has the reasons why files wait, by path: they can't be admitted yet. `settled` is
    called once the files are committed, for what must not happen before, such as deleting a queue's
    messages about them. If there is `more`, the next look finds it.
    """

    files: Sequence[AdmittedFile]
    cursor: str
    waiting: dict[str, str]
    settled: Callable[[], None] | None = None
    more: bool = False


@contextmanager
def naming_large_file(path: str) -> Iterator[None]:
    """Raise AdmittedFileError for a file that needs more memory than there is: the memory may be
    too little, or the file so damaged that a length in it asks for more than any machine has.
    """
    try:
        yield
    except MemoryError as error:  # Arrow's is one
        reason = errors.first_line(error)
        raise errors.AdmittedFileError(
            f"{path} can't be read with the memory that this process has: {reason}.",
            "Run it with more memory. If a length in the file is damaged, restore it, or go on"
            f" without its records: adjunct stream set-aside STREAM {shlex.quote(path)} --reason"
            " ….",
            file=path,
        ) from error


@dataclass(frozen=True, slots=True)
class FilePiece:
    """The records [start, end) of a file, counted from 0 in the file."""

    file: AdmittedFile
    start: int
    end: int


class Feed(Protocol):
    """Where the files of a stream come from, and how they are read. Small, and can be pickled:
    Spark's tasks read with it.
    """

    def find(self, known: KnownFiles) -> Found:
        """Return the files to admit next; their order depends on what there is, not on the order
        in which it was listed.

        Raises an AdjunctError, by the declared rules, for a file that can't be admitted.
        """

    def tables(self, piece: FilePiece, columns: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        """Yield the records of a piece as (number of the first in its file, table with these
        columns), in order.

        Raises SourceChangedError for a file that is not as it was when it was admitted.
        """

    def cuts(self, file: AdmittedFile) -> Sequence[int]:
        """Return the numbers of the records, from 0 and ascending, before which a large file can be
        cut, so that tasks read its parts at once: of Parquet the first of each row group. There are
        none for a file that must be read as a whole.
        """


class FileStreamDeclaration(StreamDeclaration):
    """The declaration of a stream of files. Each source has a subclass with its options."""

    retention: FileRetention | None = None

    @property
    def source_url(self) -> str:
        """Where the files, or the table, are; "" if that has no URL."""
        return ""

    @abstractmethod
    def feed(self, lake: Lake) -> Feed:
        """Return the source of the stream's files."""

    def check_stored(self, stream: str, state: FileLogState) -> None:
        """Raise StreamExistsError if files were admitted under a declaration that this one does not
        continue.
        """
