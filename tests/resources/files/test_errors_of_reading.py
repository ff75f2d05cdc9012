"""Errors of reading that are about the file, and those that are about the machine."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_adjunct.assets.exchange.samples import infer_from_files
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    SchemaMismatchError,
    StoreUnavailableError,
)
from dagster_adjunct.resources.files import opened
from dagster_adjunct.resources.files.formats import DeclaredFiles, FileFormat
from dagster_adjunct.resources.files.opened import translate_read_errors
from dagster_adjunct.resources.files.tree import LocalTree
from dagster_adjunct.resources.schemas.schema import Schema

PLANES = Schema.of(tailnum="string")


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (pa.ArrowInvalid("not a Parquet file"), SchemaMismatchError),
        (OSError("Couldn't deserialize thrift"), SchemaMismatchError),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), SchemaMismatchError),
        (EOFError(), SchemaMismatchError),
        (pa.ArrowMemoryError("malloc failed"), pa.ArrowMemoryError),
        (MemoryError(), MemoryError),
        (pa.ArrowCancelled("cancelled"), pa.ArrowCancelled),
        (OSError(errno.EMFILE, "Too many open files"), ConfigurationError),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), StoreUnavailableError),
    ],
)
def test_only_errors_about_contents_are_about_the_file(
    error: Exception, raised: type[Exception]
) -> None:
    with pytest.raises(raised), translate_read_errors("planes.parquet", EOFError):
        raise error


def _read(tree: LocalTree, name: str, format: FileFormat) -> None:
    for _ in DeclaredFiles(tree, format, PLANES, "planes").tables(tree.listed(name)):
        pass


def _raise(error: Exception) -> Any:
    def instead(*_: Any, **__: Any) -> None:
        raise error

    return instead


def test_too_little_memory_for_parquet_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"tailnum": ["N1"]}), tmp_path / "a.parquet")
    for method in ("__init__", "iter_batches"):
        with monkeypatch.context() as patched:
            patched.setattr(pq.ParquetFile, method, _raise(pa.ArrowMemoryError("malloc failed")))
            with pytest.raises(pa.ArrowMemoryError):
                _read(LocalTree(str(tmp_path)), "a.parquet", "parquet")
            with pytest.raises(pa.ArrowMemoryError):
                infer_from_files([str(tmp_path)], rows=10)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_too_many_open_files_are_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).write_text("tailnum\n" if name == "a.csv" else '{"tailnum": "N1"}\n')
    format: FileFormat = "csv" if name == "a.csv" else "jsonl"
    monkeypatch.setattr(opened.pa, "OSFile", _raise(OSError(errno.EMFILE, "Too many open files")))
    with pytest.raises(ConfigurationError):
        _read(LocalTree(str(tmp_path)), name, format)
    with pytest.raises(ConfigurationError):
        infer_from_files([str(tmp_path)], rows=10)


def test_a_damaged_length_in_avro_needs_no_memory(tmp_path: Path) -> None:
    fields = [{"name": "tailnum", "type": "string"}]
    with (tmp_path / "a.avro").open("wb") as target:
        fastavro.writer(target, {"type": "record", "name": "r", "fields": fields}, [])
    with (tmp_path / "a.avro").open("ab") as target:
        target.write(b"\x02" + b"\xfe" * 8 + b"\x7f")  # one record in 2^62 bytes
    with pytest.raises(SchemaMismatchError):
        _read(LocalTree(str(tmp_path)), "a.avro", "avro")
