"""`PrometheusTables`: the counts of all tables of this process, as a Prometheus server collects them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.tables.histogram import Histogram, end_of
from dagster_adjunct.resources.tables.metrics import TableMetrics

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

# Ends of buckets of ours, so nothing is guessed: seconds from 0.1 ms to 2 min, entries up to a million.
_SECONDS = tuple(2.0**exponent for exponent in range(-13, 8))
_ENTRIES = tuple(2.0**exponent for exponent in range(21))


class PrometheusTables:
    """A `MetricsHook` that a Prometheus registry collects from.

        report_tables_to(PrometheusTables())   # served by prometheus_client.start_http_server(9000)

    Counts are `adjunct_table_<count>_total`, waits `adjunct_table_<wait>_seconds_total`, and the histograms
    `adjunct_table_attempt_seconds` (by kind, read or write) and `adjunct_table_attempt_entries`; the label is `table`.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise ConfigurationError(
                "PrometheusTables needs prometheus_client, which is not installed.",
                "Install it: pip install 'dagster-adjunct[metrics]'.",
                package="prometheus_client",
            ) from error
        self._totals: dict[str, TableMetrics] = {}
        self._adding = threading.Lock()
        if registry is None:
            registry = prometheus_client.REGISTRY
        if not isinstance(registry, prometheus_client.CollectorRegistry):
            raise ConfigurationError(
                f"PrometheusTables got registry={registry!r}; expected a prometheus_client.CollectorRegistry, or None "
                "for the default one.",
                "Give it a registry, or leave it out.",
                argument="registry",
            )
        registry.register(self)

    def report(self, table: str, metrics: TableMetrics) -> None:
        with self._adding:
            self._totals[table] = self._totals.get(table, TableMetrics()) + metrics

    def describe(self) -> list[Any]:
        """Nothing, as no table is known when the registry asks."""
        return []

    def collect(self) -> Iterator[Any]:
        """All counts as metric families."""
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        with self._adding:
            totals = dict(self._totals)
        for field in fields(TableMetrics):
            if field.type == "Histogram":
                continue
            name = f"{field.name}_seconds" if field.type == "float" else field.name
            family = CounterMetricFamily(f"adjunct_table_{name}", field.name.replace("_", " "), labels=["table"])
            for table, metrics in totals.items():
                family.add_metric([table], getattr(metrics, field.name))
            yield family
        seconds = HistogramMetricFamily(
            "adjunct_table_attempt_seconds", "attempts at the store", labels=["table", "kind"]
        )
        entries = HistogramMetricFamily("adjunct_table_attempt_entries", "entries of an attempt", labels=["table"])
        for table, metrics in totals.items():
            for kind, histogram in (("read", metrics.read_seconds), ("write", metrics.write_seconds)):
                seconds.add_metric([table, kind], _cumulative(histogram, _SECONDS), histogram.total)
            sizes = metrics.batch_sizes
            entries.add_metric([table], _cumulative(sizes, _ENTRIES), sizes.total)
        yield seconds
        yield entries


def _cumulative(histogram: Histogram, ends: tuple[float, ...]) -> list[tuple[str, float]]:
    """How many values lie below each end, as Prometheus has it. A value that is an end counts as above it."""
    counts: Mapping[int, int] = histogram.buckets
    below = [(str(end), float(sum(n for bucket, n in counts.items() if end_of(bucket) <= end))) for end in ends]
    return [*below, ("+Inf", float(histogram.count))]
