"""Sums and means of windows are exact, however their records are cut into batches and in
whatever order they come.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Iterator, Sequence
from decimal import ROUND_HALF_UP, Decimal, localcontext
from itertools import permutations
from typing import TYPE_CHECKING

import pytest

from dagster_adjunct import Application
from dagster_adjunct.orchestration.operators.columns import EXPIRES
from dagster_adjunct.orchestration.operators.windows.aggregates import exact_column
from dagster_adjunct.orchestration.operators.windows.assignment import CLOSING, END, START, Windows
from dagster_adjunct.orchestration.operators.windows.window import make_results
from dagster_adjunct.resources.errors import DatasetError, OperatorFailedError
from dagster_adjunct.resources.spark.tasks import translate_spark_errors
from dagster_adjunct.windows import Mean, Session, Sum, Tumbling
from tests.orchestration.step_world import StepWorld

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

BATCHES = 3
KINDS = ("decimal(38,0)", "bigint")
AT_LENGTH = (
    *("decimal(38,38)", "decimal(28,10)", "decimal(27,5)"),
    *("decimal(38,18)", "decimal(24,22)", "int"),
    *(
        "decimal(38,1)",
        "decimal(38,20)",
        "decimal(38,21)",
        "decimal(38,37)",
        "decimal(30,30)",
        "decimal(33,4)",
    ),
    *("decimal(28,28)", "decimal(28,0)", "decimal(20,2)", "decimal(5,2)", "tinyint"),
)


def digits_of(kind: str) -> tuple[int, int]:
    """Return precision and scale of a decimal type, and of an integer that many digits."""
    if not kind.startswith("decimal"):
        return {"bigint": 19, "int": 10, "tinyint": 3}[kind], 0
    precision, scale = kind[len("decimal(") : -1].split(",")
    return int(precision), int(scale)


def greatest(kind: str) -> Decimal:
    """Return the greatest value of a type."""
    precision, scale = digits_of(kind)
    bits = {"bigint": 63, "int": 31, "tinyint": 7}.get(kind)
    return Decimal(10**precision - 1).scaleb(-scale) if bits is None else Decimal(2**bits - 1)


def drawn(chance: random.Random, kind: str) -> Decimal | None:
    """Return a value of the type: often at its ends, and of any size."""
    scale, most = digits_of(kind)[1], int(greatest(kind).scaleb(digits_of(kind)[1]))
    amount = chance.choice(
        [0, 1, most, most, most // 2, chance.randrange(most), chance.randrange(most) % 10**9]
    )
    return (
        None
        if chance.random() < 0.1
        else Decimal(chance.choice([-1, 1, 1]) * amount).scaleb(-scale)
    )


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Let Python round nothing."""
    with localcontext(prec=100):
        yield


@pytest.mark.parametrize(
    "kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.long) for kind in AT_LENGTH)]
)
def test_sums_and_means_do_not_depend_on_the_cut(spark: SparkSession, kind: str) -> None:
    """Each case is some values, and the batch of each; batches are added as windows are, and
    merged as sessions are.
    """
    from pyspark.sql import functions as F

    chance = random.Random(kind)
    cases = [[drawn(chance, kind) for _ in range(chance.randrange(1, 8))] for _ in range(60)]
    cases += [
        [greatest(kind), greatest(kind), -greatest(kind)],
        [-greatest(kind), -greatest(kind)],
        [None],
    ]
    rows = [
        (number, chance.randrange(BATCHES), value)
        for number, values in enumerate(cases)
        for value in values
    ]
    drawn_as = kind if kind.startswith("decimal") else "decimal(38,0)"
    frame = spark.createDataFrame(rows, f"number int, batch int, d {drawn_as}").withColumn(
        "d", F.col("d").cast(kind)
    )
    for made in (Sum("d"), Mean("d")):
        partials, returns = made.partials("x", kind), str(made.result_type(kind))
        of_batch = (
            frame.groupBy("number", "batch")
            .agg(*[F.expr(p.made).alias(p.name) for p in partials])
            .cache()
        )
        assert [kept for _, kept in of_batch.dtypes[2:]] == [partial.type for partial in partials]
        merged = of_batch.groupBy("number").agg(*[F.expr(p.merged).alias(p.name) for p in partials])
        added, *others = (
            of_batch.where(F.col("batch") == batch).drop("batch") for batch in range(BATCHES)
        )
        for other in others:
            sums = [
                F.expr(p.added.format(f"old.`{p.name}`", f"new.`{p.name}`")).alias(p.name)
                for p in partials
            ]
            added = (
                added.alias("old")
                .join(other.alias("new"), "number", "full")
                .select("number", *sums)
            )
        for kept in (merged, added):
            if (exact := made.exact("x", kind)) is not None:
                kept = kept.withColumn(exact_column("x"), F.expr(exact))  # noqa: PLW2901
            results = kept.select("number", F.expr(made.result("x", kind)).alias("x"))
            assert results.dtypes[1] == ("x", returns)
            found = dict(map(tuple, results.collect()))
            wanted = {
                number: rounded(made, [value for value in values if value is not None], returns)
                for number, values in enumerate(cases)
            }
            assert found == wanted


