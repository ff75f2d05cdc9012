"""Validators of an unbounded dataset: rows that break one are set aside, fail the advance, or are
counted, whatever the histories and however they are cut.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.change_formats import OperationColumn
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, unbounded_dataset
from dagster_adjunct.assets.declaration.policies import DeadLetters, Validator
from dagster_adjunct.assets.declaration.snapshots import QuerySnapshot
from dagster_adjunct.assets.unbounded.rewind import rewind_dataset
from dagster_adjunct.assets.validation.validators import (
    custom,
    min_rows,
    no_null_keys,
    no_nulls,
    row_count_within,
    schema_compatible,
    sql_check,
    unique_keys,
    values_in,
)
from dagster_adjunct.resources.errors import (
    BadChangeError,
    ConfigurationError,
    PlanningError,
    ValidatorError,
)
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.startpoint import StartpointSpecific
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.assets.conftest import World
from tests.assets.unbounded import over_time
from tests.assets.unbounded.facts import (
    DEAD,
    KEYS,
    Fact,
    content,
    facts_in,
    letters,
    send,
    table_of,
)

SMALL = sql_check("small", "n < 50")
ODD = sql_check("odd", "n % 2 = 1", severity="warn")
SET_ASIDE = DeadLetters(f"lake.{DEAD}")


def draw_facts(seed: int) -> list[list[Fact]]:
    draw = random.Random(seed)
    batches = []
    for _ in range(4):
        batch: list[Fact] = []
        for _ in range(draw.randint(1, 8)):
            value = draw.choice([None, draw.randint(0, 99), draw.randint(0, 99)])
            batch.append((draw.choice(KEYS), draw.randint(0, 20), value))
        batches.append(batch)
    return batches


def breaks(fact: Fact) -> bool:
    return fact[2] is not None and fact[2] >= 50


def held(facts: Sequence[Fact], *, ordered: bool) -> dict[str, int]:
    """Return what a dictionary holds after these facts, without those that break the rule."""
    newest: dict[str, tuple[int, int | None]] = {}
    for key, at, value in facts:
        if breaks((key, at, value)):
            continue
        if ordered and key in newest and newest[key][0] > at:
            continue
        newest[key] = (at, value)
    return {key: value for key, (_, value) in newest.items() if value is not None}


@pytest.mark.parametrize("ordered", [False, True], ids=["by offset", "by a column"])
def test_rows_that_break_a_rule_are_set_aside_and_their_keys_keep_what_they_have(
    either: World, ordered: bool
) -> None:
    options: dict[str, Any] = {"order_by": "at"} if ordered else {}
    spec = table_of(validators=[SMALL, ODD], on_bad_change=SET_ASIDE, chunk=5, **options)
    world = facts_in(either.lake, either.spark)
    sent: list[Fact] = []
    for batch in draw_facts(7):
        send(world, batch)
        sent += batch
        report = world.advance(spec)
        written = [fact for fact in batch if fact[2] is not None]
        broken = [fact for fact in batch if breaks(fact)]
        small, odd = report.verdicts
        assert (small.facts["rows"], small.facts["failed"]) == (len(written), len(broken))
        assert odd.facts["failed"] == sum(fact[2] % 2 == 0 for fact in written)
        assert small.passed is (not broken)
        assert report.counters.get("quarantined", 0) == len(broken)
        assert content(world.view(spec)) == held(sent, ordered=ordered)
    assert len(letters(world)) == sum(map(breaks, sent)) > 3
    assert set(report.verdicts[0].facts.get("sample", ())) <= {
        f"k = {key} at lake.facts.{partition} offset {offset}"
        for key in KEYS
        for partition, offset in letters(world)
    }


def test_a_row_that_breaks_a_rule_fails_the_advance_which_commits_nothing(either: World) -> None:
    world = facts_in(either.lake, either.spark)
    send(world, [("a", 1, 1)])
    spec = table_of(validators=[no_nulls("k"), SMALL])
    before = world.advance(spec)
    send(world, [("a", 2, 2), ("a", 3, 70), ("a", 4, None)])
    with pytest.raises(
        BadChangeError, match="validator 'small' expects n < 50: n is '70'"
    ) as error:
        world.advance(spec)
    assert error.value.validator == "small"
    assert "offset 2 of partition" in error.value.problem
    assert content(world.view(spec)) == {"a": 1}
    only_warned = world.advance(
        table_of(validators=[sql_check("small", "n < 50", severity="warn")])
    )
    assert before.offsets != only_warned.offsets
    assert not only_warned.verdicts[0].passed
    assert any("small: 1 of 2" in warning for warning in only_warned.warnings)
    assert content(world.view(spec)) == {}


@pytest.mark.spark
def test_a_history_keeps_no_row_that_breaks_a_rule(sparkling: World) -> None:
    world = over_time.prices_in(sparkling)
    spec = over_time.prices(validators=[values_in("n", [1, 2, 3])], on_bad_change=SET_ASIDE)
    over_time.send(world, [("a", 1, 1), ("a", 2, 9), ("b", 1, 9), ("a", 3, 3)])
    assert world.advance(spec).counters["quarantined"] == 2
    over_time.send(world, [("a", 2, 8), ("a", 4, None)])
    assert world.advance(spec).counters["quarantined"] == 1
    rows = world.view(spec).history_frame(world.spark).select("k", "n").collect()
    assert {*map(tuple, rows)} == {("a", 1), ("a", 3), ("a", None)}


def test_a_letter_is_applied_once_the_rule_is_corrected_and_its_offset_read_again(
    either: World,
) -> None:
    world = facts_in(either.lake, either.spark)
    send(world, [("a", 1, 1)])
    strict = table_of(validators=[SMALL], on_bad_change=SET_ASIDE)
    world.advance(strict)
    send(world, [("a", 2, 60)])
    world.advance(strict)
    ((partition, offset),) = letters(world)
    corrected = table_of(validators=[sql_check("small", "n < 99")], on_bad_change=SET_ASIDE)
    place = SystemStreamPartition("lake", "facts", partition)
    report = rewind_dataset(
        corrected,
        lake=world.lake,
        systems=world.systems,
        spark=world.spark,
        positions={place: StartpointSpecific(offset=str(offset))},
        reason="99 will do",
        by="test",
    )
    assert report.verdicts[0].facts == {"rows": 1, "failed": 0}
    assert content(world.view(corrected)) == {"a": 60}
    assert len(letters(world)) == 1


def test_sensitive_values_stay_out_of_reasons_and_samples(either: World) -> None:
    world = facts_in(either.lake, either.spark)
    send(world, [("secret", 1, 70)])
    spec = table_of(validators=[SMALL], on_bad_change=SET_ASIDE, sensitive=["k"])
    (verdict,) = world.advance(spec).verdicts
    assert verdict.facts["sample"][0].startswith("k = *** at lake.facts.")
    dead = world.streams.read_arrow(world.streams.all_ranges(DEAD), ["reason"])
    assert dead.column("reason").to_pylist() == [
        "validator 'small' expects n < 50: n is a hidden value"
    ]


def test_what_only_spark_evaluates_is_left_to_it(world: World) -> None:
    facts = facts_in(world.lake, IN_PROCESS)
    by_value = table_of(validators=[sql_check("sum", "n + 2147483600 > 0")])
    send(facts, [("a", 1, 99)])
    with pytest.raises(ConfigurationError, match="only Spark"):
        facts.advance(by_value)
    with pytest.raises(ConfigurationError, match="its validator of"):
        facts.advance(table_of(validators=[sql_check("of", "soundex(k) = 'A000'")]))


@pytest.mark.spark
def test_the_rows_of_a_bulk_snapshot_are_checked(sparkling: World) -> None:
    world = facts_in(sparkling.lake, sparkling.spark)

    def following(*validators: Validator) -> AdjunctDataset:
        sql = "SELECT string(id) AS k, id AS at, int(id) AS n FROM range(60)"
        position = {"lake.facts.0": "0", "lake.facts.1": "0"}
        return table_of(
            validators=validators,
            on_bad_change=SET_ASIDE,
            initial=QuerySnapshot(sql, position=position),
        )

    with pytest.raises(BadChangeError, match="bulk snapshot can't be stored: validator 'small'"):
        world.advance(following(SMALL))
    with pytest.raises(ValidatorError, match="validator 'unknown'"):
        world.advance(following(sql_check("unknown", "no_such_function(n)")))
    (verdict,) = world.advance(following(ODD)).verdicts
    assert (verdict.facts["rows"], verdict.facts["failed"]) == (60, 30)


@pytest.mark.parametrize(
    "validator",
    [
        min_rows(1),
        unique_keys(),
        no_null_keys(),
        row_count_within(0.2),
        schema_compatible(),
        sql_check("known", "SELECT * FROM version"),
        custom("mine", bool),
    ],
    ids=lambda validator: validator.name,
)
def test_a_rule_of_a_whole_version_is_refused(validator: Validator) -> None:
    with pytest.raises(ConfigurationError, match=f"validator '{validator.name}'") as error:
        table_of(validators=[validator])
    assert error.value.argument == "validators"


@pytest.mark.parametrize(
    "declare",
    [
        lambda: table_of(validators=[SMALL], changes=OperationColumn(missing="_isMissing")),
        lambda: table_of(validators=[SMALL], order_by={"at": ["n"]}),
        lambda: table_of(validators=[SMALL], persistent=False),
        lambda: table_of(validators=[SMALL, SMALL]),
    ],
    ids=["incomplete changes", "columns of several writers", "a table of one run", "two of a name"],
)
def test_validators_are_refused_where_they_could_not_do_their_work(
    declare: Callable[[], AdjunctDataset],
) -> None:
    with pytest.raises(ConfigurationError) as error:
        declare()
    assert error.value.argument == "validators"


@pytest.mark.parametrize(
    "validator",
    [
        no_nulls("wings"),
        values_in("n", ["1"]),
        values_in("k", [1]),
        sql_check("number", "n + 1"),
        sql_check("counted", "count(*) > 0"),
        sql_check("now", "at < unix_micros(current_timestamp())"),
        sql_check("chance", "rand() < 2"),
        sql_check("listed", "n in (select 1)"),
    ],
    ids=lambda validator: validator.name,
)
def test_a_rule_that_does_not_fit_the_columns_is_refused_before_anything_is_read(
    world: World, validator: Validator
) -> None:
    facts = facts_in(world.lake, IN_PROCESS)
    send(facts, [("a", 1, 99)])
    with pytest.raises(PlanningError, match=f"validator '{validator.name}' of dataset 'facts'"):
        facts.advance(table_of(validators=[validator]))


@pytest.mark.parametrize(
    ("kind", "allowed", "met", "broken"),
    [
        ("string", ["it's", None], "it's", "its"),
        ("decimal(6,2)", [1, 2.5], 2.5, 3),
        ("date", ["2026-01-31"], "2026-01-31", "2026-02-01"),
        ("boolean", [True], True, False),
        ("double", [0.1], 0.1, 0.2),
    ],
)
@pytest.mark.spark
def test_allowed_values_are_those_of_the_column_s_type(
    sparkling: World, kind: str, allowed: list[Any], met: Any, broken: Any
) -> None:
    made = {
        "date": lambda text: dt.date.fromisoformat(text),
        "decimal(6,2)": lambda n: Decimal(str(n)),
    }
    make = made.get(kind, lambda value: value)
    sparkling.stream("values", Schema.of(id="bigint", value=kind), ["id"], 1)
    sparkling.send("values", [(1, make(met)), (2, make(broken)), (3, None)])
    known = [value if value is None else make(value) for value in allowed]
    spec = unbounded_dataset(
        "values",
        input="lake.values",
        key="id",
        partitions=1,
        validators=[values_in("value", known)],
        on_bad_change=SET_ASIDE,
    )
    assert sparkling.advance(spec).counters["quarantined"] == 1
    assert sparkling.view(spec).get(2) is None
