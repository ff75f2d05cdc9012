"""Streams: ranges of offsets, retention and compaction, and what you need to write a stream
system of your own.
"""

from dagster_adjunct.orchestration.operators.event_times import ARRIVAL as ARRIVAL
from dagster_adjunct.resources.bucketing.hashing import records_checksum as records_checksum
from dagster_adjunct.resources.schemas.column_changes import ColumnChanges as ColumnChanges
from dagster_adjunct.resources.schemas.paths import value_of as value_of
from dagster_adjunct.resources.streams.append_checks import (
    stale_sequence_error as stale_sequence_error,
)
from dagster_adjunct.resources.streams.lake.manifest import CompactionPolicy as CompactionPolicy
from dagster_adjunct.resources.streams.lake.manifest import Retention as Retention
from dagster_adjunct.resources.streams.lake.streams import open_system as open_system
from dagster_adjunct.resources.streams.system import RECORD_META as RECORD_META
from dagster_adjunct.resources.streams.system import AppendOptions as AppendOptions
from dagster_adjunct.resources.streams.system import AppendResult as AppendResult
from dagster_adjunct.resources.streams.system import DriverReads as DriverReads
from dagster_adjunct.resources.streams.system import LogCompaction as LogCompaction
from dagster_adjunct.resources.streams.system import Marker as Marker
from dagster_adjunct.resources.streams.system import NewStreams as NewStreams
from dagster_adjunct.resources.streams.system import NumberedOffsets as NumberedOffsets
from dagster_adjunct.resources.streams.system import OffsetRange as OffsetRange
from dagster_adjunct.resources.streams.system import SourceRange as SourceRange
from dagster_adjunct.resources.streams.system import Sources as Sources
from dagster_adjunct.resources.streams.system import StreamCapabilities as StreamCapabilities
from dagster_adjunct.resources.streams.system import StreamInfo as StreamInfo
from dagster_adjunct.resources.streams.system import StreamSystem as StreamSystem
from dagster_adjunct.resources.streams.system import StreamWriter as StreamWriter
from dagster_adjunct.resources.streams.system import check_range as check_range
from dagster_adjunct.resources.streams.system import register_system as register_system