def rounded(
    made: Sum | Mean, values: Sequence[Decimal], returns: str
) -> Decimal | float | int | None:
    """Return what plain Python makes of the values; None where the type can't hold it."""
    if not values:
        return None
    total = sum(values, Decimal(0))
    if returns == "double":
        return float(total) / len(values)
    if returns == "bigint":
        return int(total) if -(2**63) <= total < 2**63 else None
    exact = total / len(values) if isinstance(made, Mean) else total
    exact = exact.quantize(Decimal(1).scaleb(-digits_of(returns)[1]), ROUND_HALF_UP)
    return exact if abs(exact) <= greatest(returns) else None


SECOND = dt.timedelta(seconds=1)
T0 = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def sums_app(*only: str, windows: Sequence[str] = ("updates",), **casts: str) -> Application:
    """Return sums of n and d in windows of ten seconds, final, or in sessions, as updates; with
    these types.
    """
    app = Application("sums")
    amounts = app.input_stream("lake.amounts", default_offset="oldest", event_time="at")
    if casts:
        amounts = amounts.with_columns(
            **{name: f"cast({name} as {kind})" for name, kind in casts.items()}
        )
    made = {"n": Sum("n"), "d": Sum("d"), "mean": Mean("d")}
    made = {name: made[name] for name in only or made}
    kinds = {"final": Tumbling(10 * SECOND), "updates": Session(5 * SECOND)}
    for name in windows:
        results = amounts.window(kinds[name], by="k", name=name, aggregates=made, results=name)  # type: ignore[arg-type]
        results.send_to(app.output_stream(f"lake.{name}", partitions=1, key="k"))
    return app


@pytest.mark.parametrize("name", ["updates", pytest.param("final", marks=pytest.mark.long)])
def test_a_sum_may_leave_its_type_and_come_back_in_any_batch(
    step_world: StepWorld, name: str
) -> None:
    step_world.stream("amounts", "k", 1, k="string", at="timestamp", n="bigint", d="decimal(38,38)")
    amounts = [(2**62, Decimal("0.6")), (2**62, Decimal("0.6")), (-(2**62), Decimal("-0.6"))]
    orders = {
        "".join(map(str, order)): [amounts[place] for place in order]
        for order in permutations(range(3))
    }
    for batch in range(3):
        rows = [(key, T0 + batch * SECOND, *order[batch]) for key, order in orders.items()]
        step_world.send(
            "amounts", *rows, ("z", T0 + batch * SECOND, None, Decimal(f"1E-{36 + batch}"))
        )
        if batch == 2:
            step_world.send("amounts", ("end", T0 + 60 * SECOND, 1, Decimal(0)))
        step_world.run(sums_app(windows=[name]))
    closed = [row for row in step_world.rows(name) if name == "final" or row["final"]]
    sums = {row["k"]: (row["n"], row["d"], row["mean"]) for row in closed}
    assert len(closed) == len(sums)
    small = Decimal("111E-38")
    assert sums.pop("z") == (None, small, small / 3)
    assert sums == dict.fromkeys(orders, (2**62, Decimal("0.6"), Decimal("0.2")))


def test_sums_that_are_kept_in_other_units_are_not_gone_on_with(step_world: StepWorld) -> None:
    step_world.stream("amounts", "k", 1, k="string", at="timestamp", d="decimal(38,10)")
    step_world.send("amounts", ("a", T0, Decimal(1)))

    def app(scale: int) -> Application:
        made = Application("units")
        amounts = made.input_stream("lake.amounts", default_offset="oldest", event_time="at")
        cast = amounts.with_columns(d=f"cast(d as decimal(38,{scale}))")
        windows = cast.window(Tumbling(10 * SECOND), by="k", name="w", aggregates={"sum": Sum("d")})
        windows.select("k").send_to(made.output_stream("lake.keys", partitions=1, key="k"))
        return made

    step_world.run(app(10))
    step_world.send("amounts", ("a", T0, Decimal(1)))
    with pytest.raises(DatasetError) as caught:
        step_world.run(app(5))
    assert caught.value.dataset == "units-w"


