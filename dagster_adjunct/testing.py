"""For the tests of those who write applications: plans and runs without a lake or a server."""

from __future__ import annotations

from dagster_adjunct._arguments import guard
from dagster_adjunct.orchestration.testing.assert_plannable import assert_plannable
from dagster_adjunct.orchestration.testing.given_streams import TestStream
from dagster_adjunct.orchestration.testing.tested_application import TestApplication, TestResult

__all__ = [
    "TestApplication",
    "TestResult",
    "TestStream",
    "assert_plannable",
]

guard(globals(), __all__)
