"""A plan looks at all streams of a dataset: also at those of dead letters and of transactions."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_adjunct import Application, LakeStreams, Schema, open_lake, unbounded_dataset
from dagster_adjunct.changes import DeadLetters, DebeziumEnvelope
from dagster_adjunct.errors import AdjunctError
from dagster_adjunct.orchestration.planner.planner import plan_application

ROW = Schema.of(id="int", n="int")


def refusal(**options: Any) -> AdjunctError:
    """Return the error of planning a join with a dataset that follows changes in this way."""
    lake = open_lake("memory://streams-beside")
    streams = LakeStreams(lake)
    streams.create("orders", schema=ROW, key=["id"], partitions=2)
    streams.create("accounts", schema=Schema.of(value="string"), key=[], partitions=1)
    accounts = unbounded_dataset(
        "accounts", input="lake.accounts", key="id", broadcast=True, **options
    )
    app = Application("beside")
    orders = app.input_stream("lake.orders")
    orders.join(app.table(accounts), on="id", select=["n as m"]).send_to(
        app.output_stream("lake.out", partitions=2, key="id")
    )
    with pytest.raises(AdjunctError) as refused:
        plan_application(app, lake=lake)
    return refused.value


def envelope(**options: Any) -> DebeziumEnvelope:
    return DebeziumEnvelope("id INT, n INT", **options)


def test_dead_letters_go_to_a_system_that_exists() -> None:
    error = refusal(changes=envelope(), on_bad_change=DeadLetters("undeclared.dead"))
    assert "undeclared" in error.problem


def test_dead_letters_go_to_no_stream_of_other_records() -> None:
    error = refusal(changes=envelope(), on_bad_change=DeadLetters("lake.orders"))
    assert error.facts["dataset"] == "accounts"
    assert "lake.orders" in error.problem


def test_the_stream_of_transactions_exists() -> None:
    changes = envelope(transactions="lake.tx", collection="public.accounts")
    error = refusal(changes=changes)
    assert error.facts["stream"] == "lake.tx"
