"""Damaged and missing files of a version, as Spark meets them: an error that names the file,
never other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PythonException
from pyspark.sql import DataFrame, SparkSession

from dagster_adjunct.assets.reading.stored_file import list_stored_files, read_stored_file
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.resources.errors import ManifestMismatchError, StoreUnavailableError
from dagster_adjunct.resources.objects.local_store import LocalStore
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.tasks import find_adjunct_error
from tests.assets.sealing import sealed_version

SCHEMA = Schema.of(k="string", v="bigint")
ROWS = [(f"k{number:05d}", number) for number in range(200)]


def flip(place: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


def read(frame: DataFrame) -> Any:
    """Return the rows, or what our users are told instead."""
    try:
        return sorted((row.k, row.v) for row in frame.collect())
    except Py4JJavaError as error:
        ours = find_adjunct_error(error)
        if ours is None:
            raise
        return ours


@pytest.mark.spark
def test_spark_gives_the_rows_that_were_sealed_or_an_error_that_names_the_file(
    tmp_path: Path, spark: SparkSession
) -> None:
    store = LocalStore(tmp_path)
    size = (
        sealed_version(store, ROWS, schema=SCHEMA, key=["k"], number=999)
        .generations[0]
        .files[0]
        .size
    )
    damages: list[Callable[[bytes], bytes | None]] = [
        flip(place) for place in range(39, size, size // 5)
    ]
    damages += [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: None]
    errors = 0
    for number, damage in enumerate(damages, 1):
        sealed = sealed_version(store, ROWS, schema=SCHEMA, key=["k"], number=number)
        frame = VersionReader(store, "planes", sealed).frame(spark)
        generation = sealed.generations[0]
        path = tmp_path / generation.folder / generation.files[0].name
        data = damage(path.read_bytes())
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        answer = read(frame)
        if isinstance(answer, ManifestMismatchError):
            assert generation.files[0].name in answer.problem
            assert "adjunct dataset verify" in answer.next_step
            errors += 1
        else:
            assert answer == ROWS
    assert errors >= 4


def test_a_file_that_is_read_whole_is_named_whichever_of_its_bytes_is_damaged() -> None:
    store = InMemoryStore()
    sealed = sealed_version(store, ROWS[:20], schema=SCHEMA, key=["k"])
    stored = list_stored_files(store, "planes", sealed)[0]
    whole = store.get(stored.key).data
    assert read_stored_file(stored, sealed.layout).num_rows == stored.file.rows
    for place in range(4, len(whole), 19):
        store.put(stored.key, flip(place)(whole))
        with pytest.raises(ManifestMismatchError) as raised:
            read_stored_file(stored, sealed.layout)
        assert raised.value.key == stored.key


def test_a_store_that_does_not_answer_is_not_a_damaged_file() -> None:
    text = (
        "org.apache.spark.SparkException: [FAILED_READ_FILE.NO_HINT] Encountered error while"
        " reading file s3a://bucket/lake/part-00000.parquet.  SQLSTATE: KD001\nCaused by:"
        " java.net.SocketTimeoutException: Read timed out\n"
    )

    assert isinstance(find_adjunct_error(PythonException(text)), StoreUnavailableError)
