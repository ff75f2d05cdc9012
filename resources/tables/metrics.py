"""Metrics of tables, which add up over tasks and batches.

`Meter` counts what a table's layers do, `TableMetrics` holds the counts, and hooks such as
`PrometheusTables` receive them.
"""

from __future__ import annotations

import logging
import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from math import frexp
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.optional_packages import import_package
from dagster_adjunct.resources.validation import validated, validated_methods

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

C = TypeVar("C")
_PER_DOUBLING = 8


def bucket_end(bucket: int) -> float:
    """The upper bound, exclusive, of a histogram's bucket, given its number.

    Between a power of two and the next there are eight buckets of equal width, so a bucket's bounds
    differ by at most an eighth.
    """
    exponent, part = divmod(bucket, _PER_DOUBLING)
    return float((_PER_DOUBLING + part + 1) / (2 * _PER_DOUBLING) * 2.0**exponent)


@dataclass(slots=True)
class Histogram:
    """The number of values in each bucket (`bucket_end`), and their exact sum and maximum.

    Values of 0 and less are counted in the lowest bucket.
    """

    buckets: dict[int, int] = field(default_factory=dict)
    total: float = 0.0
    greatest: float = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        fraction, exponent = frexp(value if value > 1e-9 else 1e-9)
        bucket = exponent * _PER_DOUBLING + int(fraction * 2 * _PER_DOUBLING) - _PER_DOUBLING
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1
        self.total += value
        if value > self.greatest:  # noqa: PLR1730 - half of the time of max()
            self.greatest = value

    def copy(self) -> Histogram:
        """Return a histogram with the same values, which later ones don't change."""
        return Histogram(dict(self.buckets), self.total, self.greatest)

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.buckets.values())

    def __add__(self, other: Histogram) -> Histogram:
        buckets = dict(Counter(self.buckets) + Counter(other.buckets))
        return Histogram(buckets, self.total + other.total, max(self.greatest, other.greatest))

    def __sub__(self, other: Histogram) -> Histogram:
        """The values added since `other`, an earlier state of this histogram; the maximum stays
        that of all values.
        """
        buckets = dict(Counter(self.buckets) - Counter(other.buckets))
        return Histogram(buckets, self.total - other.total, self.greatest)

    def percentile(self, percent: float) -> float:
        """The value that `percent` % of the values do not exceed, at most an eighth too great; 0
        without values.
        """
        left = self.count * percent / 100
        for bucket in sorted(self.buckets):
            left -= self.buckets[bucket]
            if left <= 0:
                return min(bucket_end(bucket), self.greatest)
        return self.greatest


_PERCENTILES = (50, 95, 99)


class _Sum:
    """Values that are added and subtracted field by field."""

    __slots__ = ()

    def __add__(self, other: Self) -> Self:
        return self._combined(other, operator.add)

    def __sub__(self, other: Self) -> Self:
        """What was counted since `other`, an earlier state."""
        return self._combined(other, operator.sub)

    def _combined(self, other: Self, combine: Callable[[Any, Any], Any]) -> Self:
        """Return the values that `combine` makes of both values of each field."""
        names = [member.name for member in fields(self)]  # type: ignore[arg-type]
        return type(self)(*(combine(getattr(self, name), getattr(other, name)) for name in names))


@dataclass(frozen=True, slots=True)
class RecordCounts(_Sum):
    """What was done with records.

    `defaults_put` never counts a default twice, but may miss one that the store inserted without
    the reply arriving.
    """

    reads: int = 0  # keys requested
    found: int = 0  # of these, keys with a record
    writes: int = 0  # whole records put by the caller
    deletes: int = 0
    updates: int = 0  # updates applied
    # writes whose condition failed: the store has a newer record, or has applied them already
    skipped: int = 0
    # writes that were done without being sent, because others of their key were (compact batches)
    compacted: int = 0
    defaults_put: int = 0  # records created from a default


@dataclass(frozen=True, slots=True)
class CacheCounts(_Sum):
    """What the cache of a table was worth."""

    hits: int = 0  # keys whose record, or absence, was cached
    misses: int = 0
    evictions: int = 0  # records evicted for lack of space


