"""Named readers: consumers outside of applications, whose positions in streams of the lake are kept by name."""

from __future__ import annotations

from dagster_adjunct.resources.streams.lake.readers import NewRecords, ReaderInfo, list_readers, read_new, remove_reader

__all__ = [
    "NewRecords",
    "ReaderInfo",
    "list_readers",
    "read_new",
    "remove_reader",
]
