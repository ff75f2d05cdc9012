"""Fast tests that are not fast are named by the run, and those that are far from it fail."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
TESTS = """
import time
import pytest

def spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

def test_quick(): pass
def test_waits(): time.sleep(0.2)
def test_spins(): spin(0.4)

@pytest.mark.lengthy
def test_lengthy(): spin(0.4)
"""


@pytest.mark.lengthy
def test_slow_fast_tests_are_listed_and_far_too_slow_ones_fail(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "import tests.timings as timings\n"
        "timings.FAST_SECONDS, timings.MOST_PROCESSOR_SECONDS = 0.1, 0.3\n"
        "pytest_plugins = ['tests.timings']\n"
        "def pytest_configure(config): config.addinivalue_line('markers', 'lengthy: slow')\n"
    )
    pytester.makepyfile(TESTS)
    done = pytester.runpytest_subprocess("-p", "no:xdist", "-p", "no:cacheprovider", "-q")
    done.assert_outcomes(passed=3, failed=1)
    text = done.stdout.str()
    assert "Mark it lengthy" in text
    section = text[text.index("fast tests over") :]
    assert "::test_waits" in section
    assert "::test_quick" not in section
    assert "::test_lengthy" not in section