@dataclass(frozen=True, slots=True)
class StoreCounts(_Sum):
    """What the store was asked, and how that went."""

    requests: int = 0  # without retries
    successes: int = 0  # requests of which no entry was given up; a missing record is no failure
    failures: int = 0  # requests of which an entry was given up
    retries: int = 0  # retried requests
    given_up: int = 0  # entries that had failed, or had an unknown outcome, when retries ended
    timeouts: int = 0  # attempts that timed out
    throttled: int = 0  # attempts after which the store asked to wait
    rate_waits: float = 0.0  # seconds that requests waited for credits, summed
    retry_waits: float = 0.0  # seconds that requests waited before retries


@dataclass(frozen=True, slots=True)
class Attempts(_Sum):
    """How long each attempt of a request took, without waits, and how many entries it had."""

    read_seconds: Histogram = field(default_factory=Histogram)
    write_seconds: Histogram = field(default_factory=Histogram)
    batch_sizes: Histogram = field(default_factory=Histogram)


@dataclass(frozen=True, slots=True)
class TableMetrics(_Sum):
    """What was done with a table since this object of it was created."""

    records: RecordCounts = field(default_factory=RecordCounts)
    cache: CacheCounts = field(default_factory=CacheCounts)
    store: StoreCounts = field(default_factory=StoreCounts)
    attempts: Attempts = field(default_factory=Attempts)

    def totals(self) -> dict[str, int | float]:
        """All counts, and seconds that requests waited, by name; those of the cache are
        `cache_hits` and so on.
        """
        cache = {f"cache_{name}": value for name, value in asdict(self.cache).items()}
        return asdict(self.records) | cache | asdict(self.store)

    def counts(self) -> dict[str, int]:
        """The totals that are whole numbers."""
        return {name: value for name, value in self.totals().items() if isinstance(value, int)}

    def to_dict(self) -> dict[str, int | float]:
        """The totals, and mean, percentiles and maximum of each histogram that has values."""
        numbers = self.totals()
        for member in fields(self.attempts):
            name = member.name
            values: Histogram = getattr(self.attempts, name)
            if not values.count:
                continue
            numbers[f"{name}_mean"] = values.total / values.count
            numbers |= {
                f"{name}_p{percent}": values.percentile(percent) for percent in _PERCENTILES
            }
            numbers[f"{name}_max"] = values.greatest
        return numbers


class Meter:
    """Counts what one `RemoteTable` does in one process. Thread-safe; counting takes well under
    a microsecond.
    """

    __slots__ = ("_attempts", "_counting", "_totals")

    def __init__(self) -> None:
        self._counting = threading.Lock()
        self._totals = TableMetrics().totals()
        self._attempts = Attempts()

    def add(self, name: str, amount: float = 1, present: int = 0) -> None:
        """Add to one of `TableMetrics.totals`, by name; for reads also the number of keys with a
        record (`present`).
        """
        with self._counting:
            self._totals[name] += amount
            if present:
                self._totals["found"] += present

    def request(self, *, succeeded: bool) -> None:
        """Count a request to the store; if it `succeeded`, without a problem, also as a success."""
        with self._counting:
            self._totals["requests"] += 1
            if succeeded:
                self._totals["successes"] += 1

    def attempt(self, writes: bool, entries: int, seconds: float) -> None:
        """Count one attempt of a request, which `writes` or reads: `seconds` is how long
        it took.
        """
        attempts = self._attempts
        with self._counting:
            (attempts.write_seconds if writes else attempts.read_seconds).add(seconds)
            attempts.batch_sizes.add(entries)

    def metrics(self) -> TableMetrics:
        """The current counts."""
        with self._counting:
            attempts = self._attempts
            return TableMetrics(
                self._counted(RecordCounts),
                self._counted(CacheCounts, "cache_"),
                self._counted(StoreCounts),
                Attempts(
                    attempts.read_seconds.copy(),
                    attempts.write_seconds.copy(),
                    attempts.batch_sizes.copy(),
                ),
            )

    def _counted(self, kind: Callable[..., C], prefix: str = "") -> C:
        """Return the current counts as a value of this class; `prefix` precedes its fields' names
        in the totals.
        """
        names = [member.name for member in fields(kind)]  # type: ignore[arg-type]
        return kind(**{name: self._totals[prefix + name] for name in names})


logger = logging.getLogger(__name__)


