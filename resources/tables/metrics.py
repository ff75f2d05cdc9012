"""What a table has done, as numbers that add up over tasks and batches; `Meter` is where its layers count."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import frexp
from typing import Any

from dagster_adjunct.resources.tables.histogram import Histogram, bucket_of

_PERCENTILES = (50, 95, 99)


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
    skipped: int = 0  # writes whose condition did not hold: the store had something newer, or had them already
    defaults_put: int = 0  # records begun with a default
    cache_hits: int = 0  # keys whose record, or that there is none, the cache knew
    cache_misses: int = 0
    cache_evictions: int = 0  # records that the cache forgot for want of room
    requests: int = 0  # requests to the store, without those sent again
    successes: int = 0  # of these, after which nothing was left failed; a missing record is an answer, not a failure
    retries: int = 0  # requests sent again
    failures: int = 0  # requests of which something was given up
    given_up: int = 0  # entries given up: failed for good, or of an unknown outcome
    timeouts: int = 0  # attempts that were not answered in time
    throttled: int = 0  # attempts after which the store asked for a pause
    rate_waits: float = 0.0  # seconds that requests waited for credits, each by itself
    retry_waits: float = 0.0  # seconds that requests waited before they were sent again
    read_seconds: Histogram = field(default_factory=Histogram)  # of each attempt, without any waiting
    write_seconds: Histogram = field(default_factory=Histogram)
    batch_sizes: Histogram = field(default_factory=Histogram)  # entries of each attempt

    def __add__(self, other: TableMetrics) -> TableMetrics:
        return TableMetrics(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: TableMetrics) -> TableMetrics:
        """What was counted after `other`, which were these metrics earlier."""
        return TableMetrics(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    def counts(self) -> dict[str, int]:
        """The whole numbers by name, which add up over batches as they are."""
        return {name: value for name, value in self._by_name().items() if type(value) is int}

    def to_dict(self) -> dict[str, int | float]:
        """Numbers by name, for metadata and tables; of what is measured the mean, some percentiles and the greatest."""
        numbers: dict[str, int | float] = {}
        for name, value in self._by_name().items():
            if not isinstance(value, Histogram):
                numbers[name] = value
                continue
            if not value.count:
                continue
            numbers[f"{name}_mean"] = value.total / value.count
            numbers |= {f"{name}_p{percent}": value.percentile(percent) for percent in _PERCENTILES}
            numbers[f"{name}_max"] = value.greatest
        return numbers

    def to_document(self) -> dict[str, Any]:
        """Everything as plain values, to be added up elsewhere; `from_document` reads it."""
        return {
            name: [sorted(value.buckets.items()), value.total, value.greatest] if type(value) is Histogram else value
            for name, value in self._by_name().items()
        }

    @staticmethod
    def from_document(document: Mapping[str, Any]) -> TableMetrics:
        values: dict[str, Any] = {
            name: Histogram({int(bucket): count for bucket, count in value[0]}, value[1], value[2])
            if isinstance(value, list)
            else value
            for name, value in document.items()
        }
        return TableMetrics(**values)

    def _by_name(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


class _Spread:
    """A histogram that is being filled."""

    __slots__ = ("buckets", "greatest", "total")

    def __init__(self) -> None:
        self.buckets: dict[int, int] = {}
        self.total = self.greatest = 0.0

    def add(self, value: float) -> None:
        fraction, exponent = frexp(value if value > 1e-9 else 1e-9)
        bucket = exponent * 8 + int(fraction * 16) - 8  # `bucket_of`, without a call
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1
        self.total += value
        if value > self.greatest:  # noqa: PLR1730 - half of the time of max()
            self.greatest = value

    def value(self) -> Histogram:
        return Histogram(dict(self.buckets), self.total, self.greatest)


class Meter:
    """Counts what one table does in one process. Threads may share it; counting costs well under a microsecond."""

    __slots__ = ("_counting", "_counts", "_reads", "_sizes", "_writes")

    def __init__(self) -> None:
        self._counting = threading.Lock()
        self._counts: dict[str, Any] = {f.name: f.default for f in fields(TableMetrics) if f.type != "Histogram"}
        self._reads, self._writes = _Spread(), _Spread()
        self._sizes: dict[int, int] = {}  # how many attempts had so many entries

    def add(self, name: str, amount: float = 1, present: int = 0) -> None:
        """Add to one count of `TableMetrics`, by its name; of reads how many keys had a record (`present`), too."""
        with self._counting:
            self._counts[name] += amount
            if present:
                self._counts["found"] += present

    def request(self, *, ended: bool) -> None:
        """Count a request to the store; `ended`: as a success, too."""
        with self._counting:
            self._counts["requests"] += 1
            if ended:
                self._counts["successes"] += 1

    def attempt(self, writes: bool, entries: int, seconds: float) -> None:
        """Count one attempt at the store."""
        with self._counting:
            (self._writes if writes else self._reads).add(seconds)
            self._sizes[entries] = self._sizes.get(entries, 0) + 1

    def metrics(self) -> TableMetrics:
        """All counts of this moment."""
        with self._counting:
            counts: dict[str, Any] = dict(self._counts)
            return TableMetrics(
                **counts,
                read_seconds=self._reads.value(),
                write_seconds=self._writes.value(),
                batch_sizes=_histogram_of(self._sizes),
            )


def _histogram_of(counts: Mapping[int, int]) -> Histogram:
    buckets: dict[int, int] = {}
    for value, count in counts.items():
        bucket = bucket_of(value)
        buckets[bucket] = buckets.get(bucket, 0) + count
    total = sum(value * count for value, count in counts.items())
    return Histogram(buckets, float(total), float(max(counts, default=0)))
