"""Columns of remote tables that hold fewer numbers than the type that is sent: the plan says so,
and what does not fit is rejected.
"""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from dagster_adjunct import (
    IN_PROCESS,
    Application,
    LakeStreams,
    Schema,
    open_lake,
    plan_application,
    run_application,
)
from dagster_adjunct.errors import AdjunctError
from dagster_adjunct.tables import RemoteTable, SqliteTable

SENT = Schema.of(k="string", n="bigint", price="decimal(10,2)")
# What the table holds, and values of which the first fits and the second does not.
NARROW = {
    "n": ("int", 1, 2**40),
    "price": ("decimal(5,2)", Decimal("1.25"), Decimal("12345.67")),
    "price of fewer digits": ("decimal(12,1)", Decimal("1.2"), Decimal("1.25")),
}
WIDE = {"n": ("bigint", "decimal(20,0)"), "price": ("decimal(10,2)", "decimal(12,3)")}


def planned(tmp_path: Path, column: str, declared: str) -> tuple[Application, LakeStreams]:
    streams = LakeStreams(open_lake(str(tmp_path / "lake")))
    streams.create("in", schema=SENT, key=["k"], partitions=1)
    app = Application("narrow", engine="auto")
    columns = {"k": "string", column: declared}
    store = SqliteTable(tmp_path / "t.sqlite", "t", "k", columns=columns, create=True)
    table = app.table(RemoteTable("t", key="k", read_function=store, write_function=store))
    app.input_stream("lake.in").update(table, set=[column], if_missing=[])
    return app, streams


@pytest.mark.lengthy
@pytest.mark.parametrize("case", NARROW)
def test_numbers_that_a_column_may_not_hold_are_noted_and_rejected(
    case: str, tmp_path: Path
) -> None:
    column = case.partition(" ")[0]
    declared, fits, does_not = NARROW[case]
    app, streams = planned(tmp_path, column, declared)
    (note,) = [
        note
        for note in plan_application(app, systems={"lake": streams}).notes
        if "holds not" in note
    ]
    assert f"{column!r} ({SENT.field(column).type} as {declared})" in note
    for number, value in enumerate((fits, does_not)):
        record = {"k": "a", "n": 1, "price": Decimal(1), column: value}
        streams.append("in", [record], producer="p", sequence=number)
        if value is fits:
            run_application(
                app, lake=streams.lake, systems={"lake": streams}, spark=IN_PROCESS, run="r"
            )
            continue
        with pytest.raises(AdjunctError, match="out of range"):
            run_application(
                app, lake=streams.lake, systems={"lake": streams}, spark=IN_PROCESS, run="r"
            )


@pytest.mark.parametrize(
    ("column", "declared"), [(name, each) for name, types in WIDE.items() for each in types]
)
def test_a_column_that_holds_all_numbers_is_not_noted(
    column: str, declared: str, tmp_path: Path
) -> None:
    app, streams = planned(tmp_path, column, declared)
    notes = plan_application(app, systems={"lake": streams}).notes
    assert [note for note in notes if "holds not" in note] == []
