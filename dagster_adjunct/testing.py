"""For the tests of those who write applications: plans and runs without a lake or a server."""

from __future__ import annotations

from dagster_adjunct.orchestration.testing.application import TestApplication, TestResult, assert_plannable
from dagster_adjunct.orchestration.testing.fakes import TestStream

__all__ = [
    "TestApplication",
    "TestResult",
    "TestStream",
    "assert_plannable",
]
