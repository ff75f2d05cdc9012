"""What tests of the code location share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dagster import DagsterInstance


@pytest.fixture
def instance() -> Iterator[DagsterInstance]:
    """An instance in memory."""
    with DagsterInstance.ephemeral() as instance:
        yield instance
