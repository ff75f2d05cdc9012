"""The public names have the types that users are told: mypy checks code of users, right and
wrong.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_code_of_users_has_the_types_that_it_says_and_mistakes_are_reported() -> None:
    # An expected error that is not told is an unused comment, which --strict reports.
    command = [sys.executable, "-m", "mypy", "--strict", "tests/typing"]
    reported = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert reported.returncode == 0, reported.stdout + reported.stderr
