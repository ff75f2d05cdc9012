"""A process of its own with a session that reads S3: python s3_reading.py URL LAKE. Prints the
records of a stream of Parquet files as Spark reads them, then what it says of a replaced file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING

import boto3
from pyspark.errors import PySparkException

from dagster_adjunct import open_lake, session_scope
from dagster_adjunct.resources.errors import AdjunctError
from dagster_adjunct.resources.file_streams.folder import FolderStreams, file_stream
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.system import OffsetRange, SystemStreamPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def main(url: str, lake_url: str) -> None:
    schema = Schema.of(k="bigint", day="date", p="string")
    file_stream("s", url, format="parquet", schema=schema, path_columns=("day",), path_column="p")
    streams = FolderStreams(open_lake(lake_url))
    state = streams.admit("s")
    whole = {SystemStreamPartition("files", "s", 0): OffsetRange("0", str(state.next))}
    with session_scope(master="local[2]", lake_url=lake_url) as session:
        spark = session()
        declared = streams.declaration("s")
        feed = declared.feed(streams.lake)
        fast = feed.frame(spark, streams._pieces(whole)) is not None
        frame = streams.read(spark, whole)
        found = frame.toArrow().sort_by("__offset")
        arrow = streams.read_arrow(whole).select(found.column_names)
        same = arrow.to_pylist() == found.to_pylist()
        print(json.dumps({"fast": fast, "same": same, "k": found.column("k").to_pylist()}))
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        client = boto3.client("s3", endpoint_url=os.environ["ADJUNCT_S3_ENDPOINT"])
        path = state.tail[0].path
        place = {"Bucket": bucket, "Key": f"{prefix}/{path}"}
        body = client.get_object(**place)["Body"].read()
        time.sleep(1.1)  # S3 counts seconds
        client.put_object(**place, Body=body)
        print(try_to_read(frame))
        again = streams.read(spark, whole)
        print(try_to_read(again))
        time.sleep(1.1)
        client.put_object(**place, Body=body[:200] + b"x" + body[201:])
        print(try_to_read(again))
        try:
            streams.read(spark, whole)
        except AdjunctError as error:
            print(type(error).__name__)


def try_to_read(frame: DataFrame) -> str:
    try:
        return f"{frame.toArrow().num_rows} records"
    except PySparkException as error:
        found = "has changed since it was admitted" in str(error)
        return "changed" if found else str(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
