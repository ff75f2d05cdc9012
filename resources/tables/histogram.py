"""`Histogram`: how a measured value spreads, in buckets that are the same everywhere, so that tasks' add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import frexp
from types import MappingProxyType

_PER_DOUBLING = 8
_NONE: Mapping[int, int] = MappingProxyType({})


def bucket_of(value: float) -> int:
    """The bucket of a value above 0: each doubling has eight of equal width, so none is wider than an eighth of it."""
    fraction, exponent = frexp(value)
    return exponent * _PER_DOUBLING + int(fraction * 2 * _PER_DOUBLING) - _PER_DOUBLING


def end_of(bucket: int) -> float:
    """The least value that lies above the bucket."""
    exponent, part = divmod(bucket, _PER_DOUBLING)
    return float((_PER_DOUBLING + part + 1) / (2 * _PER_DOUBLING) * 2.0**exponent)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts by bucket, and the exact sum and greatest of the values. Values of 0 and less count as the smallest."""

    buckets: Mapping[int, int] = field(default_factory=lambda: _NONE)
    total: float = 0.0
    greatest: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.buckets.values())

    def __add__(self, other: Histogram) -> Histogram:
        buckets = dict(self.buckets)
        for bucket, count in other.buckets.items():
            buckets[bucket] = buckets.get(bucket, 0) + count
        return Histogram(buckets, self.total + other.total, max(self.greatest, other.greatest))

    def __sub__(self, other: Histogram) -> Histogram:
        """What came after `other`, which was this histogram earlier; the greatest value is that of both."""
        buckets = {bucket: count - other.buckets.get(bucket, 0) for bucket, count in self.buckets.items()}
        return Histogram({b: n for b, n in buckets.items() if n}, self.total - other.total, self.greatest)

    def percentile(self, percent: float) -> float:
        """The value that so many percent of all are not above, at most an eighth too great; 0 where there are none."""
        left = self.count * percent / 100
        for bucket in sorted(self.buckets):
            left -= self.buckets[bucket]
            if left <= 0:
                return min(end_of(bucket), self.greatest)
        return self.greatest
