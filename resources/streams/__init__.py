"""Streams: partitioned, ordered records at offsets, read in exact ranges."""

from resources.streams.checksum import records_checksum
from resources.streams.declaring import StreamDescription
from resources.streams.document import CompactionPolicy, Retention
from resources.streams.lake import LakeStreams
from resources.streams.ssp import SystemStreamPartition
from resources.streams.system import (
    EPOCH,
    META,
    RECORD_META,
    AppendResult,
    Marker,
    OffsetRange,
    StreamInfo,
    StreamSystem,
    open_system,
    register_system,
)

__all__ = [
    "EPOCH",
    "META",
    "RECORD_META",
    "AppendResult",
    "CompactionPolicy",
    "LakeStreams",
    "Marker",
    "OffsetRange",
    "Retention",
    "StreamDescription",
    "StreamInfo",
    "StreamSystem",
    "SystemStreamPartition",
    "open_system",
    "records_checksum",
    "register_system",
]