@validated
class MetricsHook(Protocol):
    """Receives what tables have done.

    A table in this process reports when it is flushed or closed. What a run's Spark tasks did with
    a table is reported in the run's process, at the end of the operator that uses the table.
    """

    def report(self, table: str, metrics: TableMetrics) -> None:
        """Receive what `table` has done since its last report. May be called from several
        threads.
        """
        ...


_HOOKS: list[MetricsHook] = []


@validated
def report_tables_to(hook: MetricsHook) -> Callable[[], None]:
    """Report all tables of this process to `hook` from now on; call the result to stop."""
    _HOOKS.append(hook)

    def end() -> None:
        if hook in _HOOKS:
            _HOOKS.remove(hook)

    return end


def has_metrics_hooks() -> bool:
    """Whether any hook is registered."""
    return bool(_HOOKS)


def report_metrics(table: str, metrics: TableMetrics) -> None:
    """Call `report` of all hooks. A hook's error is logged and not raised, since the table's
    work is done.
    """
    for hook in tuple(_HOOKS):
        try:
            hook.report(table, metrics)
        except Exception:
            logger.exception("The metrics of table %s did not reach %r.", table, hook)


# Prometheus' bounds are also bounds of our buckets, so counts are exact: seconds from 0.1 ms to 2
# min, entries up to a million.
_SECONDS = tuple(2.0**exponent for exponent in range(-13, 8))
_ENTRIES = tuple(2.0**exponent for exponent in range(21))


@validated_methods
class PrometheusTables:
    """A `MetricsHook` that a Prometheus registry collects from.

        report_tables_to(PrometheusTables())   # served by prometheus_client.start_http_server(9000)

    Counts are `adjunct_table_<count>_total`, waits `adjunct_table_<wait>_seconds_total`, and the
    histograms `adjunct_table_attempt_seconds` (by kind, read or write) and
    `adjunct_table_attempt_entries`; the label is `table`.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        prometheus_client = import_package("PrometheusTables", "prometheus_client", "metrics")
        self._totals: dict[str, TableMetrics] = {}
        self._adding = threading.Lock()
        if registry is None:
            registry = prometheus_client.REGISTRY
        if not isinstance(registry, prometheus_client.CollectorRegistry):
            what = (
                f"PrometheusTables got registry={registry!r}; expected a CollectorRegistry, or"
                " None."
            )
            raise ConfigurationError(what, argument="registry")
        registry.register(self)

    def report(self, table: str, metrics: TableMetrics) -> None:
        with self._adding:
            self._totals[table] = self._totals.get(table, TableMetrics()) + metrics

    def describe(self) -> list[Any]:
        """Return no metrics: when the registry calls this, at registration, no table has
        reported.
        """
        return []

    def collect(self) -> Iterator[Any]:
        """All counts as metric families."""
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        with self._adding:
            totals = dict(self._totals)
        for name, zero in TableMetrics().totals().items():
            unit = "_seconds" if isinstance(zero, float) else ""
            family = CounterMetricFamily(
                f"adjunct_table_{name}{unit}", name.replace("_", " "), labels=["table"]
            )
            for table, metrics in totals.items():
                family.add_metric([table], metrics.totals()[name])
            yield family
        seconds = HistogramMetricFamily(
            "adjunct_table_attempt_seconds", "attempts at the store", labels=["table", "kind"]
        )
        entries = HistogramMetricFamily(
            "adjunct_table_attempt_entries", "entries of an attempt", labels=["table"]
        )
        for table, metrics in totals.items():
            attempts = metrics.attempts
            for kind, histogram in (
                ("read", attempts.read_seconds),
                ("write", attempts.write_seconds),
            ):
                seconds.add_metric([table, kind], _cumulative(histogram, _SECONDS), histogram.total)
            sizes = attempts.batch_sizes
            entries.add_metric([table], _cumulative(sizes, _ENTRIES), sizes.total)
        yield seconds
        yield entries


def _cumulative(histogram: Histogram, ends: tuple[float, ...]) -> list[tuple[str, float]]:
    """Return (bound, number of values below it) for each of `ends`, as Prometheus expects.

    A value equal to a bound counts as above it.
    """
    counts: Mapping[int, int] = histogram.buckets
    below = [
        (str(end), float(sum(n for bucket, n in counts.items() if bucket_end(bucket) <= end)))
        for end in ends
    ]
    return [*below, ("+Inf", float(histogram.count))]
