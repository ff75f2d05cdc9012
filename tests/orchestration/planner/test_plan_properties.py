"""Random applications against a brute-force reading of the same rules, and the planner's speed."""

from __future__ import annotations

import json
import sys
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.joins import Join
from dagster_adjunct.orchestration.operators.records import Input, Map, MapFunction, PartitionBy
from dagster_adjunct.orchestration.operators.sends import SendToDataset, SendToStream
from dagster_adjunct.orchestration.planner.partition_counts import assign_counts
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import PartitionCountMismatchError, PlanningError
from tests.orchestration.planner.planning import application, catalog, dataset
from tests.orchestration.planner.several_inputs import Together
from tests.rounds import rounds

COUNTS = st.sampled_from([2, 3])
NODES = st.dictionaries(st.sampled_from("abcdefgh"), st.none() | COUNTS, min_size=1)


@pytest.mark.lengthy
@given(NODES, st.data())
def test_assigned_counts_are_those_of_whole_connected_components(counts, data):
    members = st.lists(st.sampled_from(sorted(counts)), min_size=1, max_size=3)
    groups = {
        f"j{i}": tuple(group) for i, group in enumerate(data.draw(st.lists(members, max_size=8)))
    }
    assignment = assign_counts(counts, groups, default=9)
    wanted, conflict = components(counts, list(groups.values()), default=9)
    assert bool(assignment.conflicts) == conflict
    if not conflict:
        assert assignment.partitions == wanted
        for group in groups.values():
            assert len({assignment.partitions[member] for member in group}) == 1


def components(counts, groups, default):
    """Merge groups that share a member until none do; every merged set has at most one declared
    count.
    """
    sets = [{name} for name in counts]
    for group in groups:
        touched = [part for part in sets if part & set(group)]
        sets = [part for part in sets if part not in touched] + [set().union(*touched)]
    wanted, conflict = {}, False
    for part in sets:
        declared = {counts[name] for name in part} - {None}
        conflict = conflict or len(declared) > 1
        for name in part:
            wanted[name] = min(declared, default=default)
    return wanted, conflict


TABLES = {"t0": 2, "t1": 3, "t2": 3, "b": None}
STREAMS = catalog(**{f"s{i}": 2 + i % 2 for i in range(12)}, t0=1, t1=5, t2=1, b=1)
ACTIONS = st.one_of(
    st.tuples(st.just("input"), st.none()),
    st.tuples(st.just("move"), st.tuples(st.sampled_from(["k", "k", "x"]), st.none() | COUNTS)),
    st.tuples(st.just("filter"), st.none()),
    st.tuples(st.just("map"), st.sampled_from([("*",), ("k", "x"), ("x", "upper(k) as k")])),
    st.tuples(st.just("opaque"), st.none()),
    st.tuples(st.just("join"), st.sampled_from(sorted(TABLES))),
    st.tuples(st.just("feed"), st.sampled_from(sorted(TABLES))),
    st.tuples(st.just("output"), COUNTS),
)
PROGRAMS = st.lists(st.tuples(ACTIONS, st.integers(0, 99)), max_size=12)


def described(program, **options: object) -> Application:
    """An application made of random actions, each on a random stream that is there by then."""
    app = application(**options)
    tables = {name: app.table(dataset(name, partitions)) for name, partitions in TABLES.items()}
    streams = [app.input_stream("lake.s0")]
    for number, ((action, argument), which) in enumerate(program):
        stream = streams[which % len(streams)]
        if action == "input":
            if len(app.inputs) == 12:
                continue
            streams.append(app.input_stream(f"lake.s{len(app.inputs)}"))
        elif action == "move":
            streams.append(stream.partition_by(argument[0], partitions=argument[1]))
        elif action == "filter":
            streams.append(stream.filter("true"))
        elif action == "map":
            streams.append(stream.map(*argument))
        elif action == "opaque":
            streams.append(stream.map(lambda frame: frame))
        elif action == "join":
            streams.append(stream.join(tables[argument], on="k", select=[]))
        elif action == "feed":
            streams.append(stream.send_to(tables[argument]))
        else:
            streams.append(
                stream.send_to(app.output_stream(f"lake.o{number}", partitions=argument, key="k"))
            )
    return app


def brute_force(app: Application):
    """Return (verdict, counts of streams), by looking up from every operator to the stream that
    it is in.
    """
    operators = {operator.id: operator for operator in app.operators}

    def begin(operator):
        return operator if operator.spec.role is not None else begin(operators[operator.inputs[0]])

    def is_partitioned_by(operator):
        spec = operator.spec
        if isinstance(spec, PartitionBy):
            return spec.columns
        if isinstance(spec, Input | SendToStream):
            return ("k",)
        before = is_partitioned_by(operators[operator.inputs[0]])
        if isinstance(spec, MapFunction):
            return None
        if isinstance(spec, Map) and len(spec.expressions[-1]) > 1 and before == ("k",):
            return None
        return before

    counts: dict[str, int | None] = {
        f"dataset {name}": count for name, count in TABLES.items() if count
    }
    for operator in operators.values():
        spec = operator.spec
        if isinstance(spec, Input):
            counts[operator.id] = STREAMS[spec.reads].partitions
        elif isinstance(spec, PartitionBy):
            counts[operator.id] = spec.partitions
        elif isinstance(spec, SendToStream):
            counts[operator.id] = app.outputs[spec.writes].partitions
    joins = [
        op for op in operators.values() if isinstance(op.spec, Join) and TABLES[op.spec.dataset]
    ]
    pairs = [(begin(join).id, f"dataset {join.spec.dataset}") for join in joins]
    joined = {join.spec.dataset for join in joins}
    for operator in operators.values():
        if isinstance(operator.spec, SendToDataset) and operator.spec.table in joined:
            pairs.append((begin(operator).id, f"dataset {operator.spec.table}"))
    inputs = [STREAMS[name].partitions for name in app.inputs]
    default = max(inputs + [output.partitions for output in app.outputs.values()])
    wanted, conflict = components(counts, pairs, default)
    if conflict:
        return PartitionCountMismatchError, wanted
    if any(is_partitioned_by(operators[join.inputs[0]]) != ("k",) for join in joins):
        return PlanningError, wanted
    return None, wanted


