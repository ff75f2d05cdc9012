"""For tests of your applications: plan and run them without a lake or a server."""

from dagster_adjunct.orchestration.testing import TestApplication as TestApplication
from dagster_adjunct.orchestration.testing import TestResult as TestResult
from dagster_adjunct.orchestration.testing import TestStream as TestStream
from dagster_adjunct.orchestration.testing import assert_plannable as assert_plannable
