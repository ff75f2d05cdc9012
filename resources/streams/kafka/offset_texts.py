"""What Kafka says of the offsets that a topic holds."""

from __future__ import annotations

from dagster_adjunct.resources.streams.interface.numbered_offsets import HeldOffsets

TOPIC = HeldOffsets(
    of="topic",
    upcoming="the topic's upcoming one (the last stable offset)",
    dropped="Records before it were deleted by retention. Go on without them by a startpoint (oldest) for this "
    "partition, or keep the topic longer (retention.ms, retention.bytes) than its reader may fall behind.",
    ahead=". If the offset was valid once, the topic was created again or has lost records: set a startpoint for this "
    "partition.",
)
