"""flat_map, select, with_columns and partition_by by expressions on Spark: what they leave, in
order, also again.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.errors import AdjunctError, OperatorFailedError, PlanningError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark

LINES = [
    ("a", "one two,three four five", 1),
    ("b", None, 2),
    ("c", "six,,seven", 3),
    ("a", "eight", 4),
    ("d", ",".join(f"{n} {n}" for n in range(12)), 5),
]
MADE = Schema.of(k="string", letter="string", place="int")


def letters(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for place, letter in enumerate(record["word"] or ""):
        yield {"k": record["k"], "letter": letter, "place": place}


def lines(world: StepWorld) -> None:
    world.stream("lines", "k", 2, k="string", words="string", v="int")
    world.send("lines", *LINES)


def words_of(text: str | None) -> list[str]:
    """Return the words of each part of a line: parts by commas, words by spaces."""
    return [] if text is None else [word for part in text.split(",") for word in part.split(" ")]


def test_records_are_made_of_records_in_order_and_again_the_same(step_world: StepWorld) -> None:
    """A line has parts, a part has words, a word has letters; all of one line have one offset."""
    lines(step_world)
    app = Application("app")
    words = (
        app.input_stream("lake.lines")
        .flat_map("split(words, ',') as part")
        .flat_map("split(part, ' ') as word")
        .select("k", "word", "v as line")
        .with_columns(loud="upper(word)", line="line * 10")
    )
    words.send_to(app.output_stream("lake.words", partitions=2, key="k"))
    (
        words.flat_map(letters, schema=MADE)
        .partition_by("upper(letter) as big", partitions=3)
        .send_to(app.output_stream("lake.letters", partitions=1))
    )
    words.map("word as k", "line as v", "cast(null as int) as w").filter("k <> ''").send_to(
        app.table(step_world.table())
    )
    step_world.run(app)
    expected = [
        {"k": k, "word": word, "line": v * 10, "loud": word.upper()}
        for k, text, v in LINES
        for word in words_of(text)
    ]
    rows = step_world.rows("words")
    for k in {k for k, _, _ in LINES}:
        assert [row for row in rows if row["k"] == k] == [row for row in expected if row["k"] == k]
    assert len(rows) == len(expected)
    single = [
        (row["k"], letter, place, letter.upper())
        for row in expected
        for place, letter in enumerate(row["word"])
    ]
    made = [
        (row["k"], row["letter"], row["place"], row["big"]) for row in step_world.rows("letters")
    ]
    assert sorted(made) == sorted(single)
    assert step_world.records()["11"] == (50, None)
    # The same bytes: other contents under the same batch would be refused.
    before = step_world.streams.all_ranges("letters")
    step_world.again(app)
    assert step_world.streams.all_ranges("letters") == before


def test_records_without_elements_stay_where_they_are_asked_to(step_world: StepWorld) -> None:
    lines(step_world)
    app = Application("app")
    stream = app.input_stream("lake.lines").filter("v < 3")
    counts = "map_from_arrays(split(words, ' '), transform(split(words, ' '), x -> length(x)))"
    entries = stream.flat_map(f"{counts} as entry", keep_empty=True)
    entries.select("k", "entry.key as word", "entry.value as n").send_to(
        app.output_stream("lake.out", partitions=1)
    )
    step_world.run(app)
    assert step_world.rows("out") == [
        {"k": "a", "word": "one", "n": 3},
        {"k": "a", "word": "two,three", "n": 9},
        {"k": "a", "word": "four", "n": 4},
        {"k": "a", "word": "five", "n": 4},
        {"k": "b", "word": None, "n": None},
    ]


def nothing_named_so(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"k": record["k"], "letter": "x"}]


def no_number(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"k": record["k"], "letter": "x", "place": "first"}]


def half_a_number(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"k": record["k"], "letter": "x", "place": 1.5}]


def one_only(record: dict[str, Any]) -> dict[str, Any]:
    return {"k": record["k"], "letter": "x", "place": 1}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            nothing_named_so,
            (
                "result of nothing_named_so.. has the columns k, letter; its schema says k, letter,"
                " place"
            ),
        ),
        (no_number, "gave column 'place' a value that is no int"),
        (half_a_number, "gave column 'place' a value that is no int: 1.5 is not a whole number"),
        (one_only, "returned dict for a record: expected any number of dictionaries"),
    ],
)
def test_results_that_are_not_as_declared_are_refused(
    step_world: StepWorld, function: Any, message: str
) -> None:
    lines(step_world)
    app = Application("app")
    made = app.input_stream("lake.lines").flat_map(function, schema=MADE)
    made.send_to(app.output_stream("lake.out", partitions=1))
    with pytest.raises(OperatorFailedError, match=message) as refused:
        step_world.run(app)
    assert "flat-map-2" in refused.value.problem


def test_what_has_no_elements_is_refused_before_a_batch_begins(step_world: StepWorld) -> None:
    lines(step_world)
    app = Application("app")
    app.input_stream("lake.lines").flat_map("words as word").send_to(
        app.output_stream("lake.out", partitions=1)
    )
    with pytest.raises(PlanningError, match="flat-map-2: words is string, which has no elements"):
        step_world.run(app)
    with pytest.raises(AdjunctError):
        step_world.streams.info("out")
    assert step_world.state(app).last is None


def test_records_of_one_message_and_key_are_distinguished_by_a_table_that_counts(
    step_world: StepWorld,
) -> None:
    """Exactly: as many increments as words, though all of a line have one position, and the
    batch is repeated.
    """
    lines(step_world)
    app = Application("app")
    columns = {"k": "string", "n": "bigint"}
    store = SqliteTable(
        step_world.folder / "words.sqlite", "words", "k", columns=columns, create=True
    )
    table = RemoteTable(
        "words", key="k", read_function=store, write_function=store, idempotent=True
    )
    words = (
        app.input_stream("lake.lines")
        .flat_map("split(words, ',') as part")
        .flat_map("split(part, ' ') as word")
    )
    both = words.merge(words.filter("word <> ''"))
    both.update(app.table(table), add={"n": "1"}, if_missing=[])
    step_world.run(app)
    step_world.again(app)
    expected = Counter(
        k for k, text, _ in LINES for word in words_of(text) for _ in range(2 if word else 1)
    )
    with sqlite3.connect(step_world.folder / "words.sqlite") as connection:
        assert dict(connection.execute("SELECT k, n FROM words")) == expected
