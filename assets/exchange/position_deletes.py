"""Writes which stored rows of a version are no entries, as one of Iceberg's position delete files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from dagster_adjunct.assets.reading.stored_file import list_stored_files
from dagster_adjunct.assets.reading.superseded import make_mask, mask_key, read_mask
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.resources.lazy_modules import np, pa, pq
from dagster_adjunct.resources.objects.arrow_files import object_location

PATH_ID, ROW_ID = 2_147_483_546, 2_147_483_545
"""The field ids that Iceberg reserves for the columns of a position delete file, `file_path` and `pos`."""


@dataclass(frozen=True, slots=True)
class PositionDeletes:
    """A stored position delete file: its location, rows and size in bytes, and the first and last path listed in it."""

    path: str
    rows: int
    size: int
    first: str
    last: str


def write_position_deletes(view: VersionReader) -> PositionDeletes | None:
    """Store the position delete file of a version next to its mask; return None if all stored rows are entries.

    The file has a row group for each data file with such rows, sorted by path. Its name depends on its content, so that
    writing it again never changes what a snapshot refers to. Memory holds the mask and the written file. Raises
    ManifestMismatchError for a data file that is missing or damaged.
    """
    store, sealed = view.store, view.sealed
    mask = read_mask(store, sealed) if any(generation.files for generation in sealed.generations) else None
    mask = mask or make_mask(store, view.dataset, sealed)
    numbers = {generation.folder: generation.id for generation in sealed.generations}
    masked = sorted(
        (object_location(store, stored.key), mask.bits[place])
        for stored in list_stored_files(store, view.dataset, sealed)
        if (place := (numbers[stored.folder], stored.file.bucket)) in mask.bits
    )
    if not masked:
        return None
    fields = (("file_path", pa.dictionary(pa.int32(), pa.string()), PATH_ID), ("pos", pa.int64(), ROW_ID))
    schema = pa.schema(
        [pa.field(name, kind, nullable=False, metadata={"PARQUET:field_id": str(id)}) for name, kind, id in fields]
    )
    sink, rows = pa.BufferOutputStream(), 0
    with pq.ParquetWriter(sink, schema, compression="zstd", use_dictionary=["file_path"], store_schema=False) as writer:
        for path, bits in masked:
            places = np.nonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little"))[0]
            paths = pa.DictionaryArray.from_arrays(np.zeros(len(places), np.int32), [path])
            writer.write_table(pa.table([paths, pa.array(places, pa.int64())], schema))
            rows += len(places)
    content: bytes = sink.getvalue().to_pybytes()
    key = f"{mask_key(sealed)}-{hashlib.sha256(content).hexdigest()[:24]}.parquet"
    store.put(key, content)
    return PositionDeletes(object_location(store, key), rows, len(content), masked[0][0], masked[-1][0])
