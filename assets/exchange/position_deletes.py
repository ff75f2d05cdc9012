"""Writes which stored rows of a version are no entries, as Iceberg's position delete files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from dagster_adjunct.assets.reading.stored_file import list_stored_files
from dagster_adjunct.assets.reading.superseded import make_mask, read_mask
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.resources.lazy_modules import np, pa, pq
from dagster_adjunct.resources.objects.arrow_files import object_location
from dagster_adjunct.resources.objects.store import ObjectStore

PATH_ID = 2_147_483_546
ROW_ID = 2_147_483_545
"""The field ids that Iceberg reserves for the columns of a position delete file, `file_path` and
`pos`.
"""


@dataclass(frozen=True, slots=True)
class PositionDeletes:
    """A stored position delete file: its location, rows, size in bytes, and the path of its data
    file.
    """

    path: str
    rows: int
    size: int
    data_path: str


def write_position_deletes(view: VersionReader, folder: str) -> list[PositionDeletes]:
    """Store the position delete files of a version in a folder of the lake; return them.

    There is one for each data file with rows that are no entries, because Polars rejects delete
    files over several data files, and others read them once for each. The name of a file depends on
    its content, so that writing it again never changes what a snapshot refers to. Memory holds the
    mask and one written file. Raises ManifestMismatchError for a data file that is missing or
    damaged.
    """
    store = view.store
    sealed = view.sealed
    stored_mask = read_mask(store, sealed) if sealed.nonempty else None
    mask = stored_mask or make_mask(store, view.dataset, sealed)
    written = []
    for stored in list_stored_files(store, view.dataset, sealed):
        bits = mask.bits.get((stored.generation.id, stored.file.bucket))
        if bits is not None:
            written.append(_write_file(store, folder, object_location(store, stored.key), bits))
    return written


def _write_file(store: ObjectStore, folder: str, data_path: str, bits: bytes) -> PositionDeletes:
    """Store the position delete file of one data file.

    `bits` has one bit for each row of the data file, in order and from the lowest bit of each byte;
    it is 1 for rows that are no entries.
    """
    rows = np.nonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little"))[0]
    paths = pa.DictionaryArray.from_arrays(np.zeros(len(rows), np.int32), [data_path])
    columns = (("file_path", paths, PATH_ID), ("pos", pa.array(rows, pa.int64()), ROW_ID))
    fields = [
        pa.field(name, column.type, nullable=False, metadata={"PARQUET:field_id": str(field_id)})
        for name, column, field_id in columns
    ]
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.table([column for _, column, _ in columns], pa.schema(fields)),
        sink,
        compression="zstd",
        use_dictionary=["file_path"],
        store_schema=False,
    )
    content: bytes = sink.getvalue().to_pybytes()
    key = f"{folder}/{hashlib.sha256(content).hexdigest()[:24]}.parquet"
    store.put(key, content)
    return PositionDeletes(object_location(store, key), len(rows), len(content), data_path)
