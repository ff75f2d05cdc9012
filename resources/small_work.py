"""What is small: handled by this process, or by one task, because starting more would take longer.

All limits follow from the number of records of a small batch, which an application can declare
(`few_records`).
"""

from __future__ import annotations

from typing import Final

SMALL_RECORDS: Final = 5_000
"""The most records of a small batch, by default."""

SMALL_ROWS: Final = 20 * SMALL_RECORDS
"""The most rows that this process reads or builds faster than tasks, and that Spark processes
faster by interpreting a plan than by compiling it.
"""

SMALL_DATASETS: Final = 3 * SMALL_ROWS
"""The most rows of datasets that one task reads for a small batch, in some tenths of a second, and
of one dataset that this process keeps between batches.
"""

SMALL_BYTES: Final = 64 * 1024 * 1024
"""The most memory for records and entries of a small batch, and the most bytes of the files of its
datasets.
"""
