"""Gives Arrow, and engines that read files by themselves, access to the objects of a store."""

from __future__ import annotations

import atexit
import hashlib
import io
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from dagster_adjunct.resources.aws import new_session
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.lazy_modules import pa, pj
from dagster_adjunct.resources.objects.store import ObjectStore, S3Options


def arrow_filesystem(store: ObjectStore) -> Any:
    """Return a `pyarrow.fs.FileSystem` for a store's objects; their paths are `object_location`s
    without `s3://`.

    For S3 it has the store's endpoint and region, and the credentials that boto3's standard chain
    gives now. Temporary credentials are not renewed, so create a new one for each piece of work.
    """
    from pyarrow import fs

    descriptor = store.descriptor
    if descriptor.url.startswith("s3://"):
        return fs.S3FileSystem(**s3_filesystem_arguments(descriptor.s3 or S3Options()))
    return fs.LocalFileSystem()


def object_location(store: ObjectStore, key: str) -> str:
    """Return the path or s3:// URL under which other engines find an object.

    Raises ConfigurationError for a lake in memory.
    """
    if store.url.startswith("memory://"):
        problem = (
            f"the lake {store.url} is in this process's memory, which other engines can't read."
        )
        raise ConfigurationError(problem, "Use a lake in a folder or on S3.", url=store.url)
    return f"{store.url}/{key}"


def s3_filesystem_arguments(options: S3Options) -> dict[str, Any]:
    """Return the arguments of Arrow's file system for a store on S3."""
    from pyarrow import fs

    session = new_session()
    client = session.create_client("s3", endpoint_url=options.endpoint, region_name=options.region)
    arguments: dict[str, Any] = {
        "region": client.meta.region_name,
        "connect_timeout": options.connect_timeout,
        "request_timeout": options.read_timeout,
        "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=options.attempts),
    }
    credentials = session.get_credentials()
    if credentials is not None:
        frozen = credentials.get_frozen_credentials()
        arguments |= {
            "access_key": frozen.access_key,
            "secret_key": frozen.secret_key,
            "session_token": frozen.token,
        }
    endpoint = urlsplit(client.meta.endpoint_url)
    host = endpoint.hostname or ""
    # Buckets can't be subdomains of localhost or of an address.
    is_plain_host = host == "localhost" or ":" in host or host.replace(".", "").isdigit()
    if not host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        arguments |= {
            "scheme": endpoint.scheme,
            "endpoint_override": endpoint.netloc,
            "force_virtual_addressing": not options.path_style and not is_plain_host,
        }
    return arguments


_MAX_IN_MEMORY = 4 * 1024 * 1024
_MAX_EXIT_DELAY = 2.0
_python_files: weakref.WeakSet[ArrowReadableFile] = weakref.WeakSet()


class ArrowReadableFile(io.RawIOBase):
    """The base of file objects in Python that Arrow reads.

    Arrow's threads may release a file a moment after the read has returned. A thread that does so
    while the interpreter exits aborts the process, so the interpreter waits up to two seconds until
    all files are released.
    """

    def __init__(self) -> None:
        super().__init__()
        _python_files.add(self)

    @staticmethod
    @atexit.register
    def _wait_for_arrow() -> None:
        """Wait at the end of the interpreter until Arrow has released all files, or two seconds."""
        deadline = time.monotonic() + _MAX_EXIT_DELAY
        while _python_files and time.monotonic() < deadline:
            time.sleep(0.001)


class RangedFile(ArrowReadableFile):
    """A file of `size` bytes that fetches only the ranges that are read, by `read(offset,
    length)`.
    """

    def __init__(self, size: int, read: Callable[[int, int], bytes | memoryview]) -> None:
        super().__init__()
        self._size = size
        self._read = read
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._size - self._at)
        if wanted <= 0:
            return 0
        data = memoryview(self._read(self._at, wanted))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def open_bytes(data: bytes) -> pa.BufferReader:
    """Return an Arrow input of a copy of the bytes. Arrow owns the copy, so its threads can free
    it without Python.
    """
    copy = pa.BufferOutputStream()
    copy.write(data)
    return pa.BufferReader(copy.getvalue())


def open_input(
    size: int,
    read: Callable[[], bytes],
    read_range: Callable[[int, int], bytes],
    most: int = _MAX_IN_MEMORY,
) -> Any:
    """Return a pyarrow input for a file of `size` bytes.

    It is read as a whole if it has at most `most` bytes, else by ranges, when Arrow reads them.
    """
    if size <= most:
        return open_bytes(read())
    return pa.PythonFile(io.BufferedReader(RangedFile(size, read_range), 1024 * 1024), mode="r")


def open_object(store: ObjectStore, key: str, size: int) -> Any:
    """Return a pyarrow input for this object of `size` bytes."""
    return open_input(size, lambda: store.get(key).data, partial(store.get_range, key))


_DIGEST_BYTES = hashlib.sha256().digest_size


def write_sealed_table(table: pa.Table) -> bytes:
    """Return a table as its SHA-256 and a compressed file of Arrow, which has no checksums."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return hashlib.sha256(content).digest() + content


def read_sealed_table(data: bytes) -> pa.Table:
    """Return the table that `write_sealed_table` was given. Raises ArrowInvalid for other bytes."""
    content = data[_DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != data[:_DIGEST_BYTES]:
        raise pa.ArrowInvalid(f"they differ from their SHA-256 ({len(data)} bytes found)")
    return pa.ipc.open_file(pa.BufferReader(content)).read_all()


def read_json_lines(data: bytes, schema: pa.Schema, *, others: str) -> pa.Table:
    """Return lines of JSON objects as a table with this schema.

    `others` is Arrow's `unexpected_field_behavior`, for fields that are not in the schema: "ignore"
    or "error".
    """
    return pj.read_json(
        open_bytes(data),
        read_options=pj.ReadOptions(use_threads=False, block_size=len(data) + 1),
        parse_options=pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior=others),
    )
