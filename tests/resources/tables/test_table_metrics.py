from __future__ import annotations

import asyncio
import math
import pickle
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.tables.metrics import (
    Histogram,
    Meter,
    PrometheusTables,
    RecordCounts,
    StoreCounts,
    TableMetrics,
    bucket_end,
    report_tables_to,
)
from dagster_adjunct.resources.tables.rate import RateLimit
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.resources.tables.manual_clock import ManualClock

SECONDS = st.floats(1e-6, 1e4)


def measured(values) -> TableMetrics:
    meter = Meter()
    for value in values:
        meter.attempt(True, 1, value)
    return meter.metrics()


@given(st.floats(1e-9, 1e9))
def test_a_value_is_stored_in_its_bucket_which_is_no_wider_than_an_eighth_of_it(value):
    (bucket,) = measured([value]).attempts.write_seconds.buckets
    assert bucket_end(bucket - 1) <= value < bucket_end(bucket)
    assert bucket_end(bucket) - bucket_end(bucket - 1) <= value / 8 * (1 + 1e-9)


@given(st.lists(SECONDS, min_size=1, max_size=60), st.integers(1, 100))
def test_a_percentile_is_at_most_an_eighth_above_what_sorting_says(values, percent):
    exact = sorted(values)[math.ceil(len(values) * percent / 100) - 1]
    assert (
        exact
        <= measured(values).attempts.write_seconds.percentile(percent) * (1 + 1e-9)
        <= exact * 9 / 8 * (1 + 1e-8)
    )


@given(st.lists(st.lists(SECONDS, max_size=20), max_size=6))
def test_what_tasks_measured_adds_up_to_what_one_would_have(tasks):
    total = sum(map(measured, tasks), TableMetrics())
    alone = measured([value for values in tasks for value in values])
    assert total.attempts.write_seconds.buckets == alone.attempts.write_seconds.buckets
    assert total.attempts.write_seconds.greatest == alone.attempts.write_seconds.greatest
    assert total.attempts.write_seconds.total == pytest.approx(alone.attempts.write_seconds.total)
    sent = [pickle.loads(pickle.dumps(measured(task))) for task in tasks]
    assert sum(sent, TableMetrics()) == total


def test_what_came_later_is_the_difference():
    early, late = measured([0.1, 0.2]), measured([0.1, 0.2, 3.0])
    assert (late - early).attempts.write_seconds.buckets == measured(
        [3.0]
    ).attempts.write_seconds.buckets
    early, late = (
        TableMetrics(RecordCounts(reads=reads), store=StoreCounts(rate_waits=waits))
        for reads, waits in ((2, 1.0), (5, 2.5))
    )
    assert ((late - early).records.reads, (late - early).to_dict()["rate_waits"]) == (3, 1.5)


def test_metrics_are_numbers():
    numbers = measured([random.Random(1).random() for _ in range(100)]).to_dict()
    assert all(type(value) in (int, float) for value in numbers.values())
    assert {
        "write_seconds_mean",
        "write_seconds_p50",
        "write_seconds_p99",
        "write_seconds_max",
    } <= numbers.keys()
    assert "read_seconds_p50" not in numbers  # nothing was read
    assert all(type(value) is int for value in TableMetrics().counts().values())
    assert "rate_waits" not in Meter().metrics().counts()


def test_counting_is_a_few_calls_whatever_was_counted_before():
    """What keeps a count under a microsecond; `benchmarks/tables.py` has the time itself."""
    meter = Meter()
    for _ in range(10_000):
        meter.attempt(True, 100, random.random())

    def calls(count) -> int:
        made: list[str] = []
        sys.setprofile(lambda _, event, __: made.append(event))
        try:
            count()
        finally:
            sys.setprofile(None)
        # of `count` itself, and of ending the profile
        return sum(event in ("call", "c_call") for event in made) - 2

    assert calls(lambda: None) == 0
    assert calls(lambda: meter.add("retries")) <= 3
    assert calls(lambda: meter.attempt(True, 100, 0.003)) <= 8


class Reports(list):
    def report(self, table, metrics):
        self.append((table, metrics))


def test_a_table_reports_what_it_did_once_when_it_is_flushed_and_closed():
    async def run(table) -> None:
        await table.put("a", {"n": 1})
        await table.flush()
        await table.get("a")
        await table.get("b")
        await table.close()

    reports = Reports()
    end = report_tables_to(reports)
    try:
        store = MemoryTable("reporting")
        asyncio.run(run(RemoteTable("t", key="id", read_function=store, write_function=store)))
    finally:
        end()
    asyncio.run(run(RemoteTable("t", key="id", read_function=store, write_function=store)))
    assert [
        (table, did.records.writes, did.records.reads, did.records.found, did.store.requests)
        for table, did in reports
    ] == [("t", 1, 0, 0, 1), ("t", 0, 2, 1, 2)]


def test_a_hook_that_fails_does_not_fail_the_table(caplog):
    class Broken:
        def report(self, table, metrics):
            raise OSError("no route to the gateway")

    end = report_tables_to(Broken())
    try:
        store = MemoryTable("reporting")
        asyncio.run(RemoteTable("orders", key="id", read_function=store).close())
    finally:
        end()
    assert "metrics of table orders did not reach" in caplog.text


def test_prometheus_collects_what_the_tables_report():
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    registry = CollectorRegistry()
    end = report_tables_to(PrometheusTables(registry))
    clock, store = ManualClock(), MemoryTable("collected")

    async def run(name) -> TableMetrics:
        table = RemoteTable(
            name,
            key="id",
            write_function=store,
            batch_size=10,
            rate_limit=RateLimit(None, 40),
            clock=clock,
        )
        await table.put_all([(n, {"n": n}) for n in range(25)])
        await table.close()
        return table.metrics

    try:
        did = asyncio.run(run("a"))
        asyncio.run(run("b"))
        asyncio.run(run("b"))
    finally:
        end()
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }
    assert samples["adjunct_table_writes_total", ("table", "a")] == 25
    assert samples["adjunct_table_writes_total", ("table", "b")] == 50
    assert samples["adjunct_table_rate_waits_seconds_total", ("table", "a")] == pytest.approx(
        did.store.rate_waits
    )
    entries = [
        samples["adjunct_table_attempt_entries_bucket", ("le", end), ("table", "a")]
        for end in ("8.0", "16.0")
    ]
    assert entries == [1, 3]  # 10, 10 and 5
    labels = (("kind", "write"), ("table", "a"))
    assert samples["adjunct_table_attempt_seconds_count", *labels] == 3
    assert samples["adjunct_table_attempt_seconds_sum", *labels] == pytest.approx(
        did.attempts.write_seconds.total
    )


def test_a_histogram_of_nothing_says_nothing():
    assert (Histogram().percentile(99), Histogram().count) == (0, 0)
