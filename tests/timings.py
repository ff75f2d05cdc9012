"""How long a run took, by suite and by file: printed at its end with `--timings`, as CI does.

A suite is a folder of tests. Seconds are those of set-up, call and tear-down together, added up over all processes:
three processes do three times as many in a minute. What is shared by many tests (a session, a server) is counted
where it was asked for first.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import PurePosixPath

import pytest

FILES = 15


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
    """Adds up what each process reports; with several, only the one that started them has a summary."""

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


def table(spent: dict[str, Spent]) -> list[str]:
    """Return a line for each, the slowest first."""
    slowest = sorted(spent.items(), key=lambda item: -item[1].seconds)
    return [f"{it.seconds:8.1f} s  {it.setup:7.1f} s set-up  {it.tests:5} tests  {name}" for name, it in slowest]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--timings", action="store_true", help="say at the end how long each suite took")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--timings") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Timings(), "timings")
