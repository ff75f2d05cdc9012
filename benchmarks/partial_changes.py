"""Committing changes that leave out columns, against whole ones of the same keys."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa

from benchmarks.datasets import BUCKETS, CHANGES, CHUNK, SCHEMA, rows
from benchmarks.timing import Measured, alternate, show
from dagster_adjunct import (
    LakeStreams,
    Schema,
    advance_dataset,
    open_dataset,
    open_lake,
    session_scope,
    unbounded_dataset,
)
from dagster_adjunct.changes import OperationColumn

ROWS = 3_000_000
ENDING = "_missing"
LEFT_OUT = ("a", "d")
MARKS = tuple(name + ENDING for name in LEFT_OUT)
STREAM = Schema.of(
    {field.name: field.type for field in SCHEMA.fields},
    op="string",
    **dict.fromkeys(MARKS, "boolean"),
)


def run(rounds: int) -> None:
    with TemporaryDirectory() as folder, session_scope(master="local[2]") as session:
        lake, spark = open_lake(Path(folder) / "lake"), session()
        streams = LakeStreams(lake)
        forms = {"whole": OperationColumn(), "partial": OperationColumn(missing=ENDING)}
        tables = {
            what: unbounded_dataset(
                what,
                input=f"lake.{what}",
                key="k",
                partitions=BUCKETS,
                changes=form,
                columns=SCHEMA.names,
            )
            for what, form in forms.items()
        }
        sent = dict.fromkeys(tables, 0)

        def deliver(what: str, table: pa.Table, op: str, missing: bool) -> None:
            sent[what] += 1
            size = table.num_rows
            table = table.append_column("op", pa.array([op] * size))
            for name, mark in zip(LEFT_OUT, MARKS, strict=True):
                table = table.append_column(mark, pa.array([missing] * size))
                if missing:
                    kind = table.schema.field(name).type
                    table = table.set_column(
                        table.column_names.index(name), name, pa.nulls(size, kind)
                    )
            streams.append(what, table, producer="benchmark", sequence=sent[what])

        def commit(what: str) -> None:
            report = advance_dataset(
                tables[what],
                lake=lake,
                systems={"lake": streams},
                spark=lambda: spark,
                by="benchmark",
            )
            assert report.action in ("applied", "bootstrapped"), report

        for what in tables:
            streams.create(what, schema=STREAM, key=["k"], partitions=BUCKETS)
            for start in range(0, ROWS, CHUNK):
                deliver(what, rows(start, CHUNK, 0), "i", missing=False)
            commit(what)

        drawn = np.random.default_rng(1)

        def changes(version: int) -> np.ndarray:
            keys = drawn.choice(ROWS, CHANGES, replace=False)  # all over the table
            for what in tables:
                deliver(what, rows(0, 0, version, keys=keys), "u", missing=what == "partial")
            return keys

        print(
            f"partial changes: {CHANGES:,} changes into 3M rows, which leave out"
            f" {' and '.join(LEFT_OUT)}"
        )
        changes(1)
        for what in tables:
            commit(what)  # warm

        seconds: dict[str, list[float]] = {what: [] for what in tables}
        for number in range(2, rounds + 2):
            keys = changes(number)
            timed = alternate(1, **{what: lambda _, what=what: commit(what) for what in tables})
            for what, measured in timed.items():
                seconds[what] += measured.seconds
        _check(open_dataset(lake, tables["partial"]), keys[:1000], rounds + 1)
        show(
            {what: Measured(what, tuple(took)) for what, took in seconds.items()},
            "partial",
            "whole",
            "at most 1.3",
        )


def _check(served: object, keys: np.ndarray, version: int) -> None:
    """Compare rows of the last changes with what they have to be: new values, and the first of
    what they left out.
    """
    first, last = (rows(0, 0, number, keys=keys).to_pylist() for number in (0, version))
    for before, now in zip(first, last, strict=True):
        found = served.get(now["k"])  # type: ignore[attr-defined]
        assert found == {**now, **{name: before[name] for name in LEFT_OUT}}, (found, before, now)
