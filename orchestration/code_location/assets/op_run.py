"""`OpRun`: what an asset's op works with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster import AssetExecutionContext

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects import Lake
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem


@dataclass(frozen=True, slots=True)
class OpRun:
    """One run of an asset's op, as Dagster has begun it, with the lake and the stream systems that it reads."""

    context: AssetExecutionContext
    lake: "Lake"
    systems: "Mapping[str, StreamSystem]"
