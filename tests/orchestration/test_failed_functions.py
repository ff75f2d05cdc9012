"""User code that fails over a record is told by operator, line and a sample record, masked where
the schema says so.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct import Application, Schema
from dagster_adjunct.errors import OperatorFailedError, ProducerConflictError
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.operators.operator import Operator
from dagster_adjunct.orchestration.operators.sends import Sink
from dagster_adjunct.orchestration.step.failures import FailedBatch, probe_operator
from dagster_adjunct.orchestration.step.planned_batch import PlannedBatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark

ROWS = [(f"k{number:02}", number, f"{number}@mail") for number in range(40)]


def refuses(k: str) -> int:
    if k == "k17":
        raise ValueError(f"no number in {k}")  # the line that fails
    return 1


def with_udf(frame: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    def refused(k: str) -> int:
        if k == "k17":
            raise ValueError(f"no number in {k}")  # the line of the UDF
        return 1

    return frame.withColumn("n", F.udf(refused, "int")("k"))


def unchanged(frame: DataFrame) -> DataFrame:
    return frame


def one_of_each(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"n": refuses(record["k"])}]


def together(records: Any, context: Any) -> None:
    for record in records.to_pylist():
        refuses(record["k"])


def line_with(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.fixture
def world(step_world: StepWorld) -> StepWorld:
    step_world.stream("s", "k", 2, k="string", v="int", email="string")
    step_world.send("s", *ROWS)
    return step_world


def failing(world: StepWorld, describe: Callable[[Any, Application], Any]) -> OperatorFailedError:
    app = Application("app")
    sent = describe(app.input_stream("lake.s"), app)
    if sent is not None:
        sent.send_to(app.output_stream("lake.out", partitions=2, key="k"))
    with pytest.raises(OperatorFailedError) as caught:
        world.run(app)
    assert world.state(app).open is not None
    assert "adjunct checkpoint abandon app --reason" in caught.value.next_step
    return caught.value


def is_of(world: StepWorld, error: OperatorFailedError, key: str) -> bool:
    """Whether the position that is told is that of the record with this key."""
    streams = world.streams
    records = streams.read_arrow(streams.all_ranges("s")).to_pylist()
    (row,) = [row for row in records if row["k"] == key]
    return (error.stream, error.partition, error.offset) == (
        "lake.s",
        row["__partition"],
        str(row["__offset"]),
    )


CASES: list[tuple[Callable[[Any, Application], Any], str, str]] = [
    (
        lambda s, app: s.filter("v >= 0").map("k", "100 div (v - 23) as w"),
        (
            r"map-3: 100 div \(v - 23\): \[DIVIDE_BY_ZERO\] .*for \{k: 'k23', v: 23, email:"
            r" '23@mail'\}"
        ),
        "k23",
    ),
    (
        lambda s, app: s.map("k", "v + 2147483610 as w").map("k", "w"),
        r"map-2: v \+ 2147483610: \[ARITHMETIC_OVERFLOW\]",
        "k38",
    ),
    (
        lambda s, app: s.filter(
            "cast(replace(k, 'k0', 'x') as string) <> 'x3' or cast(k as int) > 0"
        ),
        r"filter-2: .*\[CAST_INVALID_INPUT\] The value 'k03'",
        "k03",
    ),
    (
        lambda s, app: s.filter("v > 0").map(with_udf),
        r"map-3: with_udf\(\) raised ValueError: no number in k17",
        "k17",
    ),
    (
        lambda s, app: (
            s.flat_map(one_of_each, schema=Schema.of(n="int")).filter("n > 0").map("'a' as k", "n")
        ),
        r"flat-map-2: one_of_each\(\) raised ValueError: no number in k17",
        "k17",
    ),
    # Spark quotes no expression of these, and a function that does nothing wrong stands before
    # them.
    (
        lambda s, app: (
            s.map(unchanged, keeps_partitioning=True)
            .partition_by("v")
            .with_columns(w="100 div (v - 23)")
        ),
        (
            r"with-columns-4: 100 div \(v - 23\): \[DIVIDE_BY_ZERO\] .*for \{k: 'k23', v: 23,"
            r" email: '23@mail'\}"
        ),
        "k23",
    ),
    (
        lambda s, app: s.flat_map("array(100 div (v - 23)) as w"),
        r"flat-map-2: 100 div \(v - 23\): \[DIVIDE_BY_ZERO\] .*for \{k: 'k23'",
        "k23",
    ),
    (
        lambda s, app: s.with_columns(
            w="from_json(if(v = 23, '{', '{}'), 'a int', map('mode', 'FAILFAST')).a"
        ),
        r"with-columns-2: \[MALFORMED_RECORD_IN_PARSING",
        "k23",
    ),
    (
        lambda s, app: s.with_columns(w="cast(if(v = 23, 3000000000L, 1L) as int)"),
        (
            r"with-columns-2: \[CAST_OVERFLOW\] The value 3000000000L .* Use `try_cast` .*for \{k:"
            r" 'k23'"
        ),
        "k23",
    ),
]
AT_LENGTH = {
    case[1] for case in CASES if re.search("OVERFLOW|INVALID|MALFORMED|map-[23]: 100", case[1])
}
SINK = (lambda s, app: s.sink(together), "", "")


# What overflows is told as what is divided by zero is: by Spark's error class, from an expression
# of any operator.
@pytest.mark.parametrize(
    ("describe", "message", "key"),
    [pytest.param(*case, marks=[pytest.mark.long] * (case[1] in AT_LENGTH)) for case in CASES],
)
def test_what_failed_is_reported_by_operator_line_and_record(
    world: StepWorld, describe: Callable[[Any, Application], Any], message: str, key: str
) -> None:
    error = failing(world, describe)
    assert error.operator == re.split(r":| raised ", error.problem)[0]
    assert is_of(world, error, key) or key == "k38"  # 38 and 39 both overflow
    assert error.record is not None
    assert f"k: '{key}'" in error.record
    assert re.search(message, error.problem), error.problem
    assert "Traceback" not in str(error)
    assert "\n" not in str(error)
    assert error.file == __file__
    if "() raised" in message.replace("\\", ""):
        assert error.line == line_with(
            "# the line of the UDF" if "udf" in message else "# the line that fails"
        )


def test_a_failed_table_update_names_its_record_and_its_batch_is_abandoned(
    world: StepWorld,
) -> None:
    def describe(stream: Any, app: Application) -> None:
        stream.update(app.table(world.table()), set={"v": "cast(email as int)"}, if_missing=[])
        described.append(app)

    described: list[Application] = []
    error = failing(world, describe)
    assert error.operator == "send-to-table-2-things"
    assert "[CAST_INVALID_INPUT]" in error.problem
    assert error.record is not None
    BatchLog(world.lake, "app").abandon(reason="one bad record", by="me", skip=True)
    assert world.run(*described).batches == 0


@pytest.mark.parametrize(
    "describe",
    [
        pytest.param(CASES[2][0], marks=pytest.mark.long),
        CASES[3][0],
        pytest.param(CASES[4][0], marks=pytest.mark.long),
        SINK[0],
        lambda s, app: s.partition_by("v").with_columns(w="cast(email as int)"),
    ],
)
def test_nothing_of_a_sensitive_column_is_reported(
    step_world: StepWorld, describe: Callable[[Any, Application], Any]
) -> None:
    schema = Schema.of(k="string", v="int", email="string").with_sensitive("k", "email")
    step_world.streams.create("s", schema=schema, key=["k"], partitions=2)
    step_world.send("s", *ROWS)
    error = failing(step_world, describe)
    reported = "".join(traceback.format_exception(error)) + repr(error.facts)
    assert error.record is not None
    assert "k: ***" in error.record
    assert "email: ***" in error.record
    assert "k17" not in reported
    assert "k03" not in reported
    assert "@mail" not in reported
    assert "v: " in error.record


def test_a_mended_function_ends_the_batch_and_adds_nothing_to_an_output_that_has_it(
    world: StepWorld,
) -> None:
    def application(divisor: str, first: str = "v") -> Application:
        app = Application("app")
        stream = app.input_stream("lake.s")
        stream.map("k", f"{first} as v").send_to(
            app.output_stream("lake.first", partitions=2, key="k")
        )
        stream.map("k", f"100 div {divisor} as w").send_to(
            app.output_stream("lake.out", partitions=2, key="k")
        )
        return app

    with pytest.raises(OperatorFailedError, match="Batch 1 stays open"):
        world.run(application("(v - 23)"))
    assert len(world.rows("first")) == 40
    with pytest.raises(ProducerConflictError, match="adjunct checkpoint abandon app --reason"):
        # mends one output, and changes the one that is written
        world.run(application("(v + 1)", first="v + 1"))
    report = world.run(application("(v + 1)"))
    assert report.counters["lake.first"] == {"rows": 40, "duplicate_batches": 1}
    assert (len(world.rows("first")), len(world.rows("out"))) == (40, 40)
    assert world.state(application("v")).open is None


@pytest.mark.parametrize("returns", [None, Schema.of(k="string")])
def test_looking_for_a_record_hands_nothing_to_functions_again(returns: Schema | None) -> None:
    handed: list[object] = []
    sink = Operator("sink-2", ("input-1",), Sink(lambda *given: handed.append(given), returns))
    unused: Any = None
    planned = PlannedBatch(*[unused] * len(fields(PlannedBatch)))
    with pytest.raises(AttributeError, match="while searching for a failed record"):
        probe_operator(FailedBatch(planned, unused, {}), sink, unused)
    assert handed == []
