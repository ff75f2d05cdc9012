"""For the tests of those who write applications: plans and runs without a lake or a server."""

from dagster_adjunct.orchestration.testing.application import TestApplication as TestApplication
from dagster_adjunct.orchestration.testing.application import TestResult as TestResult
from dagster_adjunct.orchestration.testing.application import assert_plannable as assert_plannable
from dagster_adjunct.orchestration.testing.fakes import TestStream as TestStream
