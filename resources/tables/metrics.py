"""What a table has done, as numbers that add up over tasks and batches."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True, slots=True)
class TableMetrics:
    """Counts since the table was made. Records unless said otherwise.

    After a lost reply a request is sent again, so `defaults_put` may miss defaults whose first
    insertion was never confirmed; it never counts one twice.
    """

    reads: int = 0  # keys asked for
    found: int = 0  # of these, keys that had a record
    writes: int = 0  # whole records put by the caller
    deletes: int = 0
    updates: int = 0  # updates applied
    defaults_put: int = 0  # records begun with a default
    requests: int = 0  # calls of the store's functions, without those sent again
    retries: int = 0  # calls sent again
    failures: int = 0  # calls given up; a missing record is an answer, not a failure

    def __add__(self, other: TableMetrics) -> TableMetrics:
        return TableMetrics(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def to_dict(self) -> dict[str, int]:
        """The counts by name, for metadata and tables."""
        return asdict(self)