def test_a_sum_beyond_its_type_fails_the_batch_that_closes_it(step_world: StepWorld) -> None:
    step_world.stream("amounts", "k", 1, k="string", at="timestamp", n="bigint", d="decimal(38,38)")
    step_world.send("amounts", ("a", T0, 2**62, Decimal(0)), ("b", T0, 1, Decimal(0)))
    step_world.send("amounts", ("a", T0 + SECOND, 2**62, Decimal(0)))
    step_world.run(sums_app("n"))
    assert [row["n"] for row in step_world.rows("updates") if row["k"] == "a"] == [None], (
        "not final"
    )
    step_world.send("amounts", ("end", T0 + 60 * SECOND, 1, Decimal(0)))
    with pytest.raises(OperatorFailedError) as caught:  # the batch stays open, and nothing is lost
        step_world.run(sums_app("n"))
    assert caught.value.operator == "window-2-updates"
    assert str(2**63) in caught.value.problem
    assert "k = a" in caught.value.problem
    assert "2026-01-01 00:00:00" in caught.value.problem
    assert '.with_columns(n="cast(n as decimal(20,0))")' in caught.value.next_step
    step_world.run(sums_app("n", n="decimal(20,0)"))
    final = sorted((row["k"], row["n"]) for row in step_world.rows("updates") if row["final"])
    assert final == [("a", 2**63), ("b", 1)]


def test_a_wider_type_is_advised_only_where_there_is_one(spark: SparkSession) -> None:
    for kind, made, wider in (
        ("int", Sum("v"), "decimal(20,0)"),
        ("decimal(20,2)", Sum("v"), "decimal(27,2)"),
        ("decimal(27,2)", Sum("v"), None),
        ("decimal(38,0)", Sum("v"), None),
        ("decimal(38,0)", Mean("v"), None),
        ("decimal(38,10)", Mean("v"), None),
    ):
        windows = Windows(
            Tumbling(10 * SECOND),
            ("k",),
            (("n", made),),
            dt.timedelta(0),
            {"k": "string", "v": kind},
        )
        values = {"n$sum": 10 ** (38 - digits_of(kind)[1]) - 1, "n$high": 10**37, "n$count": 1}
        kept = [values.get(name) for name in windows.schema.names]
        places = dict(zip(windows.schema.names, kept, strict=True))
        assert "n$sum" in places, places
        row = {**places, "k": "a", START: T0, END: T0, EXPIRES: T0, CLOSING: True}
        types = {**{field.name: field.type for field in windows.schema.fields}, CLOSING: "boolean"}
        text = ", ".join(f"`{name}` {type_}" for name, type_ in types.items())
        rows = spark.createDataFrame(
            [tuple(Decimal(v) if "dec" in types[n] else v for n, v in row.items())], text
        )
        with pytest.raises(OperatorFailedError) as caught, translate_spark_errors():
            make_results(rows, windows, "final", "window-2-w", ()).collect()
        step = caught.value.next_step
        assert (f"cast(v as {wider})" in step) == (wider is not None), step
        assert ("cast(v as double)" in step) == (wider is None), step
        assert ("cast(v as decimal(38,5))" in step) == (kind == "decimal(38,10)"), step


@pytest.mark.long  # the advice itself is read above
def test_a_sum_that_no_decimal_holds_is_had_as_a_double_in_another_application(
    step_world: StepWorld,
) -> None:
    """As its error says, also of a window that has several batches behind it."""
    step_world.stream("amounts", "k", 1, k="string", at="timestamp", d="decimal(38,0)")

    def app(name: str, kind: str) -> Application:
        made = Application(name)
        amounts = made.input_stream("lake.amounts", default_offset="oldest", event_time="at")
        cast = amounts.with_columns(d=f"cast(d as {kind})")
        windows = cast.window(Tumbling(10 * SECOND), by="k", name="w", aggregates={"sum": Sum("d")})
        total = windows.select("k", "cast(sum as double) as total")
        total.send_to(made.output_stream(f"lake.totals-{name}", partitions=1, key="k"))
        return made

    for batch in range(2):
        step_world.send(
            "amounts", ("a", T0 + batch * SECOND, Decimal(6 * 10**37)), ("b", T0, Decimal(batch))
        )
        step_world.run(app("exact", "decimal(38,0)"))
    step_world.send("amounts", ("end", T0 + 60 * SECOND, Decimal(1)))
    with pytest.raises(OperatorFailedError):
        step_world.run(app("exact", "decimal(38,0)"))
    step_world.run(app("doubles", "double"))
    assert {row["k"]: row["total"] for row in step_world.rows("totals-doubles")} == {
        "a": 1.2e38,
        "b": 1.0,
    }


def test_the_error_of_a_sum_reports_nothing_sensitive(spark: SparkSession) -> None:
    windows = Windows(
        Tumbling(10 * SECOND),
        ("k", "shop"),
        (("n", Sum("v")),),
        dt.timedelta(0),
        {"k": "string", "shop": "int", "v": "int"},
    )
    row = ("secret", 7, T0, T0 + 10 * SECOND, 2, Decimal(2**63), T0 + 10 * SECOND, True)
    rows = spark.createDataFrame([row], f"{windows.schema.ddl()}, {CLOSING} boolean")
    with pytest.raises(OperatorFailedError) as caught, translate_spark_errors():
        make_results(rows, windows, "final", "window-2-w", {"K", "v"}).collect()
    assert caught.value.operator == "window-2-w"
    assert "secret" not in str(caught.value)
    assert str(2**63) not in str(caught.value)
    assert "k = ***, shop = 7" in caught.value.problem
