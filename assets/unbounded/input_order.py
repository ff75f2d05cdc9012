"""Whether offsets order the changes of a key, and which offset a table goes on from that is not bootstrapped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import DatasetError

if TYPE_CHECKING:
    from dagster_adjunct.assets.sources.opened_stream import Source
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

Offsets = Mapping["SystemStreamPartition", str]


def check_order(source: Source) -> None:
    """Refuse an input where two changes of one key may lie in two partitions: nothing orders them there."""
    if source.one_partition_a_key or source.spec.following.order_by is not None:
        return
    spec, info = source.spec, source.info
    keyed = f"keyed by ({', '.join(info.key)})" if info.key else "not keyed"
    raise DatasetError(
        f"dataset {spec.name!r} has the key ({', '.join(spec.key)}), and its input {spec.input} is {keyed} over "
        f"{info.partitions} partitions ({info.partitioner}): changes of one key could lie in several partitions, "
        "where nothing says which is newer.",
        f"Key the stream by columns of ({', '.join(spec.key)}), give it one partition, or declare order_by=COLUMN.",
        dataset=spec.name,
    )


def last_offsets(
    source: Source, known: Offsets, oldest: Offsets, upcoming: Offsets
) -> dict[SystemStreamPartition, str]:
    """Return where a table without bootstrap begins: its last offset where the stream has it, else the default.

    `known` are its last offsets, of the partitions that it has read. What the stream has dropped is passed over.
    """
    default = oldest if source.info.default_offset == "oldest" else upcoming

    def later(left: str, right: str) -> str:
        return left if source.system.compare(left, right) >= 0 else right

    return {ssp: later(known[ssp], oldest[ssp]) if ssp in known else default[ssp] for ssp in source.ssps}
