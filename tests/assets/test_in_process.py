"""What asks for a session where there is none is refused, and nothing is lost that the next
advance would take.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pyarrow as pa
import pytest

from dagster_adjunct import (
    IN_PROCESS,
    Application,
    LakeStreams,
    Schema,
    advance_dataset,
    application_state,
    bounded_dataset,
    list_datasets,
    open_dataset,
    open_lake,
    run_application,
    unbounded_dataset,
)
from dagster_adjunct.changes import OperationColumn
from dagster_adjunct.errors import ConfigurationError
from dagster_adjunct.sources import QuerySource
from dagster_adjunct.validators import sql_check

SCHEMA = Schema.of(k="string", n="int")
ROWS = pa.table({"k": ["a", "b"], "n": [1, 2]})


@pytest.fixture
def streams(tmp_path: Path) -> LakeStreams:
    streams = LakeStreams(open_lake(tmp_path / "lake"))
    streams.create("numbers", partitions=2, schema=SCHEMA, key=["k"])
    streams.append("numbers", ROWS, producer="test", sequence=1, end_of_dataset="v1")
    return streams


def test_a_query_in_sql_is_refused(streams: LakeStreams) -> None:
    query = QuerySource("SELECT 'a' AS k, 1 AS n", schema=SCHEMA)
    numbers = bounded_dataset("numbers", input=query, key="k", partitions=2)
    with pytest.raises(
        ConfigurationError, match="can't be made without Spark: its query, which is SQL"
    ):
        advance_dataset(
            numbers, lake=streams.lake, systems={"lake": streams}, spark=IN_PROCESS, by="test"
        )
    assert "numbers" not in list_datasets(streams.lake)


@pytest.mark.parametrize("severity", ["error", "warn"])
def test_a_validator_that_asks_spark_refuses_the_advance_and_not_the_version(
    streams: LakeStreams, severity: Literal["error", "warn"]
) -> None:
    counting = sql_check("positive", "n > 0", severity=severity)
    numbers = bounded_dataset(
        "numbers", input="lake.numbers", key="k", partitions=2, validators=[counting]
    )
    with pytest.raises(
        ConfigurationError, match="validator 'positive': this needs a Spark session, but IN_PROCESS"
    ):
        advance_dataset(
            numbers, lake=streams.lake, systems={"lake": streams}, spark=IN_PROCESS, by="test"
        )
    plain = bounded_dataset("numbers", input="lake.numbers", key="k", partitions=2)
    assert (
        advance_dataset(
            plain, lake=streams.lake, systems={"lake": streams}, spark=IN_PROCESS, by="test"
        ).action
        == "sealed"
    )
    with open_dataset(streams.lake, "numbers") as served:
        assert served.get("b") == {"k": "b", "n": 2}


def test_a_batch_of_an_application_is_refused_and_the_next_run_takes_its_records(
    streams: LakeStreams,
) -> None:
    app = Application("copy")
    app.input_stream("lake.numbers").send_to(
        app.output_stream("lake.copied", partitions=2, key="k")
    )
    with pytest.raises(ConfigurationError) as caught:
        run_application(
            app, lake=streams.lake, systems={"lake": streams}, spark=IN_PROCESS, run="test"
        )
    assert (caught.value.application, caught.value.argument) == ("copy", "engine")
    left = application_state(streams.lake, "copy")
    assert (left.records, left.open) == (0, None)


@pytest.mark.parametrize("order", ["n", ["n", "at"], None])
def test_an_advance_over_ignored_records_only_moves_on(
    tmp_path: Path, order: str | list[str] | None
) -> None:
    streams = LakeStreams(open_lake(tmp_path / "lake"))
    streams.create(
        "log", schema=Schema.of(k="string", n="int", at="int", op="string"), key=["k"], partitions=1
    )
    changes = OperationColumn("op", ignore=["m"])
    table = unbounded_dataset(
        "table", input="lake.log", key="k", partitions=1, changes=changes, order_by=order
    )

    def advance_over(sequence: int, *operations: str) -> None:
        rows = [
            {"k": "a", "n": sequence, "at": place, "op": op} for place, op in enumerate(operations)
        ]
        streams.append("log", rows, producer="test", sequence=sequence)
        advance_dataset(
            table, lake=streams.lake, systems={"lake": streams}, spark=IN_PROCESS, by="test"
        )

    advance_over(1, "c")
    advance_over(2, "m", "m")
    advance_over(3, "u")
    with open_dataset(streams.lake, table) as served:
        assert served.get("a") == {"k": "a", "n": 3, "at": 0}
