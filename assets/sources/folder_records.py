"""The records in the files of one folder: by Spark or in this process, counted, and held against a checksum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import MarkerConflictError
from dagster_adjunct.resources.files import DeclaredFiles, count_records, files_frame, files_table
from dagster_adjunct.resources.spark.given_session import IN_PROCESS
from dagster_adjunct.resources.spark.spark_errors import unwrapped
from dagster_adjunct.resources.streams.interface.checksum import NOTHING, checksum_in_arrow, records_checksum

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.resources.files import FoundFile

# Text up to this many bytes is counted here: starting Spark for it would take longer.
_READ_HERE = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FolderRecords:
    """Files and what they are declared to hold; `completed_by` names their completion object in errors."""

    declared: DeclaredFiles
    files: tuple[FoundFile, ...]
    completed_by: str

    def frame(self, spark: SparkSession) -> DataFrame:
        return files_frame(spark, self.declared, self.files)

    def table(self) -> pa.Table:
        return files_table(self.declared, self.files)

    def count(self, spark: Callable[[], SparkSession], *, must: bool) -> int | None:
        """Return how many they are; None where only reading much text tells, unless it `must` be known."""
        if self.declared.format == "parquet" or sum(file.size for file in self.files) <= _READ_HERE:
            return count_records(self.declared, self.files)
        if not must:
            return None
        if spark is IN_PROCESS:
            return int(self.table().num_rows)
        with unwrapped():
            return self.frame(spark()).count()

    def check_checksum(self, expected: str, spark: Callable[[], SparkSession] | None) -> None:
        """Raise MarkerConflictError where the records have another checksum; without `spark` there are none."""
        schema, checksum = self.declared.schema, NOTHING
        if spark is IN_PROCESS:
            checksum = checksum_in_arrow(self.table(), schema)
        elif spark is not None:
            checksum = records_checksum(self.frame(spark()), schema)
        if checksum != expected:
            raise MarkerConflictError(
                f"{self.completed_by} expects records with the checksum {expected}, the files hold {checksum}.",
                "The version is not published and what is served stays. Deliver the right content under a new name.",
                expected=expected,
                found=checksum,
            )
