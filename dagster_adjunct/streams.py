"""Streams: what is read and written partition by partition, how streams are kept, and stream systems of your own."""

from __future__ import annotations

from dagster_adjunct.orchestration.operators.event_time import ARRIVAL
from dagster_adjunct.resources.streams.checksum import records_checksum
from dagster_adjunct.resources.streams.lake.manifest import CompactionPolicy, Retention
from dagster_adjunct.resources.streams.registry import open_system
from dagster_adjunct.resources.streams.system import (
    RECORD_META,
    AppendResult,
    Marker,
    NewStreams,
    OffsetRange,
    SourceRange,
    Sources,
    StreamInfo,
    StreamSystem,
    register_system,
)

__all__ = [
    "ARRIVAL",
    "RECORD_META",
    "AppendResult",
    "CompactionPolicy",
    "Marker",
    "NewStreams",
    "OffsetRange",
    "Retention",
    "SourceRange",
    "Sources",
    "StreamInfo",
    "StreamSystem",
    "open_system",
    "records_checksum",
    "register_system",
]
