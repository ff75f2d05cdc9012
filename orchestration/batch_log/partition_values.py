"""Values by stream partition, as documents store them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

from pydantic import PlainSerializer, PlainValidator

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.streams.system import OffsetRange, SystemStreamPartition


def _parse_partition(stored: object) -> SystemStreamPartition:
    if isinstance(stored, SystemStreamPartition):
        return stored
    try:
        return SystemStreamPartition.parse(str(stored))
    except errors.InvalidNameError as error:
        raise ValueError(error.problem) from error


# A stream partition, stored as its text: "lake.flights.3".
Partition = Annotated[
    SystemStreamPartition, PlainValidator(_parse_partition), PlainSerializer(str, return_type=str)
]


Offsets = dict[SystemStreamPartition, str]
Ranges = dict[SystemStreamPartition, OffsetRange]
Epochs = dict[SystemStreamPartition, int]
T = TypeVar("T")


def of_stream(
    by_partition: Mapping[SystemStreamPartition, T], stream: str
) -> dict[SystemStreamPartition, T]:
    """Return the values of the partitions of one stream ("lake.flights")."""
    found = {}
    for ssp, value in by_partition.items():
        if ssp.qualified_stream == stream:
            found[ssp] = value
    return found


def without_stream(
    by_partition: Mapping[SystemStreamPartition, T], stream: str
) -> dict[SystemStreamPartition, T]:
    """Return the values of the partitions of all other streams."""
    others = {}
    for ssp, value in by_partition.items():
        if ssp.qualified_stream != stream:
            others[ssp] = value
    return others
