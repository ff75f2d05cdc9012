"""What a table is made with, as one value: Spark, or this process with all rows in memory.

Both make the same tables of the same streams; tests run random histories through both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from dagster_adjunct.assets.sources.change_decoder import ChangeDecoder, Rows
from dagster_adjunct.assets.sources.changes_by_spark import SparkDecoder
from dagster_adjunct.assets.sources.changes_in_arrow import ArrowDecoder
from dagster_adjunct.assets.unbounded.table_rows import TableRows
from dagster_adjunct.assets.unbounded.table_rows_by_spark import SparkRows
from dagster_adjunct.assets.unbounded.table_rows_in_arrow import ArrowRows
from dagster_adjunct.assets.writing.generation_writer import ARROW, SPARK, GenerationWriter
from dagster_adjunct.resources.spark.given_session import IN_PROCESS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class Engine(Generic[Rows]):
    """What decodes changes, reads stored rows and writes generations; all hold rows in the same form."""

    decoder: ChangeDecoder[Rows]
    table: TableRows[Rows]
    writer: GenerationWriter[Rows]


IN_ARROW = Engine(ArrowDecoder(), ArrowRows(), ARROW)


def engine_of(spark: Callable[[], SparkSession]) -> Engine[Any]:
    """Return the engine of this session, which it starts when it is needed; of IN_PROCESS the one without."""
    return IN_ARROW if spark is IN_PROCESS else Engine(SparkDecoder(spark), SparkRows(spark), SPARK)
