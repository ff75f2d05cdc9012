"""Which files of a folder a look lists: all, those after the last one, those of the last days, or
those of which an S3 bucket has notified a queue.

All but the first know where new files are expected, and so list few old ones. What they miss is
found by a look for all files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Protocol

from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.documents import StoredDocument
from dagster_adjunct.resources.file_streams.notifications import Notifications, Notified
from dagster_adjunct.resources.files.tree import FileTree, ListedFile, S3Tree
from dagster_adjunct.resources.threads import map_in_threads

_THREADS = 16
# Each day takes a request, and a listing of the whole folder one for each 1,000 files: after a long
# pause, or a late file of long ago, it takes fewer.
_MOST_DAYS = 100
_MOST_MESSAGES = 1_000
_DIRECTIVES = frozenset("YmdjyBb%")


class ListingCursor(StoredDocument):
    """Up to where files were looked for: `after` is the last name of which all before were seen,
    `day` the first day on which files may still wait. `kind` is the way of listing.
    """

    kind: str
    after: str = ""
    day: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """The files that one look found. `is_partial`: there may be files that it has not listed.
    `in_name_order`: they are admitted by name, not by time. `more`: a queue has more messages.
    `waiting` says what could not be used, and why.
    """

    files: Sequence[ListedFile]
    is_partial: bool = False
    in_name_order: bool = False
    more: bool = False
    waiting: dict[str, str] = field(default_factory=dict)

    def is_late(self, path: str) -> bool:
        """Return whether a file is where none was expected any more."""
        return False

    def cursor(self, done: Collection[str], left: Collection[str]) -> str:
        """Return the cursor after the files `done` were admitted, and the files `left` were not;
        "" if the next look is to be like the first one.
        """
        return ""

    def settled(self, left: Collection[str]) -> Callable[[], None] | None:
        """Return what to call once all files except those `left` are committed, None for
        nothing.
        """
        return None


class Listing(Protocol):
    """A way of finding new files. Can be pickled."""

    def look(self, tree: FileTree, cursor: str, all_files: bool) -> Look:
        """Return the files after the cursor of the last look, or all."""


@dataclass(frozen=True, slots=True)
class AllFiles:
    """Lists all files each time."""

    def look(self, tree: FileTree, cursor: str, all_files: bool) -> Look:
        return Look(tree.list())


@dataclass(frozen=True, slots=True)
class AfterLast:
    """Lists the files whose names come after the last one that was admitted."""

    def look(self, tree: FileTree, cursor: str, all_files: bool) -> Look:
        before = _read_cursor("after-last", cursor)
        if before is None:
            return _LookAfter(tree.list(), in_name_order=True)
        files = tree.list(after="" if all_files else before.after)
        return _LookAfter(files, is_partial=not all_files, in_name_order=True, after=before.after)


@dataclass(frozen=True, slots=True)
class _LookAfter(Look):
    """The files found by name. `after` is the last name of which all before had been seen, None at
    the first look.
    """

    after: str | None = None

    def is_late(self, path: str) -> bool:
        return self.after is not None and path <= self.after

    def cursor(self, done: Collection[str], left: Collection[str]) -> str:
        # The next look lists what comes after the cursor: so it stays before the first name that is
        # left. Late files that wait are found by the next look for all files.
        first_left = min((path for path in left if not self.is_late(path)), default=None)
        after = self.after or ""
        for path in done:
            if first_left is None or path < first_left:
                after = max(after, path)
        return ListingCursor(kind="after-last", after=after).model_dump_json(exclude_defaults=True)


@dataclass(frozen=True, slots=True)
class DayFolders:
    """Lists the folders of the last days in UTC, such as "day=%Y-%m-%d/", of tomorrow (clocks
    differ), and of days since which files wait or nobody has looked.
    """

    prefix: str
    days_back: int

    def look(self, tree: FileTree, cursor: str, all_files: bool) -> Look:
        before = _read_cursor("days", cursor)
        today = datetime.now(UTC).date()
        if before is None:
            since = today - timedelta(days=self.days_back)
        else:
            since = min(date.fromisoformat(before.day), today) - timedelta(days=self.days_back)
        count = (today - since).days + 2  # with today and tomorrow
        days = [since + timedelta(days=number) for number in range(count)]
        folders = {day.strftime(self.prefix): day for day in days}
        is_long = count > _MOST_DAYS  # too many folders to list one by one
        is_whole = all_files or before is None or is_long
        if is_whole:
            files = tree.list()
        else:
            listed = map_in_threads(tree.list, folders, _THREADS)
            files = [file for part in listed for file in part]
        return _LookAtDays(
            files, is_partial=not is_whole, folders=folders, today=today, is_first=before is None
        )


@dataclass(frozen=True, slots=True)
class _LookAtDays(Look):
    """The files found in the folders of these days, by folder, or in all folders."""

    folders: dict[str, date] = field(default_factory=dict)
    today: date = date.min
    is_first: bool = False

    def is_late(self, path: str) -> bool:
        return not self.is_first and self._day_of(path) is None

    def cursor(self, done: Collection[str], left: Collection[str]) -> str:
        days = [self.today]
        for path in left:
            day = self._day_of(path)
            if day is not None:
                days.append(day)
            elif self.is_first:
                return ""  # only another look at all files would find it
        first = min(days).isoformat()
        return ListingCursor(kind="days", day=first).model_dump_json(exclude_defaults=True)

    def _day_of(self, path: str) -> date | None:
        """Return the day in whose folder a file is, None if that is not one of these days."""
        for folder, day in self.folders.items():
            if path.startswith(folder):
                return day
        return None


@dataclass(frozen=True, slots=True)
class NotifiedFiles:
    """Asks for the files of which the bucket has notified a queue; the first look lists all."""

    notifications: Notifications

    def look(self, tree: FileTree, cursor: str, all_files: bool) -> Look:
        before = _read_cursor("notifications", cursor)
        if all_files or before is None:
            return _NotifiedLook(tree.list(), is_first=before is None)
        assert isinstance(tree, S3Tree)
        notified = self.notifications.receive(tree.bucket, tree.prefix, _MOST_MESSAGES)
        found = map_in_threads(tree.find, notified.paths, _THREADS)
        return _NotifiedLook(
            [file for file in found if file is not None],
            is_partial=True,
            more=notified.more,
            waiting=dict(notified.unusable),
            notifications=self.notifications,
            notified=notified,
        )


@dataclass(frozen=True, slots=True)
class _NotifiedLook(Look):
    """The files of which a queue has notified, with what it said; without a queue, all files."""

    is_first: bool = False
    notifications: Notifications | None = None
    notified: Notified | None = None

    def cursor(self, done: Collection[str], left: Collection[str]) -> str:
        if self.is_first and left:
            return ""  # perhaps there is no notification of what is left
        return ListingCursor(kind="notifications").model_dump_json(exclude_defaults=True)

    def settled(self, left: Collection[str]) -> Callable[[], None] | None:
        if self.notifications is None or self.notified is None:
            return None
        # The messages about files that wait come again.
        return partial(self.notifications.delete, self.notified.receipts_without(left))


def check_date_prefix(prefix: str) -> None:
    """Raise ConfigurationError unless a text is the folder of a day."""
    parts = prefix.split("%")
    directives = {part[:1] for part in parts[1:]}
    is_day = "d" in directives or "j" in directives
    if not (is_day and directives <= _DIRECTIVES and prefix.endswith("/") and prefix[0] != "/"):
        raise argument_error(
            f"date_prefix {prefix!r} is not the folder of a day",
            'a path below the folder, such as "day=%Y-%m-%d/" or "%Y/%m/%d/"',
            argument="date_prefix",
        )


def _read_cursor(kind: str, text: str) -> ListingCursor | None:
    """Return the cursor of the last look; None before the first one, and after one of another
    kind.
    """
    if not text:
        return None
    cursor = ListingCursor.model_validate_json(text)
    if cursor.kind != kind:
        return None
    return cursor
