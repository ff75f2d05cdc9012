"""Types of keys: equal values of different types hash differently, so joins of them are refused
when planned.
"""

from __future__ import annotations

from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, bounded_dataset
from dagster_adjunct.orchestration.operators.stream_facts import SPARK, StreamFacts
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.schemas.schema import Schema
from tests.orchestration.planner.planning import application, catalog
from tests.orchestration.planner.several_inputs import BY_K


def keyed(name: str, schema: Schema | None, partitions: int = 4) -> StreamFacts:
    return StreamFacts(f"lake.{name}", partitions, ("k",), SPARK, schema)


def entries(**options: Any) -> AdjunctDataset:
    return bounded_dataset("d", input="lake.d", key="k", **(options or {"partitions": 4}))


INT, BIGINT = Schema.of(k="int", v="string"), Schema.of(k="bigint", v="string")
ONLY_K = Schema.of(k="int")


@pytest.mark.parametrize("options", [{"partitions": 4}, {"broadcast": True}])
def test_a_bigint_key_is_not_joined_with_an_int_key(options: dict[str, Any]) -> None:
    app = application()
    app.input_stream("lake.s").join(app.table(entries(**options)), on="k", select=[])
    with pytest.raises(PlanningError) as caught:
        build_plan(app, catalog(keyed("s", BIGINT), keyed("d", INT)))
    assert (
        "join-2-d: the stream's 'k' is bigint and 'k' of dataset d is int" in caught.value.problem
    )
    assert "cast(k as int) as k_key" in caught.value.next_step
    assert build_plan(app, catalog(keyed("s", INT), keyed("d", INT))).notes[-1:] != ("unproven",)


def test_what_is_cast_is_of_its_new_type_and_has_to_move() -> None:
    app = application()
    cast = app.input_stream("lake.s").map("cast(k as int) as number", "v as text")
    cast.partition_by("number").join(app.table(entries()), on={"number": "k"}, select=[])
    build_plan(app, catalog(keyed("s", BIGINT), keyed("d", INT)))
    stays = application()
    cast = stays.input_stream("lake.s").map("cast(k as int) as k", "v as text")
    cast.join(stays.table(entries()), on="k", select=[])
    with pytest.raises(PlanningError, match="its partitioning is unknown after map-2"):
        build_plan(stays, catalog(keyed("s", BIGINT), keyed("d", INT)))


@pytest.mark.parametrize(("stream", "dataset"), [(None, INT), (INT, None), (None, None)])
def test_types_that_are_not_known_are_reported_as_unproven(
    stream: Schema | None, dataset: Schema | None
) -> None:
    app = application()
    app.input_stream("lake.s").join(app.table(entries()), on="k", select=[])
    facts = catalog(keyed("s", stream), keyed("d", dataset))
    note = build_plan(app, facts).notes[-1]  # others are that nothing is written, and of columns
    assert note.startswith("join-2-d: the type")
    assert note.endswith("not known before it runs, and unproven.")
    strict = application(strict=True)
    strict.input_stream("lake.s").join(strict.table(entries()), on="k", select=[])
    with pytest.raises(PlanningError, match=r"unproven\. The application is strict"):
        build_plan(strict, facts)


def test_after_a_function_the_type_is_not_known() -> None:
    app = application()
    moved = app.input_stream("lake.s").map(lambda frame: frame).partition_by("k")
    moved.join(app.table(entries()), on="k", select=[])
    notes = build_plan(app, catalog(keyed("s", BIGINT), keyed("d", INT))).notes
    assert (
        "join-4-d: the type of the stream's 'k', to be int as 'k' of dataset d is, is not known"
        in notes[-1]
    )


def test_a_second_join_compares_what_the_first_one_brought() -> None:
    app = application()
    first = bounded_dataset("d", input="lake.d", key="k", broadcast=True)
    second = bounded_dataset("e", input="lake.e", key="v", broadcast=True)
    joined = app.input_stream("lake.s").join(app.table(first), on="k", select=["v as name"])
    joined.join(app.table(second), on={"name": "v"}, select=[])
    facts = catalog(keyed("s", ONLY_K), keyed("d", INT), keyed("e", Schema.of(v="int")))
    with pytest.raises(PlanningError) as failure:
        build_plan(app, facts)
    assert failure.value.column == "name"


def test_streams_that_are_joined_with_each_other_have_keys_of_one_type() -> None:
    app = application()
    app.input_stream("lake.s").apply(BY_K, app.input_stream("lake.r"))
    build_plan(app, catalog(keyed("s", INT), keyed("r", INT)))
    with pytest.raises(PlanningError) as failure:
        build_plan(app, catalog(keyed("s", INT), keyed("r", BIGINT)))
    assert failure.value.operator == "stream-join-3"
