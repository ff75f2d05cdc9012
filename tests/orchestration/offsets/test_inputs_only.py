"""A system that can't create streams is for inputs only, and says so when a batch is rehearsed,
before it has begun.
"""

from __future__ import annotations

import pytest

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.streams.system import require_writer
from tests.orchestration.offsets.fake_streams import FakeStreams


def test_a_system_that_can_not_create_streams_says_so_beforehand() -> None:
    with pytest.raises(ConfigurationError) as failure:
        require_writer(FakeStreams())
    assert failure.value.system == "fake"
