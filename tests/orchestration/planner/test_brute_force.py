"""Random graphs of joins, tables and streams against a search over all assignments of counts.

The search knows the rules as SAMZA-1889 states them: a stream takes part in every join that its
records reach, also by way of tables, until they enter another stream; all that takes part in a join
has one count. It tries every count for every stream whose count is open. What is the same in all
assignments that satisfy every join is inferred, what may be any count is the default, and where no
assignment does, the application is refused.
"""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.joins import Join
from dagster_adjunct.orchestration.operators.sends import SendToDataset
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import PartitionCountMismatchError
from tests.orchestration.planner.planning import application, catalog, dataset, streams_of_join
from tests.orchestration.planner.several_inputs import BY_K, StreamJoin, Together

TABLES = {"two": 2, "three": 3, "also": 3, "everywhere": None}
FACTS = catalog(**{f"s{number}": 2 + number % 2 for number in range(6)}, **dict.fromkeys(TABLES, 1))
DEFAULT = 5
POSSIBLE = (2, 3, DEFAULT)
OPEN = 5  # streams whose count is open, at most
ACTIONS = st.one_of(
    st.tuples(st.just("input"), st.none()),
    st.tuples(st.just("move"), st.sampled_from([None, None, None, 2, 3])),
    st.tuples(st.just("move"), st.none()),
    st.tuples(st.just("filter"), st.none()),
    st.tuples(st.just("meet"), st.none()),
    st.tuples(st.just("meet"), st.none()),
    st.tuples(st.just("together"), st.none()),
    st.tuples(st.just("join"), st.sampled_from(sorted(TABLES))),
    st.tuples(st.just("feed"), st.sampled_from(sorted(TABLES))),
    st.tuples(st.just("output"), st.sampled_from([2, 3])),
)
PROGRAMS = st.lists(
    st.tuples(ACTIONS, st.integers(0, 30), st.integers(0, 30)), min_size=2, max_size=14
)


def described(program) -> tuple[Application, dict[str, int | None]]:
    """An application of random actions on random streams that are there by then, and the counts
    that it declares.
    """
    app = application(intermediate_partitions=DEFAULT)
    tables = {name: app.table(dataset(name, partitions)) for name, partitions in TABLES.items()}
    counts: dict[str, int | None] = {}
    streams = []

    def begun(stream, count):
        counts[stream.operator] = count
        streams.append(stream)

    begun(app.input_stream("lake.s0"), 2)
    for number, ((action, argument), one, other) in enumerate(program):
        stream, second = streams[-1 - one % len(streams)], streams[-1 - other % len(streams)]
        if action == "input" and len(app.inputs) < 6:
            name = f"lake.s{len(app.inputs)}"
            begun(app.input_stream(name), FACTS[name].partitions)
        elif action == "move" and (argument or list(counts.values()).count(None) < OPEN):
            begun(stream.partition_by("k", partitions=argument), argument)
        elif action == "filter":
            streams.append(stream.filter("true"))
        elif action == "meet":
            streams.append(stream.apply(BY_K, second))
        elif action == "together":
            streams.append(stream.apply(Together(), second))
        elif action == "join":
            streams.append(stream.join(tables[argument], on="k", select=[]))
        elif action == "feed":
            streams.append(stream.send_to(tables[argument]))
        elif action == "output":
            begun(
                stream.send_to(app.output_stream(f"lake.o{number}", partitions=argument, key="k")),
                argument,
            )
    return app, counts


def taking_part(app: Application, begins: set[str]) -> list[set[str]]:
    """For each join, the streams that reach it and the dataset, found by walking on from every
    stream.
    """
    after: dict[str, set[str]] = {operator.id: set() for operator in app.operators}
    joins, reading = {}, {}
    for operator in app.operators:
        for source in operator.inputs:
            after[source].add(operator.id)
        if isinstance(operator.spec, Join) and TABLES[operator.spec.dataset]:
            joins[operator.id] = {operator.spec.dataset}
            reading.setdefault(operator.spec.dataset, set()).add(operator.id)
        elif isinstance(operator.spec, StreamJoin):
            joins[operator.id] = set()
    for operator in app.operators:
        if isinstance(operator.spec, SendToDataset):
            after[operator.id] |= reading.get(operator.spec.table, set())
    for stream in begins:
        seen, waiting = set(), [stream]
        while waiting:
            for operator_id in after[waiting.pop()] - seen - begins:
                seen.add(operator_id)
                waiting.append(operator_id)
        for join in seen & set(joins):
            joins[join].add(stream)
    return list(joins.values())


def searched(app: Application, counts: dict[str, int | None]) -> dict[str, int] | None:
    """Return the counts of all streams, None where no assignment satisfies every join."""
    groups = taking_part(app, set(counts))
    unknown = [stream for stream, count in counts.items() if count is None]
    satisfying: dict[str, set[int]] = {stream: set() for stream in counts}
    for tried in product(POSSIBLE, repeat=len(unknown)):
        assigned = counts | dict(zip(unknown, tried, strict=True))
        if all(
            len({assigned.get(member, TABLES.get(member)) for member in group}) == 1
            for group in groups
        ):
            for stream, count in assigned.items():
                satisfying[stream].add(count)
    if not all(satisfying.values()):
        return None
    return {
        stream: min(possible) if len(possible) == 1 else DEFAULT
        for stream, possible in satisfying.items()
    }


@pytest.mark.lengthy
@settings(max_examples=60)
@given(PROGRAMS)
@example(
    [
        (("input", None), 0, 0),
        (("move", None), 0, 0),
        (("meet", None), 0, 1),
        (("feed", "two"), 0, 0),
    ]
)
@example(
    [
        (("move", None), 0, 0),
        (("feed", "three"), 0, 0),
        (("move", None), 0, 0),
        (("join", "three"), 0, 0),
    ]
)
@example(
    [
        (("input", None), 0, 0),
        (("together", None), 0, 1),
        (("move", None), 0, 0),
        (("meet", None), 0, 1),
    ]
)
def test_what_is_planned_and_what_is_refused_is_what_a_search_finds(program):
    agrees(program)


@pytest.mark.long
@settings(max_examples=1_000)
@given(PROGRAMS)
def test_many_are_planned_and_refused_as_a_search_finds(program):
    agrees(program)


def agrees(program) -> None:
    app, counts = described(program)
    wanted = searched(app, counts)
    if wanted is None:
        with pytest.raises(PartitionCountMismatchError):
            build_plan(app, FACTS)
        return
    planned = build_plan(app, FACTS)
    assert {edge.operator: edge.partitions for edge in planned.streams if edge.operator} == wanted


@pytest.mark.lengthy
@settings(max_examples=100)
@given(PROGRAMS)
def test_those_that_take_part_are_those_that_reach_the_join(program):
    app, counts = described(program)
    if searched(app, counts) is None:
        return
    planned = build_plan(app, FACTS)
    names = {edge.operator: edge.name for edge in planned.streams if edge.operator}
    names |= {edge.dataset: edge.name for edge in planned.streams if edge.dataset}
    wanted = [{names[member] for member in group} for group in taking_part(app, set(counts))]
    assert [set(streams_of_join(planned, group.join)) for group in planned.join_groups] == wanted
