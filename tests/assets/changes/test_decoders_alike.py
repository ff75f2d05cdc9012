"""Changes and dead letters of records with nasty values, decoded by Spark and in process: the
same to the letter.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.change_formats import DebeziumUnwrapped, OperationColumn
from dagster_adjunct.assets.declaration.extractors import Projection, PythonExtractor
from dagster_adjunct.assets.declaration.policies import DeadLetters
from dagster_adjunct.assets.unbounded.changes import select_applicable
from dagster_adjunct.assets.unbounded.dead_letters import build_dead_letters
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.changes.changing import changes_of, dataset, foreign_stream
from tests.assets.conftest import World

TYPES = Schema.of(
    **{"id": "bigint", "op": "string", "gone": "string", "a b\"c": "string"},
    t="tinyint", s="smallint", i="int", yes="boolean", day="date", at="timestamp", raw="binary",
)  # fmt: skip
TEXTS: list[Any] = [
    "",
    "plain",
    'quo"te',
    "back\\slash",
    "tab\tline\nfeed\r\b\f",
    "\x00\x01\x1f\x7f",
    "é€😀",
    "\x02marked\x03",
    "x" * 120,
    b"caf\xe9",
    b"\xf0\x9f\x98 cut",
    b"\xff\xfe",
]
INSTANTS = [
    dt.datetime(2, 1, 1, tzinfo=dt.UTC),
    dt.datetime(2024, 2, 29, 23, 59, 59, 999_999, dt.UTC),
    None,
]


def records() -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for number, text in enumerate([*TEXTS, None]):
        at = INSTANTS[number % 3]
        rows.append(
            (
                None if number % 4 == 3 else number,
                text,
                ["TRUE", "false", text][number % 3],
                text,
                -128,
                32767,
                None if number % 2 else -(2**31),
                [True, False, None][number % 3],
                [0, -719_162, 2_932_896, 2_932_897, -800_000, None][number % 6],
                at if number != 5 else 10**18,
                text.encode() if isinstance(text, str) else text,
                number % 5 == 4,
            )
        )
    return rows


DEAD = DeadLetters("lake.dead")
FORMS: dict[str, dict[str, Any]] = {
    "upserts": {},
    "operations": {"changes": OperationColumn(write=("", "plain", "é€😀"), ignore=('quo"te',))},
    "unwrapped": {"changes": DebeziumUnwrapped("gone", "op")},
    "unknown values": {
        "changes": DebeziumUnwrapped("gone", "op", unavailable="plain", on_unavailable="keep")
    },
    "by a column": {"order_by": "at"},
    "sensitive": {"changes": OperationColumn(), "sensitive": ["op"]},
    "columns": {"extractor": Projection("id BIGINT, i BIGINT, t DOUBLE")},
    "a function": {
        "extractor": PythonExtractor("tests.assets.extractors:days", "id BIGINT, day DATE", ("id",))
    },
}


@pytest.mark.parametrize("name", FORMS)
def test_changes_and_dead_letters_are_the_same_by_both(world: World, spark: Any, name: str) -> None:
    foreign_stream(world, TYPES, records())
    spec = dataset(on_bad_change=DEAD, **FORMS[name])
    reported = []
    for engine in (lambda: spark, IN_PROCESS):
        world.spark = engine
        changes = changes_of(world, spec)
        good, bad = (
            select_applicable(changes, "table", set_aside=True),
            build_dead_letters(changes, spec, ()),
        )
        tables = [rows if engine is IN_PROCESS else rows.toArrow() for rows in (good, bad)]
        reported.append([sorted(map(repr, table.to_pylist())) for table in tables])
    assert reported[0][0] == reported[1][0]
    assert reported[0][1] == reported[1][1]
    assert reported[0][1], "some are bad"
