"""Whether offsets order the changes of a key, and which offset a table goes on from that is not bootstrapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.assets.sources.opened_stream import one_partition_a_key
from dagster_adjunct.resources.errors import DatasetError

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.sources.opened_stream import Source
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

Offsets = Mapping["SystemStreamPartition", str]


def check_order(spec: AdjunctDataset, key: Sequence[str], partitions: int, partitioner: str) -> None:
    """Refuse an input, a stream so keyed and spread, where two changes of one key may lie in two partitions: nothing
    orders them there."""
    if spec.following.order_by is not None or one_partition_a_key(spec, key, partitions, partitioner):
        return
    keyed = f"keyed by ({', '.join(key)})" if key else "not keyed"
    raise DatasetError(
        f"dataset {spec.name!r} has the key ({', '.join(spec.key)}), and its input {spec.input} is {keyed} over "
        f"{partitions} partitions ({partitioner}): changes of one key could lie in several partitions, "
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
