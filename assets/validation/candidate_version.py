"""What validators are asked about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.assets.reading.version_reader import VersionReader


@dataclass(frozen=True, slots=True)
class Candidate:
    """A version that is built and not published, beside the one that is served now (None before the first).

    `view` reads it whole or by key; `view.sealed.counters` has `read`, `superseded` (records that a later one of
    the same key replaced) and `deleted`. `spark` starts the session where a validator needs one.
    """

    view: VersionReader
    current: VersionReader | None
    spark: Callable[[], SparkSession]
