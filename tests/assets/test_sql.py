"""SQL over the lake: exactly the datasets, versions and streams that a query names, masked,
read-only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct import (
    IN_PROCESS,
    Lake,
    LakeStreams,
    Schema,
    advance_dataset,
    bounded_dataset,
    open_dataset,
    open_lake,
    unbounded_dataset,
)
from dagster_adjunct.assets.exchange import sql as module
from dagster_adjunct.assets.exchange.sql import query_lake
from dagster_adjunct.errors import (
    AdjunctError,
    ConfigurationError,
    DatasetError,
    DatasetNotFoundError,
    StreamNotFoundError,
)

SCHEMA = Schema.of(tail="string", seats="int", owner="string")


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Two versions of planes, a table of changes with deltas, and streams."""
    lake = open_lake(tmp_path_factory.mktemp("sql"))
    streams = LakeStreams(lake)
    streams.create("planes", schema=SCHEMA, key=["tail"], partitions=2)
    streams.create("changes", schema=SCHEMA.with_sensitive("owner"), key=["tail"], partitions=2)
    planes = bounded_dataset(
        "planes", input="lake.planes", key="tail", partitions=2, sensitive=["owner"]
    )
    fleet = unbounded_dataset(
        "fleet", input="lake.changes", key="tail", partitions=2, sensitive=["seats"]
    )
    for number in (1, 2):
        rows = [
            {"tail": f"N{n}", "seats": n * number, "owner": "Ann" if n else None} for n in range(5)
        ]
        streams.append("planes", rows, producer="p", sequence=number, end_of_dataset=f"v{number}")
        streams.append("changes", rows[number:], producer="p", sequence=number)
        for spec in (planes, fleet):
            advance_dataset(spec, lake=lake, systems={"lake": streams}, spark=IN_PROCESS, by="me")
    return lake


def rows(lake: Lake, query: str) -> list[tuple[Any, ...]]:
    with query_lake(lake, query) as reader:
        return [tuple(row.values()) for row in reader.read_all().to_pylist()]


@pytest.mark.lengthy
def test_a_dataset_a_version_and_a_stream_are_queried_by_name(lake: Lake) -> None:
    joined = (
        'select new.tail, new.seats, old.seats as was from planes new join "planes@v1" old using'
        " (tail) order by 1"
    )
    assert rows(lake, joined) == [(f"N{n}", 2 * n, n) for n in range(5)]
    for name in ('"lake.planes"', "lake.planes"):
        assert rows(lake, f"select count(*), sum(seats), max(__epoch) from {name}") == [(10, 30, 0)]
    assert rows(lake, "with a as (from planes) select count(*) from a where seats > 2") == [(3,)]
    assert rows(
        lake, "select (select max(seats) from planes) - seats from lake.planes order by 1 limit 1"
    ) == [(0,)]


def test_deltas_are_merged_as_the_dataset_reads_them(lake: Lake) -> None:
    with open_dataset(lake, "fleet") as fleet:
        expected = sorted(key for key, _ in fleet.items())
        assert len(fleet.sealed.generations) > 1
    assert [tail for (tail,) in rows(lake, "select tail from fleet order by 1")] == expected


def test_values_of_sensitive_columns_are_masked_and_nulls_are_not(lake: Lake) -> None:
    assert rows(lake, "select distinct owner from planes order by owner") == [("***",), (None,)]
    assert rows(lake, "select count(*) from \"planes@v1\" where owner = 'Ann'") == [(0,)]
    assert rows(lake, "select distinct seats, owner from fleet") == [("***", "***")]
    assert rows(lake, "select distinct owner from lake.changes") == [("***",)]


def test_only_what_a_query_names_is_opened(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    create = module._create_view
    monkeypatch.setattr(
        module, "_create_view", lambda *given: (opened.append(given[3]), create(*given))
    )
    rows(lake, 'with fleet as (select 1) select * from "planes@v1", fleet')
    assert opened == ["planes@v1"]


REJECTED: dict[str, tuple[str, type[AdjunctError], str]] = {
    "a dataset that there is not": ("from plane", DatasetNotFoundError, "Did you mean planes?"),
    "a stream without its system": ("from changes", DatasetNotFoundError, '"lake.changes"'),
    "a stream that there is not": (
        "from lake.plans",
        StreamNotFoundError,
        'Did you mean "lake.planes"?',
    ),
    "a stream of another system": (
        "from kafka.scans",
        StreamNotFoundError,
        "Streams of other systems",
    ),
    "a version that there is not": (
        'from "planes@v9"',
        DatasetError,
        "adjunct dataset versions planes",
    ),
    "a file": ("from 'x.csv'", StreamNotFoundError, "of the lake"),
    "a function that reads files": ("from read_csv('/etc/passwd')", ConfigurationError, "SQL"),
    "a function that lists files": ("from glob('/*')", ConfigurationError, "SQL"),
    "a change": ("drop view planes", ConfigurationError, "Give one query"),
    "a new table": ("create table t as select 1", ConfigurationError, "Give one query"),
    "a copy": ("copy (select 1) to '/tmp/x.csv'", ConfigurationError, "Give one query"),
    "an extension": ("install httpfs", ConfigurationError, "Give one query"),
    "a setting": ("set enable_external_access = true", ConfigurationError, "Give one query"),
    "two queries": ("select 1; select 2", ConfigurationError, "Give one query"),
    "nothing": ("", ConfigurationError, "Give one query"),
    "wrong syntax": ("selec 1", ConfigurationError, "Correct the SQL"),
    "a column that there is not": (
        "select sets from planes",
        ConfigurationError,
        "Correct the SQL",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_can_not_be_queried_is_refused_with_what_there_is(name: str, lake: Lake) -> None:
    query, kind, step = REJECTED[name]
    with pytest.raises(kind) as caught:
        rows(lake, query)
    assert step in caught.value.next_step
    if kind in (DatasetNotFoundError, StreamNotFoundError):
        assert "planes" in caught.value.problem


def test_variables_of_the_program_are_no_tables(lake: Lake) -> None:
    import pyarrow as pa

    own = pa.table({"a": [1]})
    assert own.num_rows == 1
    with pytest.raises(DatasetNotFoundError):
        rows(lake, "from own")


def test_a_version_is_leased_until_the_result_is_read(tmp_path: Path) -> None:
    lake = open_lake(tmp_path)
    streams = LakeStreams(lake)
    streams.create("a", schema=SCHEMA, key=["tail"], partitions=1)
    streams.append("a", [{"tail": "x"}], producer="p", sequence=1, end_of_dataset="v1")
    spec = bounded_dataset("a", input="lake.a", key="tail", partitions=1)
    advance_dataset(spec, lake=lake, systems={"lake": streams}, spark=IN_PROCESS, by="me")

    def leases() -> int:
        return sum(1 for info in lake.store.list("") if "/leases/" in info.key)

    with query_lake(lake, "from a") as reader:
        assert leases() == 1
        assert reader.read_all().num_rows == 1
    assert leases() == 0
