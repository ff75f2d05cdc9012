"""Changes are applied, and set aside, alike however the stream is cut into appends, advances and
chunks.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.assets.declaration.change_formats import (
    DebeziumUnwrapped,
    OperationColumn,
    Upserts,
)
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope, MaxwellEnvelope
from dagster_adjunct.assets.declaration.policies import DeadLetters
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.resources.errors import AdjunctError, BadChangeError, SchemaMismatchError
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.changes.changing import VALUES, dataset, send
from tests.assets.conftest import World
from tests.rounds import rounds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Record = tuple[Any, ...]
ROWS = Schema.of(id="bigint", n="bigint", seq="string", op="string", gone="string")
DEAD = DeadLetters("lake.dead")


def cuts_of(count: int) -> Iterator[list[int]]:
    """Yield the sizes of the parts, in every way to cut this many."""
    for marks in itertools.product((False, True), repeat=count - 1):
        ends = [place + 1 for place, mark in enumerate(marks) if mark] + [count]
        yield [end - start for start, end in itertools.pairwise([0, *ends])]


def outcome(
    world: World, spec: AdjunctDataset, schema: Schema, records: Sequence[Record], sizes: list[int]
) -> Any:
    """Send the records in parts and advance after each; return what is served and the letters,
    or the last error.
    """
    world.streams.create("changes", schema=schema, partitions=1)
    error: AdjunctError | None = None
    left = iter(records)
    for size in [*sizes, 0]:  # the last advance applies what came after a bootstrap began
        if size:
            send(world, list(itertools.islice(left, size)))
        try:
            world.advance(spec)
            error = None
        except (BadChangeError, SchemaMismatchError) as raised:
            error = raised
    view = StoredVersions(world.lake, "table").current()
    served = None if view is None else {key: entry["n"] for key, entry in view.items()}
    letters: list[Any] = []
    if "dead" in world.streams.list_streams():
        dead = world.streams.read_arrow(
            world.streams.all_ranges("dead"), ["offset", "reason"]
        ).to_pylist()
        letters = sorted((letter["offset"], letter["reason"]) for letter in dead)
    # Where no change can be ordered, one with another mistake may be met first, in a part of its
    # own.
    return (served, letters) if error is None else "it is refused"


def drawn(chance: random.Random, count: int = 5) -> list[Record]:
    """Return rows, some without a value to order by, or with one that orders nothing or is of
    another kind.
    """
    values = [None, None, "7", "8", "8", "12", "x", "mysql-bin.000004", ""]
    return [
        (
            chance.choice([1, 1, 2, None]),
            number,
            chance.choice(values),
            chance.choice(["c", "u", "u", "d", "r", "?"]),
            chance.choice(["false", "false", "true", None]),
        )
        for number in range(count)
    ]


FORMS: dict[str, dict[str, Any]] = {
    "upserts": {"changes": Upserts(), "order_by": "seq"},
    "operations": {"changes": OperationColumn("op", write=("c", "u", "r")), "order_by": "seq"},
    "operations by offset": {"changes": OperationColumn("op", write=("c", "u", "r"))},
    "unwrapped": {"changes": DebeziumUnwrapped("gone", "op"), "order_by": "seq"},
    "unwrapped by offset": {"changes": DebeziumUnwrapped("gone", "op")},
    "unwrapped by two": {"changes": DebeziumUnwrapped("gone", "op"), "order_by": ["seq", "n"]},
}


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize(
    ("name", "dead"),
    [
        *(pytest.param(name, DEAD, id=f"{name}-letters") for name in FORMS),
        # What fails an advance is what makes a letter: one form by each kind of order will do.
        *(
            pytest.param(
                name,
                "fail",
                id=f"{name}-fail",
                marks=() if name in ("upserts", "operations by offset") else pytest.mark.long,
            )
            for name in FORMS
        ),
    ],
)
@pytest.mark.parametrize("seed", range(rounds(1, 4)))
def test_every_cut_of_drawn_rows_gives_what_one_append_gives(
    tmp_path: Path, name: str, dead: Any, seed: int
) -> None:
    records = drawn(random.Random(f"{name} {seed}"))
    spec = dataset(on_bad_change=dead, **FORMS[name])

    def in_a_lake_of_its_own(folder: str, sizes: list[int], **more: Any) -> Any:
        world = World(open_lake(tmp_path / folder), IN_PROCESS)
        return outcome(
            world, dataset(on_bad_change=dead, **FORMS[name], **more), ROWS, records, sizes
        )

    whole = in_a_lake_of_its_own("whole", [len(records)])
    for number, sizes in enumerate(cuts_of(len(records))):
        cut = in_a_lake_of_its_own(f"cut{number}", sizes, chunk=1 + number % 3)
        assert cut == whole, (sizes, records, spec)


def source(**more: Any) -> str:
    return json.dumps({"op": "u", "before": None, "after": {"id": 1, "n": 1}, "source": more})


def insert(key: int, n: int, lsn: Any = None, **more: Any) -> str:
    block = more if lsn is None else {"lsn": lsn, **more}
    return json.dumps({"op": "c", "before": None, "after": {"id": key, "n": n}, "source": block})


def maxwell(key: int, n: int, position: str | None) -> str:
    place = {} if position is None else {"position": position}
    return json.dumps({"type": "insert", "table": "t", "data": {"id": key, "n": n}, **place})


COLUMNS = "id BIGINT, n BIGINT"
ENVELOPES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "the path is missing once": (
        {"changes": DebeziumEnvelope(COLUMNS), "order_by": "source.lsn"},
        [source(), insert(1, 10, 5), insert(2, 20, 6), source(), insert(1, 11, 4), source(lsn="x")],
    ),
    "a binary log of another server": (
        {"changes": DebeziumEnvelope(COLUMNS), "order_by": ["source.file", "source.pos"]},
        [
            insert(1, 1, file="", pos=0),
            insert(1, 2, file="mysql-bin.000009", pos=7),
            insert(2, 3, file="binlog.000001", pos=8),
            insert(1, 4, file="mysql-bin.000010", pos=1),
            insert(1, 5, file="mysql-bin.000009", pos=900),
        ],
    ),
    "a column is missing once": (
        {"changes": DebeziumEnvelope(COLUMNS), "order_by": "source.lsn"},
        [
            '{"op":"u","after":{"id":1},"source":{"lsn":9}}',
            insert(1, 10, 5),
            insert(2, 20, 6),
            insert(1, 11, 4),
        ],
    ),
    "maxwell": (
        {"changes": MaxwellEnvelope(COLUMNS), "order_by": "source.position"},
        [
            maxwell(1, 1, None),
            maxwell(1, 2, "mysql-bin.000004:50"),
            maxwell(2, 3, "mysql-bin.000004:8"),
            "no JSON",
        ],
    ),
}


@pytest.mark.spark
@pytest.mark.rounds
@pytest.mark.parametrize(
    "dead", [DEAD, pytest.param("fail", marks=pytest.mark.long)], ids=["letters", "fail"]
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "maxwell" else pytest.mark.long) for name in ENVELOPES],
)
def test_cuts_of_envelopes_give_what_one_append_gives(
    tmp_path: Path, spark: SparkSession, name: str, dead: Any
) -> None:
    declared, texts = ENVELOPES[name]
    records = [(text, False) for text in texts]

    def in_a_lake_of_its_own(folder: str, sizes: list[int], **more: Any) -> Any:
        engine: Callable[[], SparkSession] = lambda: spark  # noqa: E731
        world = World(open_lake(tmp_path / folder), engine)
        return outcome(
            world, dataset(on_bad_change=dead, **declared, **more), VALUES, records, sizes
        )

    count = len(records)
    whole = in_a_lake_of_its_own("whole", [count])
    cuts = [([1] * count, 100), ([count], 1)]
    cuts += rounds([], [([1, count - 1], 2), ([count - 1, 1], 100)])
    for number, (sizes, chunk) in enumerate(cuts):
        assert in_a_lake_of_its_own(f"cut{number}", sizes, chunk=chunk) == whole, sizes


@pytest.mark.spark
def test_a_change_without_its_value_does_not_stop_a_bootstrap(sparkling: World) -> None:
    spec = dataset(changes=DebeziumEnvelope(COLUMNS), order_by="source.lsn", on_bad_change=DEAD)
    sparkling.streams.create("changes", schema=VALUES, partitions=1)
    bad = '{"op":"u","before":null,"after":{"id":1,"n":1},"source":{}}'
    send(sparkling, [(insert(1, 10, 5), False), (insert(2, 20, 6), False)])
    send(sparkling, [(bad, False)])
    assert sparkling.advance(spec).counters["quarantined"] == 1
    send(sparkling, [(bad, False)])
    send(sparkling, [(insert(1, 11, 7), False)])
    assert sparkling.advance(spec).counters["quarantined"] == 1
    assert {key: entry["n"] for key, entry in sparkling.view(spec).items()} == {1: 11, 2: 20}


@pytest.mark.spark
def test_a_path_that_no_change_has_is_named_with_the_one_that_was_meant(sparkling: World) -> None:
    spec = dataset(
        changes=DebeziumEnvelope(COLUMNS), order_by="source.lns", on_bad_change=DEAD, chunk=1
    )
    sparkling.streams.create("changes", schema=VALUES, partitions=1)
    send(sparkling, [(insert(1, 10, 5), False), (insert(2, 20, 6), False)])
    with pytest.raises(SchemaMismatchError) as refused:
        sparkling.advance(spec)
    assert (refused.value.dataset, refused.value.column, refused.value.argument) == (
        "table",
        "source.lns",
        "order_by",
    )
    assert "Did you mean 'source.lsn'?" in refused.value.next_step
    assert "dead" not in sparkling.streams.list_streams()
