"""What spark_functions.txt says of arguments and results is what Spark says: types that are not
listed are refused with every other argument that it takes, and the type of the result is its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import TYPE_CHECKING

import pytest

from dagster_adjunct.resources.sql.operands import NARROW_GROUPS, groups_in
from dagster_adjunct.resources.sql.parsed import (
    AGGREGATE_FUNCTIONS,
    GENERATOR_FUNCTIONS,
    SPARK_FUNCTIONS,
    argument_count_problem,
    constant_result_type,
    taken_arguments,
)
from tests.resources.sql.test_spark_agrees import analysed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = {
    "a": "tinyint",
    "c": "int",
    "d": "bigint",
    "f": "float",
    "g": "double",
    "h": "decimal(10,2)",
    "s": "string",
    "t": "boolean",
    "u": "date",
    "v": "timestamp",
    "nt": "timestamp_ntz",
    "w": "binary",
    "i": "interval day to second",
    "ym": "interval year to month",
    "xs": "array<int>",
    "ss": "array<string>",
    "yy": "array<array<int>>",
    "ts": "array<timestamp>",
    "ps": "array<struct<p:string,q:int>>",
    "m": "map<string,int>",
    "st": "struct<p:int,q:string>",
}
DDL = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
GROUP_OF = {
    name: NARROW_GROUPS[kind.split("<")[0].split("(")[0].split()[0]]
    for name, kind in COLUMNS.items()
}
OF_GROUP = {group: name for name, group in reversed(GROUP_OF.items())}
# Constants by group, for arguments that have to be constants, or to be one of few values.
CONSTANTS = {
    "whole": ["1", "256"],
    "string": ["'a'", "'day'", "'UTF-8'", "'999'", "'MO'", "'a int'"],
    "floating": ["0.5D"],
    "array": ["array(0.5D)"],
    "boolean": ["true"],
}
DESCRIBED = sorted(
    name
    for name in SPARK_FUNCTIONS
    if taken_arguments(name, 1) or taken_arguments(name, 2) or taken_arguments(name, 3)
)
NOT_TRIED = frozenset({"timestampadd", "timestampdiff"})
"""Functions for which none of the arguments here are right: a unit is no value."""
CALLS = 24
"""How many calls are tried until one is found that Spark takes."""


def choices(groups: frozenset[str], *, constant: bool) -> list[str]:
    """Return arguments of these groups, constants first."""
    constants = [text for group in sorted(groups) for text in CONSTANTS.get(group, ())]
    columns = [name for name, group in GROUP_OF.items() if group in groups]
    return constants if constant else [*columns[:1], *constants[:2], *columns[1:], *constants[2:]]


def argument_lists(function: str, count: int) -> Iterator[tuple[str, ...]]:
    """Yield arguments that the table lets the function take."""
    takes = taken_arguments(function, count)
    pools = [
        choices(groups_in(taken.groups), constant=taken.is_constant) for taken in takes[:count]
    ]
    pools += [choices(groups_in(["any"]), constant=False)] * (count - len(pools))
    # The next call changes each argument, not the last one only.
    for shift in range(CALLS):
        yield tuple(pool[(shift * (2 * place + 1)) % len(pool)] for place, pool in enumerate(pools))
    yield from islice(product(*pools), CALLS)


def taken_calls(frame: DataFrame, function: str) -> list[tuple[str, ...]]:
    """Return an argument list that Spark takes for each of up to two numbers of arguments."""
    found: list[tuple[str, ...]] = []
    for count in range(6, 0, -1):
        if not taken_arguments(function, count) or argument_count_problem(function, count):
            continue
        accepted = (
            given for given in argument_lists(function, count) if result(frame, function, given)
        )
        found += islice(accepted, 1)
        if len(found) == 2:
            break
    return found


def result(frame: DataFrame, function: str, arguments: Sequence[str]) -> str | None:
    """Return the type of a call's result, None if Spark refuses the call."""
    schema = analysed(frame, f"{function}({', '.join(arguments)})")
    return schema[0].dataType.simpleString() if schema is not None and schema.fields else None


def differences(frame: DataFrame, function: str) -> Iterator[str]:
    """Yield calls for which the table says something else than Spark."""
    calls = taken_calls(frame, function)
    has_all_functions = frame.sparkSession.version >= "4.3"
    if not calls and function not in NOT_TRIED and has_all_functions:
        yield f"no call of {function} is found that Spark takes"
    for given in calls:
        expected = constant_result_type(function, len(given))
        found = str(result(frame, function, given))
        if expected is not None and not found.startswith(expected.rstrip("…")):
            yield f"{function}({', '.join(given)}) is {found}, not {expected}"
        for place, taken in enumerate(taken_arguments(function, len(given))[: len(given)]):
            groups = groups_in(taken.groups)
            refused = [name for group, name in OF_GROUP.items() if group not in groups]
            if taken.is_constant:
                refused = ["c", "s"]
            for name in refused:
                other = (*given[:place], name, *given[place + 1 :])
                if result(frame, function, other) is not None:
                    yield f"{function}({', '.join(other)}) is taken"


@pytest.mark.spark
@pytest.mark.parametrize("step", [140, pytest.param(1, marks=pytest.mark.long)])
def test_spark_refuses_what_functions_are_said_not_to_take(spark: SparkSession, step: int) -> None:
    frame = spark.createDataFrame([], DDL)
    names = [name for name in DESCRIBED if name not in GENERATOR_FUNCTIONS][::step]
    before = spark.conf.get("spark.sql.ansi.enabled")
    try:
        for ansi in ("true", "false"):
            spark.conf.set("spark.sql.ansi.enabled", ansi)
            assert [text for name in names for text in differences(frame, name)] == []
    finally:
        spark.conf.set("spark.sql.ansi.enabled", str(before))


def test_functions_of_one_record_are_described() -> None:
    plain = SPARK_FUNCTIONS - AGGREGATE_FUNCTIONS - GENERATOR_FUNCTIONS
    assert len(plain & set(DESCRIBED)) > len(plain) * 0.7
