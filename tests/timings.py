"""How long a run took, by suite and by file: printed at its end with `--timings`, as CI does; and
too slow fast tests.

A fast test (no Spark, no server, not marked as slow in any way) should take at most a quarter of a
second. Those that take longer are listed at the end of each run. One that takes twenty times as
much of the processor fails: processor time hardly depends on what else the machine does, seconds
do.

A suite is a folder of tests. Seconds are those of set-up, call and tear-down together, added up
over all processes: three processes do three times as many in a minute. What is shared by many tests
(a session, a server) is counted where it was asked for first.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

import pytest

FILES = 15
FAST_SECONDS = 0.25
MOST_PROCESSOR_SECONDS = (
    5.0  # of a fast test: the first one that imports Dagster or Spark takes 2 to 3
)
SLOW_KINDS = ("spark", "server", "slow", "long", "lengthy")
_PROPERTY = "processor seconds of a fast test"


@dataclass
class Spent:
    """What the tests of one suite or file took."""

    tests: int = 0
    seconds: float = 0.0
    setup: float = 0.0

    def add(self, report: pytest.TestReport) -> None:
        self.tests += report.when == "call"
        self.seconds += report.duration
        self.setup += report.duration * (report.when == "setup")


class Timings:
    """Adds up what each process reports; with several, only the one that started them has a
    summary.
    """

    def __init__(self) -> None:
        self.files: dict[str, Spent] = defaultdict(Spent)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.files[report.nodeid.partition("::")[0]].add(report)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        suites: dict[str, Spent] = defaultdict(Spent)
        for file, spent in self.files.items():
            suite = suites[str(PurePosixPath(file).parent)]
            suite.tests += spent.tests
            suite.seconds += spent.seconds
            suite.setup += spent.setup
        terminalreporter.section("seconds by suite, and by the slowest files")
        for line in (*table(suites), "", *table(self.files)[:FILES]):
            terminalreporter.write_line(line)


class FastTests:
    """Lists the fast tests that took over a quarter of a second."""

    def __init__(self) -> None:
        self.over: list[tuple[float, float, str]] = []  # seconds, those of the processor, test

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        processor = dict(report.user_properties).get(_PROPERTY)
        if report.when == "call" and processor is not None and report.duration > FAST_SECONDS:
            self.over.append((report.duration, processor, report.nodeid))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.over:
            return
        terminalreporter.section(
            "fast tests over a quarter of a second: make them faster, or mark them lengthy"
        )
        for seconds, processor, test in sorted(self.over, reverse=True):
            terminalreporter.write_line(
                f"{seconds:8.1f} s  {processor:7.1f} s of the processor  {test}"
            )


def is_fast(item: pytest.Item) -> bool:
    """Return whether `make test-fast` runs the test, and it is run as there."""
    if item.get_closest_marker("rounds") and os.environ.get("ADJUNCT_ALL_ROUNDS"):
        return False
    return not any(item.get_closest_marker(kind) for kind in SLOW_KINDS)


def processor_seconds() -> float:
    """Return what this process and its ended children have used of the processor so far."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before = processor_seconds()
    yield
    spent = round(processor_seconds() - before, 2)
    if is_fast(item):
        item.user_properties.append((_PROPERTY, spent))
        if spent > MOST_PROCESSOR_SECONDS:
            limit = f"a fast test may take {MOST_PROCESSOR_SECONDS:g} s at most"
            pytest.fail(f"{spent} s of processor time: {limit}. Mark it lengthy.", pytrace=False)


def table(spent: dict[str, Spent]) -> list[str]:
    """Return a line for each, the slowest first."""
    slowest = sorted(spent.items(), key=lambda item: -item[1].seconds)
    return [
        f"{it.seconds:8.1f} s  {it.setup:7.1f} s set-up  {it.tests:5} tests  {name}"
        for name, it in slowest
    ]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--timings", action="store_true", help="say at the end how long each suite took"
    )


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(FastTests(), "fast tests")
    if config.getoption("--timings"):
        config.pluginmanager.register(Timings(), "timings")
