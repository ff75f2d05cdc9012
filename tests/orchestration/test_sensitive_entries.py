"""What a dataset, the stream that it is made of, or a function's schema calls sensitive is told
in no error.
"""

from __future__ import annotations

import datetime as dt
import traceback
from typing import Any

import pytest

from dagster_adjunct import Application, Schema, bounded_dataset, unbounded_dataset
from dagster_adjunct.errors import OperatorFailedError
from dagster_adjunct.testing import TestApplication, TestStream

pytestmark = pytest.mark.spark

VISITS = Schema.of(visitor="string", n="int")
MEMBERS = Schema.of(visitor="string", email="string")


def refuses(record: dict[str, Any], entry: dict[str, Any]) -> list[dict[str, Any]]:
    raise ValueError(f"{entry['email']} is no address")


def with_address(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"visitor": record["visitor"], "email": "ann@mail", "n": record["n"]}]


@pytest.mark.parametrize(
    ("flagged", "way"),
    [
        ("dataset", "function"),
        ("stream", "expression"),
        pytest.param("stream", "function", marks=pytest.mark.long),
        pytest.param("function", "expression", marks=pytest.mark.long),
    ],
)
def test_a_value_of_an_entry_is_not_reported(spark: Any, flagged: str, way: str) -> None:
    app = Application("app")
    members_of = MEMBERS.with_sensitive("email") if flagged == "stream" else MEMBERS
    sensitive = ["email"] if flagged == "dataset" else []
    members = bounded_dataset(
        "members", input="lake.members", key="visitor", partitions=2, sensitive=sensitive
    )
    visits = app.input_stream("lake.visits")
    if flagged == "function":
        schema = Schema.of(visitor="string", email="string", n="int").with_sensitive("email")
        made = visits.flat_map(with_address, schema=schema)
    elif way == "function":
        made = visits.join(
            app.table(members), on="visitor", function=refuses, schema=Schema.of(ok="int")
        )
    else:
        made = visits.join(app.table(members), on="visitor")
    if way == "expression":
        made = made.with_columns(ok="length(email) div n + cast(email as int)")
    made.send_to(app.output_stream("lake.out", partitions=2, key="visitor"))
    streams = {
        "lake.visits": TestStream(VISITS, key="visitor", partitions=2),
        "lake.members": TestStream(members_of, key="visitor", partitions=2),
    }
    with TestApplication(app, streams) as tested:
        if flagged != "function":
            tested.dataset("members", [{"visitor": "ann", "email": "ann@mail"}])
        tested.input("lake.visits", [{"visitor": "ann", "n": 1}])
        with pytest.raises(OperatorFailedError) as caught:
            tested.run(spark)
    reported = "".join(traceback.format_exception(caught.value)) + repr(caught.value.facts)
    assert "ann@mail" not in reported
    assert way == "function" or "email: ***" in str(caught.value)


@pytest.mark.parametrize("flagged", [None, "who.id", "meta"])
def test_values_of_paths_into_sensitive_columns_are_not_reported(
    spark: Any, flagged: str | None
) -> None:
    schema = Schema.of(n="int", who={"id": "bigint"}, meta={"at": "timestamp"})
    if flagged is not None:
        schema = schema.with_sensitive(flagged)
    names = unbounded_dataset(
        "names", input="lake.names", key="id", partitions=2, history="all", valid_from="since"
    )
    app = Application("app", auto_repartition=True)
    joined = app.input_stream("lake.visits").join(
        app.table(names), on={"who.id": "id"}, as_of="meta.at", before_history="error"
    )
    joined.send_to(app.output_stream("lake.out", partitions=2, key="n"))
    early = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    names_schema = Schema.of(id="bigint", since="timestamp", name="string")
    later = {"id": 7, "since": early + dt.timedelta(days=1), "name": "Ann"}
    streams = {
        "lake.visits": TestStream(schema, key="n", partitions=2),
        "lake.names": TestStream(names_schema, key="id", partitions=2),
    }
    with TestApplication(app, streams) as tested:
        tested.input("lake.names", [later])
        tested.input("lake.visits", [{"n": 1, "who": {"id": 7}, "meta": {"at": early}}])
        with pytest.raises(OperatorFailedError) as caught:
            tested.run(spark)
    shown = {"who.id": "who.id = 7", "meta": "meta.at = 2026-01-01"}
    for column, text in shown.items():
        assert (text in caught.value.problem) == (column != flagged)
