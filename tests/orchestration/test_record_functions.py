"""What is told of results of a user's function that are not as it declared them."""

from __future__ import annotations

import re
import traceback
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct import MessageStream, Schema
from dagster_adjunct.errors import OperatorFailedError, SchemaMismatchError
from dagster_adjunct.orchestration.operators.calls import RecordCall
from dagster_adjunct.orchestration.operators.functions import _process_batches


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda record: {"n": record["email"]}, "gave column 'n' a value that is no int"),
        (lambda record: {record["email"]: 1}, "has {other}; its schema says n"),
    ],
)
def test_a_result_that_is_not_as_declared_reports_no_value_where_columns_are_sensitive(
    function: Any, problem: str
) -> None:
    batch = pa.RecordBatch.from_pydict({"k": ["a"], "email": ["ada@mail"]})
    for sensitive, other in (
        (frozenset[str](), "the columns ada@mail"),
        (frozenset({"email"}), "other columns"),
    ):
        call = RecordCall("flat-map-2", function, Schema.of(n="int"), sensitive=sensitive)
        with pytest.raises(OperatorFailedError) as caught:
            list(_process_batches([batch], call, ["k"]))
        assert problem.format(other=other) in caught.value.problem
        assert ("ada@mail" in "".join(traceback.format_exception(caught.value))) is not bool(
            sensitive
        )


def wrong_once(record: dict[str, Any]) -> dict[str, Any]:
    return {"n": "many" if record["k"] == "b" else 1} if record["k"] != "c" else {"m": 1}


@pytest.mark.parametrize(("last", "key", "offset"), [("b", "b", "11"), ("c", "c", "12")])
def test_the_record_whose_result_is_not_as_declared_is_reported_with_its_place(
    last: str, key: str, offset: str
) -> None:
    keys = ["a", last, "a"] if last == "b" else ["a", "a", last]
    positions = {"__partition": [3, 3, 3], "__offset": [10, 11, 12]}
    batch = pa.RecordBatch.from_pydict({"k": keys, **positions})
    with pytest.raises(OperatorFailedError) as caught:
        list(
            _process_batches(
                [batch],
                RecordCall("flat-map-2", wrong_once, Schema.of(n="int"), stream="lake.s"),
                ["k"],
            )
        )
    error = caught.value
    assert (error.stream, error.partition, error.offset) == ("lake.s", 3, offset)
    assert error.record == f"{{k: '{key}'}}"
    assert (error.file, error.line) == (__file__, wrong_once.__code__.co_firstlineno)
    assert "schema=" in error.next_step


def looks_up(record: dict[str, Any]) -> dict[str, Any]:
    raise SchemaMismatchError(
        f"dataset 'prices': key {record['k']!r} is no bigint.", "Convert the value first."
    )


def test_a_value_that_the_function_passed_on_wrongly_is_reported_with_its_record() -> None:
    batch = pa.RecordBatch.from_pydict({"k": ["a"], "__partition": [3], "__offset": [10]})
    with pytest.raises(OperatorFailedError) as caught:
        list(
            _process_batches(
                [batch],
                RecordCall("flat-map-2", looks_up, Schema.of(n="int"), stream="lake.s"),
                ["k"],
            )
        )
    error = caught.value
    assert error.problem.startswith("flat-map-2: dataset 'prices': key 'a' is no bigint (")
    assert error.next_step == "Convert the value first."
    assert (error.operator, error.stream, error.partition, error.offset) == (
        "flat-map-2",
        "lake.s",
        3,
        "10",
    )
    assert (error.file, error.line) == (__file__, looks_up.__code__.co_firstlineno)


BEYOND = pa.array([0, 253_402_300_800_000_000], pa.int64()).cast(pa.timestamp("us", tz="UTC"))


@pytest.mark.parametrize("entry", [None, "__entry"])
def test_a_value_without_a_python_form_is_reported_by_column(entry: str | None) -> None:
    given: list[Any] = []
    positions = {"__partition": [3, 3], "__offset": [10, 11]}
    batch = pa.RecordBatch.from_pydict(
        {"k": ["a", "b"], "at": BEYOND, "__entry": [None, None], **positions}
    )

    def function(*arguments: Any) -> dict[str, Any]:
        given.append(arguments)
        return {"n": 1}

    call = RecordCall("flat-map-2", function, Schema.of(n="int"), entry=entry, stream="lake.s")
    with pytest.raises(OperatorFailedError) as caught:
        list(_process_batches([batch], call, ["k"]))
    error = caught.value
    assert (error.stream, error.partition, error.offset, error.file) == ("lake.s", 3, "11", None)
    assert error.record == "{k: 'b', at: '+10000-01-01 00:00:00'}"
    assert "column 'at'" in error.problem
    assert all(
        hasattr(MessageStream, operator) for operator in re.findall(r"(\w+)\(…\)", error.next_step)
    )
    assert given == []
    hidden = RecordCall(
        "flat-map-2", function, Schema.of(n="int"), stream="lake.s", sensitive=frozenset({"at"})
    )
    with pytest.raises(OperatorFailedError) as caught:
        list(_process_batches([batch], hidden, ["k"]))
    assert "10000" not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        datetime(2026, 1, 1, 12),
        1_767_225_600_000_000,
        pa.scalar(datetime(2026, 1, 1, 12)),
        datetime(9999, 12, 31, 23, tzinfo=timezone(-timedelta(hours=5))),
    ],
)
def test_a_time_that_names_no_moment_is_refused_as_a_result(value: Any) -> None:
    batch = pa.RecordBatch.from_pydict({"k": ["a", "b"]})

    def made(record: dict[str, Any]) -> dict[str, Any]:
        return {"at": value if record["k"] == "b" else datetime(2026, 1, 1, tzinfo=UTC)}

    with pytest.raises(OperatorFailedError) as caught:
        list(
            _process_batches(
                [batch], RecordCall("flat-map-2", made, Schema.of(at="timestamp")), ["k"]
            )
        )
    assert caught.value.record == "{k: 'b'}"
    assert "column 'at'" in caught.value.problem
