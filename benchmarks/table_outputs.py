"""Appending nested rows to Iceberg and Delta tables: as the batch of an application, against
PyIceberg's and delta-rs' own append of the same rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pyarrow as pa

from benchmarks.timing import alternate, show
from dagster_adjunct import Schema
from dagster_adjunct.exchange import DeltaLakeTable, IcebergTable
from dagster_adjunct.resources.output_tables.batches import OutputBatch, OutputColumns
from dagster_adjunct.resources.output_tables.opening import AnyOutputTable, open_output

if TYPE_CHECKING:
    from pyiceberg.table import Table

COLUMNS = OutputColumns(
    Schema.of(
        id="bigint",
        at="timestamp",
        kind="string",
        price="decimal(10,2)",
        lines=[{"sku": "string", "count": "int"}],
    ),
    (("__epoch", "int"),),
)
DAYS = 4


def run(rounds: int, count: int = 1_000_000) -> None:
    with TemporaryDirectory() as folder:
        _configure_catalog(folder)
        rows = _make_rows(count)
        print(f"table-outputs: {count:,} nested rows appended, in {DAYS} days")
        for by in ((), ("days(at)",)):
            named = ".".join(("bench", "by_day" if by else "whole"))
            table = IcebergTable(named, "bench", by)
            ours = _append_as_batches(table, rows)
            ours(-1)
            # PyIceberg needs a package more to append to a table that is partitioned by days.
            catalog = table.open()
            theirs = catalog.create_table_if_not_exists("bench.own", COLUMNS.arrow_schema())
            what = "Iceberg"
            if by:
                what = "Iceberg by day, against PyIceberg without partitions"
            _compare(what, rounds, ours, partial(_append_to, theirs, rows))
        from deltalake import write_deltalake

        place = Path(folder, "delta")
        delta = _append_as_batches(DeltaLakeTable(str(place)), rows)
        _compare(
            "Delta",
            rounds,
            delta,
            lambda _: write_deltalake(place.with_name("own"), rows, mode="append"),
        )


def _append_to(table: Table, rows: pa.Table, _: int) -> None:
    table.append(rows)


def _compare(
    what: str, rounds: int, ours: Callable[[int], object], theirs: Callable[[int], object]
) -> None:
    print(what)
    ours(0)
    theirs(0)
    measured = alternate(rounds, ours=ours, own=theirs)
    show(measured, "ours", "own", "at most 1.2")


def _append_as_batches(table: AnyOutputTable, rows: pa.Table) -> Callable[[int], object]:
    output = open_output(table)
    numbers = iter(range(1, 1_000))
    clock = datetime(2026, 1, 1, tzinfo=UTC)
    return lambda _: output.commit(
        OutputBatch("bench", next(numbers), clock, COLUMNS, lambda: [rows])
    )


def _configure_catalog(folder: str) -> None:
    import pyiceberg.catalog
    from pyiceberg.utils.config import Config

    prefix = "PYICEBERG_CATALOG__BENCH__"
    os.environ[f"{prefix}TYPE"] = "sql"
    os.environ[f"{prefix}URI"] = f"sqlite:///{folder}/catalog.sqlite"
    os.environ[f"{prefix}WAREHOUSE"] = f"file://{folder}/warehouse"
    pyiceberg.catalog._ENV_CONFIG = Config()


def _make_rows(count: int) -> pa.Table:
    import numpy as np

    schema = COLUMNS.arrow_schema()
    chance = np.random.default_rng(1)
    ids = np.arange(count)
    hours = chance.integers(0, 24 * DAYS, count)
    sizes = chance.integers(0, 4, count)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    lines = pa.StructArray.from_arrays(
        [
            pa.array([f"sku-{number % 1000}" for number in range(ends[-1])]),
            pa.array(chance.integers(1, 9, ends[-1]), pa.int32()),
        ],
        fields=[*schema.field("lines").type.value_type],
    )
    begin = 1_767_225_600_000_000
    return pa.Table.from_arrays(
        [
            pa.array(ids),
            pa.array(begin + hours * 3_600_000_000).cast(schema.field("at").type),
            pa.array([f"kind-{number % 7}" for number in range(count)]),
            pa.array((ids % 10_000).astype(float)).cast(schema.field("price").type),
            pa.ListArray.from_arrays(pa.array(ends, pa.int32()), lines),
            pa.array(np.zeros(count, np.int32)),
        ],
        schema=schema,
    )
