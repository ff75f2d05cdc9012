"""Where the work of an application is done, and in whose name: what travels together through a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.resources.objects import Lake
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem


@dataclass(frozen=True, slots=True)
class Runtime:
    """The lake, the stream systems by name, and Spark, whose session starts when it is first asked for.

    `by` is the run or the person whom commits name.
    """

    lake: Lake
    systems: Mapping[str, StreamSystem]
    spark: Callable[[], SparkSession]
    by: str
