"""Drawn paths into drawn nested columns are the keys of joins and windows, and the selected parts
of entries, by every engine, against plain Python.
"""

from __future__ import annotations

import datetime as dt
import random
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.schemas.schema import Schema, is_key_type
from dagster_adjunct.resources.schemas.types import Struct, Type, parse_type, write_name
from dagster_adjunct.windows import Count, Tumbling
from tests.nested import comparable, draw_rows, draw_schema, draw_value
from tests.orchestration.all_engines import ENGINES, WithoutSpark
from tests.orchestration.seen_times import at

if TYPE_CHECKING:
    from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark
Rows = list[dict[str, Any]]
Steps = tuple[str, ...]
SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 8))]


def iterate_paths(steps: Steps, type_: Type) -> Iterator[tuple[Steps, str]]:
    """Yield the steps to each value within structs, with its type."""
    if len(steps) > 1:
        yield steps, str(type_)
    if isinstance(type_, Struct):
        for member in type_.members:
            yield from iterate_paths((*steps, member.name), member.type)


def list_paths(schema: Schema) -> list[tuple[Steps, str]]:
    paths: list[tuple[Steps, str]] = []
    for field in schema.fields:
        paths += iterate_paths((field.name,), parse_type(field.type))
    return paths


def draw_keyed(drawn: random.Random) -> tuple[Schema, Steps, str]:
    """Return a schema with a path whose values can be keys, and the type of these."""
    while True:
        schema = draw_schema(drawn)
        paths = [(steps, kind) for steps, kind in list_paths(schema) if is_key_type(kind)]
        if paths:
            steps, kind = drawn.choice(paths)
            return schema, steps, kind


def text_of(steps: Steps) -> str:
    return ".".join(map(write_name, steps))


def value_at(row: Any, steps: Steps) -> Any:
    for step in steps:
        row = None if row is None else row[step]
    return row


def fill(world: StepWorld, name: str, schema: Schema, rows: Rows, key: str, **more: Any) -> None:
    partitions = more.pop("partitions", 2)
    world.streams.create(name, schema=schema, key=[key], partitions=partitions)
    world.streams.append(name, rows, producer="test", sequence=1, **more)


def received(world: StepWorld, name: str) -> Rows:
    table = world.streams.read_arrow(world.streams.all_ranges(name))
    names = [column for column in table.column_names if not column.startswith("__")]
    return sorted(
        map(comparable, table.select(names).to_pylist(maps_as_pydicts="strict")), key=repr
    )


def run(world: StepWorld, app: Application, engine: str) -> None:
    world.advance(*app.datasets)
    app.engine = "auto" if ENGINES[engine] is WithoutSpark else "spark"
    run_step(world.context(app), ENGINES[engine]())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_paths_are_keys_of_joins(step_world: StepWorld, seed: int, engine: str) -> None:
    drawn = random.Random(seed)
    schema, steps, kind = draw_keyed(drawn)
    rows = draw_rows(drawn, schema, range(30))
    held, selected, _ = draw_keyed(drawn)
    held = Schema.of({"key": kind, **dict(list(held.types.items())[1:])})
    keys = {repr(value_at(row, steps)): value_at(row, steps) for row in rows[::2]}
    keys |= {repr(key): key for key in [draw_value(drawn, parse_type(kind)) for _ in range(5)]}
    keys.pop("None", None)
    entries: Rows = []
    for row, key in zip(draw_rows(drawn, held, range(99)), keys.values(), strict=False):
        del row["k"]
        entries.append({"key": key, **row})
    fill(step_world, "records", schema, rows, "k")
    fill(step_world, "entries", held, entries, "key", end_of_dataset="v1")
    app = Application("app", auto_repartition=bool(seed % 2))
    dataset = bounded_dataset("entries", input="lake.entries", key="key", partitions=2)
    records = app.input_stream("lake.records")
    if not app.auto_repartition:
        records = records.partition_by(text_of(steps))
    joined = records.join(
        app.table(dataset),
        on={text_of(steps): "key"},
        how="left",
        select=[f"{text_of(selected)} as part"],
    )
    joined.send_to(app.output_stream("lake.out", partitions=2, key="k"))
    run(step_world, app, engine)
    by_key = {entry["key"]: entry for entry in entries}
    expected = []
    for row in rows:
        entry = by_key.get(value_at(row, steps))
        expected.append(comparable({**row, "part": value_at(entry, selected)}))
    assert received(step_world, "out") == sorted(expected, key=repr)


@pytest.mark.parametrize("engine", ["tasks", "small"])
@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_paths_are_keys_of_windows(step_world: StepWorld, seed: int, engine: str) -> None:
    drawn = random.Random(seed)
    schema, steps, _ = draw_keyed(drawn)
    schema = Schema.of({**schema.types, "meta": "struct<at:timestamp>"})
    rows = draw_rows(drawn, schema, range(40))
    for row in rows:
        row["meta"] = {"at": at(row["k"])}
    rows[-1]["meta"] = {"at": at(1000)}  # closes the windows before
    fill(step_world, "records", schema, rows, "k", partitions=1)
    app = Application("app", auto_repartition=True)
    windows = app.input_stream("lake.records", event_time="meta.at").window(
        Tumbling(dt.timedelta(seconds=10)),
        by=text_of(steps),
        name="ten",
        aggregates={"n": Count(text_of(steps))},
    )
    windows.send_to(app.output_stream("lake.out", partitions=2, key=steps[-1]))
    run(step_world, app, engine)
    counts: dict[tuple[Any, Any], int] = defaultdict(int)
    for row in rows[:-1]:
        key = value_at(row, steps)
        if key is not None:
            counts[key, at(row["k"] // 10 * 10)] += 1
    expected = []
    for (key, begin), number in counts.items():
        end = begin + dt.timedelta(seconds=10)
        expected.append({steps[-1]: key, "window_start": begin, "window_end": end, "n": number})
    assert received(step_world, "out") == sorted(map(comparable, expected), key=repr)
