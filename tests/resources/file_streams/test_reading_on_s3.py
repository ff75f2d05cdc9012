"""Streams of files on a real S3 server, by every engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from dagster_adjunct.resources.errors import AdmittedFileError
from dagster_adjunct.resources.file_streams import reading
from dagster_adjunct.resources.objects.lake import lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from tests.nested import draw_rows
from tests.resources.file_streams.written_files import (
    FORMATS,
    WRITERS,
    parquet_bytes,
    ranges,
    stream_of,
)
from tests.servers.s3 import S3Server

pytestmark = pytest.mark.server
SCHEMA = Schema.of(k="bigint", t="string", at="timestamp")


@pytest.mark.parametrize("format", FORMATS)
def test_ranges_of_files_on_s3(s3_server: S3Server, format: str) -> None:
    reading._counted.clear()
    bucket, client = s3_server.bucket(), s3_server.client()
    rows = draw_rows(Random(format), SCHEMA, range(60))
    for number in range(3):
        data = WRITERS[format](SCHEMA, rows[number * 20 : number * 20 + 20])
        key = f"in here/day=2026-11-0{number + 1}/ü %20+.{format}"
        client.put_object(Bucket=bucket, Key=key, Body=data)
    declared = Schema.of({**SCHEMA.types, "day": "date"})
    url = f"s3://{bucket}/in here"
    lake = lake_in(InMemoryStore())
    streams = stream_of(lake, url, declared, format, path_columns=("day",))
    for counted in (True, False):
        if not counted:
            reading._counted.clear()
        found = streams.read_arrow(ranges(streams, 15, 45))
        assert found.column("k").to_pylist() == list(range(15, 45))
        assert [day.day for day in found.column("day").to_pylist()] == [1] * 5 + [2] * 20 + [3] * 5
    client.put_object(Bucket=bucket, Key=key, Body=data + b"\n")
    with pytest.raises(AdmittedFileError, match="was replaced"):
        streams.read_arrow(ranges(streams))


@pytest.mark.slow
def test_spark_reads_s3_and_finds_replaced_objects(versitygw: S3Server) -> None:
    bucket, client = versitygw.bucket(), versitygw.client()
    for number, name in enumerate(["a b+%41", "ü;=&", "plain"]):
        body = parquet_bytes(Schema.of(k="bigint"), [{"k": number}, {"k": -number}])
        key = f"in here/day=2026-11-2{number}/{name}.parquet"
        client.put_object(Bucket=bucket, Key=key, Body=body)
    script = Path(__file__).with_name("s3_reading.py")
    done = subprocess.run(
        [sys.executable, str(script), f"s3://{bucket}/in here", versitygw.url()],
        env={**os.environ, **versitygw.env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line]
    assert json.loads(lines[-3]) == {"same": True, "k": [0, 0, 1, -1, 2, -2]}
    assert lines[-2] == "6"
    assert "was replaced" in lines[-1]
