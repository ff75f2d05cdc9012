"""What a manifest says of the Parquet files of one attempt: one file a bucket, in one folder."""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from dagster_adjunct.resources.errors import MalformedDocumentError, SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import Schema


@dataclass(frozen=True, slots=True)
class BucketFile:
    """One sealed Parquet file.

    `size` is in bytes; `min_key` and `max_key` are JSON-able (see `encode_key`) and None where the layout has
    no key; `digest` is the sum of the rows' hashes modulo 2**64, so it does not depend on their order (None
    for files written without Spark); `stats` holds counters of the writer, such as superseded rows. `footer` is the
    Parquet footer (see `pack_footer`), so that whoever looks up a key need not fetch it: None for files without a
    key, and where a manifest would grow too large with it.
    """

    bucket: int
    name: str
    rows: int
    size: int
    sha256: str
    min_key: list[Any] | None = None
    max_key: list[Any] | None = None
    digest: int | None = None
    stats: Mapping[str, Any] = field(default_factory=dict)
    footer: str | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        item = {name: getattr(self, name) for name in self.__slots__}
        if self.footer is None:
            del item["footer"]
        return item

    @classmethod
    def from_json(cls, item: Any) -> BucketFile:
        try:
            return cls(**item)
        except TypeError as error:
            raise MalformedDocumentError(
                f"a stored file entry reads {str(item)[:200]!r}: {error}.",
                "Restore the manifest from a backup, or roll back to the commit before.",
                document="a file entry of a manifest",
            ) from error


@dataclass(frozen=True, slots=True)
class Generation:
    """The files of one attempt; `id` orders generations of one dataset or segments of one stream."""

    id: int
    folder: str
    files: tuple[BucketFile, ...]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> int | None:
        """What tells all its rows, whatever their order: the sum of its files' digests; None where one has none."""
        if any(file.digest is None for file in self.files):
            return None
        return sum(file.digest or 0 for file in self.files) % 2**64

    @property
    def footer_size(self) -> int:
        """The bytes that the footers of its files take in a manifest."""
        return sum(len(file.footer or "") for file in self.files)

    def without_footers(self) -> Generation:
        """Return this generation for a manifest that their footers would make too large: readers fetch them."""
        return replace(self, files=tuple(replace(file, footer=None) for file in self.files))

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "folder": self.folder, "files": [file.to_json() for file in self.files]}

    @classmethod
    def from_json(cls, item: Any) -> Generation:
        try:
            return cls(item["id"], item["folder"], tuple(BucketFile.from_json(file) for file in item["files"]))
        except (KeyError, TypeError) as error:
            raise MalformedDocumentError(
                f"a stored generation reads {str(item)[:200]!r}: {error!r}.",
                "Restore the manifest from a backup, or roll back to the commit before.",
                document="a generation of a manifest",
            ) from error


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """How rows are laid out in files.

    `schema` is what users see; `hidden` are the record's own columns (`__offset`, …) stored beside it, as
    (name, Spark type). `bucket_by` are hashed into `partitions` buckets (empty: one file for all). `key` is
    unique in the end, checked for nulls, and its range stands in the manifest; empty for streams. It may end in
    hidden columns.
    """

    schema: Schema
    bucket_by: tuple[str, ...]
    partitions: int
    key: tuple[str, ...] = ()
    hidden: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.bucket_by and self.partitions != 1:
            raise SchemaMismatchError(
                f"a layout of {self.partitions} buckets names no columns to hash.",
                "Name a key, or use 1 bucket.",
                argument="bucket_by",
            )

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.schema.names, *(name for name, _ in self.hidden))

    @property
    def key_types(self) -> tuple[str, ...]:
        """The types of the key's columns."""
        hidden = dict(self.hidden)
        return tuple(hidden.get(name) or self.schema.field(name).type for name in self.key)

    @property
    def ddl(self) -> str:
        hidden = "".join(f", `{name}` {kind.upper()}" for name, kind in self.hidden)
        return self.schema.ddl() + hidden

    def arrow_schema(self) -> Any:
        from dagster_adjunct.resources.schemas.schema import arrow_type

        schema = self.schema.to_arrow()
        for name, kind in self.hidden:
            import pyarrow as pa

            schema = schema.append(pa.field(name, arrow_type(kind)))
        return schema


def bucket_file_name(bucket: int, attempt: str) -> str:
    """Return the name under which Spark takes a file for this bucket of a bucketed table."""
    return f"part-{bucket:05d}-{attempt}{bucket_file_end(bucket)}"


def bucket_file_end(bucket: int) -> str:
    """Return how the names of this bucket's files end, whatever their attempt."""
    return f"_{bucket:05d}.c000.zstd.parquet"


def attempt_of(folder: str) -> str:
    """Return the attempt's id, the last segment of its folder."""
    return folder.rsplit("/", 1)[-1]


def encode_key(values: Sequence[Any]) -> list[Any]:
    """Return a key as JSON-able values: bytes as base64, dates and timestamps as ISO, decimals as text."""
    encoded: list[Any] = []
    for value in values:
        if isinstance(value, dt.datetime | dt.date):
            encoded.append(value.isoformat())
        elif isinstance(value, Decimal):
            encoded.append(str(value))
        elif isinstance(value, bytes):
            encoded.append(base64.b64encode(value).decode())
        else:
            encoded.append(value)
    return encoded


def pack_footer(tail: bytes) -> str:
    """Return the end of a Parquet file, from its footer on, as text: compressed, in base64."""
    return base64.b64encode(zlib.compress(tail, 9)).decode()


def unpack_footer(text: str) -> bytes:
    """Return what `pack_footer` was given. Raises MalformedDocumentError."""
    try:
        return zlib.decompress(base64.b64decode(text, validate=True))
    except (binascii.Error, zlib.error) as error:
        raise MalformedDocumentError(
            f"a stored footer reads {text[:60]!r}: {error}.",
            "Restore the manifest from a backup, or roll back to the commit before.",
            document="a footer in a manifest",
        ) from error
