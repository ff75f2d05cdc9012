"""A few rows of a dataset or stream for people to look at in Dagster, with the columns that are sensitive masked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from dagster import MetadataValue, TableColumn, TableRecord, TableSchema

from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.streams.interface.stream_system import OffsetRange

if TYPE_CHECKING:
    from dagster_adjunct.assets.reading.open_dataset import Dataset
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem

MASKED = "(masked)"
MOST_ROWS = 50
_LENGTH = 100


def dataset_preview(dataset: Dataset, rows: int, sensitive: Collection[str]) -> dict[str, Any]:
    """Return the first entries of an open dataset by key, as metadata."""
    return _table((entry for _, entry in islice(dataset.items(), rows)), dataset.schema.names, sensitive)


def stream_preview(
    systems: Mapping[str, StreamSystem], name: str, rows: int, hidden: Callable[[Sequence[str]], Collection[str]]
) -> dict[str, Any]:
    """Return the newest records of one partition of a stream of the lake, as metadata; nothing of other systems.

    `hidden` says which of its columns are masked.
    """
    from dagster_adjunct.resources.streams.lake.lake_streams import LakeStreams

    system_name, stream = split_stream_name(name)
    system = systems[system_name]
    if not rows or not isinstance(system, LakeStreams):
        return {}
    ssps = system.partitions(stream)
    oldest, upcoming = system.oldest(ssps), system.upcoming(ssps)
    for ssp in ssps:
        if (held := int(upcoming[ssp]) - int(oldest[ssp])) > 0:
            start = str(int(upcoming[ssp]) - min(rows, held))
            table = system.read_arrow({ssp: OffsetRange(start, upcoming[ssp])})
            names = [column for column in table.column_names if not column.startswith("__")]
            return _table(table.select(names).to_pylist()[-rows:], names, hidden(names))
    return {}


def _table(entries: Iterable[Mapping[str, Any]], names: Iterable[str], sensitive: Collection[str]) -> dict[str, Any]:
    hidden = {name.lower() for name in sensitive}
    records = [
        TableRecord({name: MASKED if name.lower() in hidden else _shown(entry.get(name)) for name in names})
        for entry in entries
    ]
    schema = TableSchema([TableColumn(name) for name in names])
    return {"adjunct/preview": MetadataValue.table(records, schema)} if records else {}


def _shown(value: object) -> str | int | float | bool | None:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text if len(text) <= _LENGTH else f"{text[: _LENGTH - 1]}…"
