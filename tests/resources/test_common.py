"""Spans of time as text in errors."""

from __future__ import annotations

from datetime import timedelta

import pytest

from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.times import describe_span


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (timedelta(minutes=5), "0:05:00"),
        (timedelta(minutes=-5), "-0:05:00"),
        (timedelta(days=-1), "-1 day, 0:00:00"),
        (timedelta.max, str(timedelta.max)),
        (60, "60"),
        ("5m", "'5m'"),
    ],
)
def test_a_span_is_described_as_text(span: object, text: str) -> None:
    assert describe_span(span) == text


def test_an_error_shows_a_negative_span_as_it_was_meant() -> None:
    with pytest.raises(ConfigurationError, match="grace=-0:05:00:"):
        DiscardPolicy(grace=timedelta(minutes=-5))