@pytest.mark.lengthy
@pytest.mark.rounds
@settings(max_examples=rounds(120, 300))
@given(PROGRAMS)
def test_the_planner_agrees_with_brute_force_on_random_applications(program):
    app = described(program)
    verdict, wanted = brute_force(app)
    if verdict is not None:
        with pytest.raises(verdict) as caught:
            build_plan(app, STREAMS)
        assert type(caught.value) is verdict
        return
    planned = build_plan(app, STREAMS)
    assigned = {edge.operator: edge.partitions for edge in planned.streams if edge.operator}
    assert assigned == {
        name: count for name, count in wanted.items() if not name.startswith("dataset")
    }
    check_joins(app, planned)


@pytest.mark.lengthy
@pytest.mark.rounds
@settings(max_examples=rounds(120, 300))
@given(PROGRAMS)
@example([(("move", ("k", None)), 0), (("feed", "t0"), 1), (("join", "t1"), 1)])
def test_auto_repartition_accepts_every_random_application_and_proves_it(program):
    app = described(program, auto_repartition=True)
    planned = build_plan(app, STREAMS)
    check_joins(app, planned)
    if brute_force(app)[0] is None:
        assert not [
            exchange for exchange in planned.exchanges if exchange.reason == "auto_repartition"
        ]
    else:
        assert [exchange for exchange in planned.exchanges if exchange.reason == "auto_repartition"]


def check_joins(app, planned) -> None:
    """Every join with a partitioned dataset is in a group of equal counts and lies by the
    dataset's key.
    """
    for group in planned.join_groups:
        assert {planned.stream(name).partitions for name in group.streams} == {group.partitions}
        joined = planned.operator(group.join)
        assert (joined.partitions, joined.partitioned_by) == (TABLES[group.dataset], ("k",))
    assert [group.join for group in planned.join_groups] == [
        op.id for op in app.operators if isinstance(op.spec, Join) and TABLES[op.spec.dataset]
    ]


@pytest.mark.lengthy
@pytest.mark.parametrize("auto", [False, True])
def test_planning_takes_steps_in_proportion_to_the_operators(auto):
    few, many = (steps_of_planning(joins, auto=auto) for joins in (100, 400))
    assert many < 4.4 * few


@pytest.mark.lengthy
@pytest.mark.parametrize("chained", [False, True])
def test_what_is_displayed_and_stored_of_a_plan_grows_in_proportion_to_the_operators(chained):
    """Of many joins and many writers of one table, none repeats what the others have; nor does a
    branch of a branch.
    """

    def sizes(joins):
        planned = build_plan(joins_and_writers(joins, chained=chained), catalog(s=8, t=1))
        assert len(planned.fed[0].sinks) == len(planned.join_groups) == joins
        return len(planned.render()), len(json.dumps(planned.to_json()))

    for few, many in zip(sizes(100), sizes(400), strict=True):
        assert many < 4.6 * few


def test_what_comes_together_again_and_again_is_drawn_once():
    app = application()
    stream = app.input_stream("lake.s")
    for number in range(40):  # by so many ways as two to the 40th
        stream = stream.filter(f"n > {number}").apply(Together(), stream)
    drawn = build_plan(app, catalog(s=8)).render()
    assert drawn.count("  all records") == 40
    assert drawn.count("-> together-3\n") == 1


def joins_and_writers(joins: int, *, chained: bool = False, auto: bool = False) -> Application:
    """As many joins with a table as there are writers of it."""
    app = application(auto_repartition=auto)
    table = app.table(dataset("t", 8))
    streams = [app.input_stream("lake.s")]
    for number in range(joins):
        moved = streams[-1 if chained else number // 2].partition_by("k")
        streams.append(moved.join(table, on="k", select=[]))
        streams[-1].filter(f"n > {number}").send_to(table)
    return app


def steps_of_planning(joins: int, *, auto: bool) -> int:
    """Return how many functions are called to plan three operators for each join: a count that
    is always the same.
    """
    app, facts = joins_and_writers(joins, auto=auto), catalog(s=8, t=1)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        planned = build_plan(app, facts)
    finally:
        sys.setprofile(None)
    assert {edge.partitions for edge in planned.streams} == {8}
    assert [after.id for before, after in pairwise(planned.operators)] == [
        op.id for op in app.operators[1:]
    ]
    return calls
