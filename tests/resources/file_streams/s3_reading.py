"""A process of its own with a session that reads S3: python s3_reading.py URL LAKE. Prints the
records of a stream of Parquet files as Spark reads them, then what it says of a replaced file.
"""

from __future__ import annotations

import json
import os
import sys

import boto3

from dagster_adjunct import open_lake, session_scope
from dagster_adjunct.resources.errors import AdmittedFileError
from dagster_adjunct.resources.file_streams.folder import FolderStreams, file_stream
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.tasks import translate_spark_errors
from dagster_adjunct.resources.streams.system import OffsetRange, SystemStreamPartition


def main(url: str, lake_url: str) -> None:
    schema = Schema.of(k="bigint", day="date", p="string")
    file_stream("s", url, format="parquet", schema=schema, path_columns=("day",), path_column="p")
    streams = FolderStreams(open_lake(lake_url))
    state = streams.admit("s")
    whole = {SystemStreamPartition("files", "s", 0): OffsetRange("0", str(state.next))}
    with session_scope(master="local[2]", lake_url=lake_url) as session:
        spark = session()
        frame = streams.read(spark, whole)
        found = frame.toArrow().sort_by("__offset")
        arrow = streams.read_arrow(whole).select(found.column_names)
        same = arrow.to_pylist() == found.to_pylist()
        print(json.dumps({"same": same, "k": found.column("k").to_pylist()}))
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        client = boto3.client("s3", endpoint_url=os.environ["ADJUNCT_S3_ENDPOINT"])
        path = state.tail[0].path
        place = {"Bucket": bucket, "Key": f"{prefix}/{path}"}
        body = client.get_object(**place)["Body"].read()
        client.put_object(**place, Body=body)  # the same contents again
        print(frame.toArrow().num_rows)
        client.put_object(**place, Body=body[:200] + b"x" + body[201:])
        try:
            with translate_spark_errors():
                frame.toArrow()
        except AdmittedFileError as error:
            print(error.problem)


if __name__ == "__main__":
    main(*sys.argv[1:])
