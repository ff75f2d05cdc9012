"""The index of segments: adding one, finding those that a range touches, folding old ones into pages.

Each level of the index holds fewer than 2 * FAN entries; when one has more, its oldest FAN become a page of the
level above. So a commit writes a bounded number of entries, and a look-up reads a page a level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_adjunct.resources.objects.paging import PageRef, read_page, write_page
from dagster_adjunct.resources.streams.lake.stream_manifest import (
    Entry,
    MarkerEntry,
    Page,
    Segment,
    StreamState,
    parse_entries,
)

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.object_store import ObjectStore

FAN = 32
_PAGES_KEPT = 512
Span = tuple[int, int]


@dataclass(slots=True)
class Pages:
    """The stored pages of one stream; those read lately are kept, since a page never changes."""

    store: ObjectStore
    prefix: str
    _cache: dict[str, tuple[Entry, ...]] = field(default_factory=dict)

    def read(self, page: Page) -> tuple[Entry, ...]:
        """Return the page's entries. Raises MalformedDocumentError or ManifestMismatchError."""
        if page.key not in self._cache:
            items = read_page(self.store, PageRef(page.key, page.count, page.sha256))
            while len(self._cache) >= _PAGES_KEPT:
                self._cache.pop(next(iter(self._cache)), None)
            self._cache[page.key] = parse_entries(page.level, items, f"page {page.key!r} in {self.store.url}")
        return self._cache[page.key]

    def write(self, level: int, entries: Sequence[Entry]) -> Page:
        """Store neighbours as a new page of this level and return its summary."""
        ref = write_page(self.store, self.prefix, [entry.model_dump(mode="json") for entry in entries])
        self._cache[ref.key] = tuple(entries)
        return Page(
            key=ref.key,
            sha256=ref.sha256,
            count=ref.count,
            level=level,
            base=entries[0].base,
            next=entries[-1].next,
            appended=entries[-1].appended,
            segments=sum(entry.segments for entry in entries),
            rows=sum(entry.rows for entry in entries),
            size=sum(entry.size for entry in entries),
            marked=sum(entry.marked for entry in entries),
            latest_us=tuple(_latest(entries, p) for p in range(len(entries[0].base))),
        )


def _latest(entries: Iterable[Entry], partition: int) -> int | None:
    return max((t for e in entries if (t := e.latest(partition)) is not None), default=None)


# -- looking up


def walk(state: StreamState, pages: Pages, wanted: Callable[[Entry], bool]) -> Iterator[Segment]:
    """Yield, oldest first, the segments for which `wanted` holds; a page for which it does not is not read.

    `wanted` must hold for a page whenever it holds for one of its entries.
    """
    waiting: list[Entry] = list(reversed(state.entries()))
    while waiting:
        entry = waiting.pop()
        if not wanted(entry):
            continue
        if isinstance(entry, Page):
            waiting.extend(reversed(pages.read(entry)))
        else:
            yield entry


def all_segments(state: StreamState, pages: Pages) -> list[Segment]:
    return list(walk(state, pages, lambda _: True))


def touches(entry: Entry, spans: Mapping[int, Span]) -> bool:
    """Return whether the entry holds an offset of one of these spans, given as [start, end) by partition."""
    return any(entry.base[p] < end and start < entry.next[p] for p, (start, end) in spans.items() if start < end)


def holds_records(segment: Segment, spans: Mapping[int, Span]) -> bool:
    """Return whether one of the segment's files can hold a record of these spans."""
    return any(touches(segment, {f.partition: spans.get(f.partition, (0, 0))}) for f in segment.files)


def markers_in(state: StreamState, pages: Pages, spans: Mapping[int, Span]) -> list[MarkerEntry]:
    """Return the markers whose offsets lie in these spans, oldest first."""
    segments = walk(state, pages, lambda entry: entry.marked > 0 and touches(entry, spans))
    return [
        marker
        for segment in segments
        for marker in segment.markers
        if marker.partition in spans and spans[marker.partition][0] <= marker.offset < spans[marker.partition][1]
    ]


# -- folding


@dataclass(frozen=True, slots=True)
class Fold:
    """A page that stands for the oldest entries of the level below it. `made` is in ms since the epoch."""

    page: Page
    entries: tuple[Entry, ...]
    made: int


def foldable(state: StreamState) -> tuple[int, tuple[Entry, ...]] | None:
    """Return the level of the next page to write and its entries, or None when no level is full."""
    rows: list[Sequence[Entry]] = [state.tail, *state.levels]
    for level, entries in enumerate(rows, start=1):
        if len(entries) >= 2 * FAN:
            return level, tuple(entries[:FAN])
    return None


def folded(state: StreamState, fold: Fold | None) -> StreamState:
    """Return the state with the page in place of its entries; unchanged if somebody else was faster.

    A page older than the horizon may have been collected before any manifest named it, so it is not used.
    """
    if fold is None or fold.made < state.horizon:
        return state
    level, count = fold.page.level, len(fold.entries)
    rows: list[tuple[Entry, ...]] = [state.tail, *state.levels, ()]
    if level >= len(rows) or rows[level - 1][:count] != fold.entries:
        return state
    rows[level - 1] = rows[level - 1][count:]
    rows[level] = (*rows[level], fold.page)
    levels = tuple(row for row in rows[1:])
    while levels and not levels[-1]:
        levels = levels[:-1]
    return state.model_copy(update={"tail": rows[0], "levels": levels})


# -- rebuilding


def leaves(state: StreamState, pages: Pages) -> list[tuple[Entry, tuple[Segment, ...]]]:
    """Return the pages of level 1 and the tail's segments, oldest first, each with the segments it holds."""
    with_segments: list[tuple[Entry, tuple[Segment, ...]]] = []
    waiting: list[Entry] = list(reversed(state.entries()))
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, Segment):
            with_segments.append((entry, (entry,)))
        elif entry.level == 1:
            with_segments.append((entry, tuple(item for item in pages.read(entry) if isinstance(item, Segment))))
        else:
            waiting.extend(reversed(pages.read(entry)))
    return with_segments


def page_keys(state: StreamState, pages: Pages) -> set[str]:
    """Return the keys of all pages that the state reaches."""
    keys: set[str] = set()
    waiting: list[Entry] = state.entries()
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, Page):
            keys.add(entry.key)
            if entry.level > 1:
                waiting.extend(pages.read(entry))
    return keys


def rebuilt(state: StreamState, kept: Sequence[Entry], pages: Pages) -> StreamState:
    """Return the state with an index of exactly these segments and pages of level 1, writing what pages it needs.

    Pages that stay are used as they are; segments between them get pages of their own.
    """
    tail: list[Entry] = []
    level: list[Entry] = []
    for entry in kept:
        if isinstance(entry, Segment):
            tail.append(entry)
            continue
        level += [pages.write(1, tail[at : at + FAN]) for at in range(0, len(tail), FAN)]
        tail = []
        level.append(entry)
    while len(tail) >= 2 * FAN:
        level.append(pages.write(1, tail[:FAN]))
        del tail[:FAN]
    levels: list[tuple[Entry, ...]] = []
    while level:
        above: list[Entry] = []
        while len(level) >= 2 * FAN:
            above.append(pages.write(len(levels) + 2, level[:FAN]))
            del level[:FAN]
        levels.append(tuple(level))
        level = above
    oldest = kept[0].base if kept else state.next
    return state.model_copy(update={"tail": tuple(tail), "levels": tuple(levels), "oldest": oldest})
