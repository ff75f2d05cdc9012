"""Spans of time as text in errors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.threads import requested_once
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


def test_a_value_that_takes_requests_is_not_waited_for_by_other_instances() -> None:
    class Asks:
        def __init__(self, ask: Callable[[], int]) -> None:
            self.ask = ask

        @requested_once
        def answer(self) -> int:
            return self.ask()

    with ThreadPoolExecutor(1) as others:
        meanwhile = Asks(lambda: others.submit(lambda: Asks(lambda: 1).answer).result(10) + 1)
        assert meanwhile.answer == 2
    meanwhile.ask = lambda: 9
    assert meanwhile.answer == 2
