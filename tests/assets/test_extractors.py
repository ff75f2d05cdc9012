"""What of a record becomes an entry: Spark expressions and Python functions, and nothing is cast
or lost unseen.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, QuerySource, bounded_dataset
from dagster_adjunct.assets.declaration.extractors import (
    KeyValueExtractor,
    Projection,
    PythonExtractor,
    _extract,
    is_assignable,
    mask_columns,
)
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.resources.errors import ConfigurationError, DatasetError, SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.tasks import decode_error, encode_task_errors
from dagster_adjunct.resources.streams.lake.read import with_meta_columns
from dagster_adjunct.resources.streams.system import EPOCH, OFFSET, PARTITION, TIMESTAMP, TOMBSTONE
from tests.assets.conftest import World

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RECORDS = Schema.of(tailnum="string", seats="int", model="string")
BY_SEAT = PythonExtractor(
    "tests.assets.extractors:by_seat", "tailnum STRING, seat INT", unchanged=("tailnum",)
)
WHATEVER = PythonExtractor(
    "tests.assets.extractors:whatever_it_says", "tailnum STRING, at TIMESTAMP, seats INT, day DATE"
)


def planes(
    extractor: KeyValueExtractor, key: str | list[str] = "tailnum", **more: Any
) -> AdjunctDataset:
    return bounded_dataset(
        "planes", input="lake.planes", key=key, partitions=2, extractor=extractor, **more
    )


# -- values


@pytest.mark.parametrize(
    "make",
    [
        lambda: Projection("k STRING, n INT", {"k": "upper(tailnum)"}, "seats > 1"),
        lambda: PythonExtractor("a.b:c", "k STRING", ["k"]),  # type: ignore[arg-type]
    ],
)
def test_extractors_are_values(make: Any) -> None:
    one, other = make(), make()
    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one
    assert isinstance(one, KeyValueExtractor)
    assert "0x" not in one.describe()


def test_an_extractors_schema_is_what_entries_have_and_nothing_is_imported_for_it() -> None:
    projection = Projection("`k e y` STRING, seats BIGINT", {"k e y": "upper(tailnum)"})
    assert projection.schema(RECORDS, "it") == Schema.of({"k e y": "string", "seats": "bigint"})
    assert PythonExtractor("no.such.module:x", "a INT").schema(RECORDS, "it") == Schema.of(a="int")


@pytest.mark.parametrize(
    ("extractor", "problem"),
    [
        (Projection("tailnum STRING, n INT"), "the record has no column 'n'"),
        (
            Projection("tailnum STRING, seats SMALLINT"),
            "declares seats as smallint, the record has int",
        ),
        (Projection("tailnum BINARY"), "declares tailnum as binary, the record has string"),
        (
            PythonExtractor("m:f", "tailnum BINARY", ("tailnum",)),
            "declares tailnum as unchanged and as binary",
        ),
        (PythonExtractor("m:f", "n INT", ("n",)), "the record has no column 'n'"),
    ],
)
def test_columns_that_do_not_fit_the_record_are_refused_with_the_dataset(
    extractor: KeyValueExtractor, problem: str
) -> None:
    with pytest.raises(SchemaMismatchError, match=re.escape(problem)) as caught:
        extractor.schema(RECORDS, "dataset 'planes'")
    assert "dataset 'planes'" in caught.value.problem


def test_declarations_that_can_not_work_are_refused_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Projection("k STRING", {"x": "1"})
    assert (caught.value.column, caught.value.argument) == ("x", "select")
    with pytest.raises(SchemaMismatchError, match="can't be parsed at '': expected a type"):
        Projection("k STRING, x")
    for factory in ("module", "module:", ":f", "a/b:f", "a b:f"):
        with pytest.raises(ConfigurationError) as caught:
            PythonExtractor(factory, "k STRING")
        assert caught.value.argument == "factory"
    with pytest.raises(SchemaMismatchError) as caught:
        PythonExtractor("a:b", "k STRING", ("x",))
    assert caught.value.column == "x"


@pytest.mark.parametrize(
    ("kind", "declared", "answer"),
    [
        ("int", "int", True),
        ("int", "bigint", True),
        ("bigint", "int", False),
        ("int", "double", True),
        ("bigint", "double", False),
        ("double", "float", False),
        ("float", "double", True),
        ("int", "decimal(10,0)", True),
        ("int", "decimal(10,1)", False),
        ("decimal(10,2)", "decimal(12,4)", True),
        ("decimal(10,2)", "decimal(12,5)", False),
        ("decimal(10,2)", "decimal(12,1)", False),
        ("void", "date", True),
        ("date", "timestamp", False),
        ("int", "string", False),
        ("string", "int", False),
        ("boolean", "int", False),
    ],
)
def test_a_type_fits_another_when_each_value_of_it_is_one_of_the_other(
    kind: str, declared: str, answer: bool
) -> None:
    assert is_assignable(kind, declared) is answer


# -- projections


@pytest.fixture
def records(spark: SparkSession) -> DataFrame:
    rows = [
        ("N1", 2, "a", 0, 5, None, False),
        ("N2", 0, "b", 1, 6, None, False),
        ("N3", None, None, 1, 7, None, True),
    ]
    ddl = (
        RECORDS.ddl()
        + ", __partition INT, __offset BIGINT, __timestamp TIMESTAMP, __tombstone BOOLEAN"
    )
    return spark.createDataFrame(rows, ddl)


def test_a_projection_computes_widens_and_filters_and_tombstones_go_around_it(
    records: DataFrame,
) -> None:
    projection = Projection(
        "tailnum STRING, wide BIGINT, seats BIGINT", {"wide": "seats + 1"}, "seats > 0"
    )
    entries = projection.apply(records, projection.schema(RECORDS, "it"), "it")
    assert entries.dtypes[:3] == [("tailnum", "string"), ("wide", "bigint"), ("seats", "bigint")]
    rows = [
        (row.tailnum, row.wide, row.seats, row["__offset"], row["__tombstone"])
        for row in entries.collect()
    ]
    assert rows == [("N1", 3, 2, 5, False), ("N3", None, None, 7, True)]


@pytest.mark.parametrize(
    ("projection", "problem"),
    [
        (Projection("k INT", {"k": "seats + 1L"}), "declares k as int, but 'seats + 1L' is bigint"),
        (Projection("k STRING", {"k": "seats"}), "declares k as string, but 'seats' is int"),
        (
            Projection("k STRING", {"k": "upper(tail)"}),
            "the expression for 'k' of the projection, 'upper(tail)'",
        ),
        (Projection("k STRING", {"k": "upper(("}), "can't be planned"),
        (
            Projection("tailnum STRING", where="seat > 1"),
            "where of the projection, 'seat > 1', can't be planned",
        ),
    ],
)
def test_an_expression_of_another_type_than_declared_is_rejected_before_it_runs(
    records: DataFrame, projection: Projection, problem: str
) -> None:
    with pytest.raises(DatasetError, match=re.escape(problem)) as caught:
        projection.apply(records, projection.schema(RECORDS, "it"), "dataset 'planes'")
    assert "dataset 'planes'" in caught.value.problem


def test_projected_entries_are_keyed_and_stored_by_their_projected_columns(
    sparkling: World,
) -> None:
    sparkling.stream("planes", RECORDS, ["tailnum"], 2)
    sparkling.send("planes", [("n1", 2, "a"), ("N1", 2, "b"), ("n2", 0, "c")], version="v1")
    projection = Projection(
        "key STRING, seats BIGINT, model STRING", {"key": "upper(tailnum)"}, "seats > 0"
    )
    spec = planes(projection, "key", columns=["key", "seats"])
    report = sparkling.advance(spec)
    assert (report.action, report.rows) == ("sealed", 1)
    view = sparkling.view(spec)
    assert view.schema == Schema.of(key="string", seats="bigint")
    assert view.get("N1") == {"key": "N1", "seats": 2}

    # Nothing says which of two partitions has the newer entry of a key.
    sparkling.send("planes", [("n1", 2, "a"), ("N1", 4, "b")], version="v2")
    report = sparkling.advance(spec)
    assert report.action == "rejected"
    assert "N1" in report.note

    sparkling.send("planes", [("n1", None, None)], version="v3")
    report = sparkling.advance(spec)
    assert report.action == "rejected"
    assert "is a tombstone that has no entry's key" in report.note


# -- Python


def run(extractor: PythonExtractor, *rows: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the entries of these records (tailnum, seats, model, partition, offset, tombstone),
    without Spark.
    """
    schema = with_meta_columns(RECORDS.to_arrow())
    schema = schema.remove(schema.get_field_index(EPOCH))  # datasets pay no attention to epochs
    values = [(*row[:5], None, row[5]) for row in rows]
    batch = pa.RecordBatch.from_arrays(
        [pa.array([row[i] for row in values], field.type) for i, field in enumerate(schema)],
        schema=schema,
    )
    out = list(
        _extract(
            iter([batch]),
            extractor,
            schema.names,
            extractor.schema(RECORDS, "it"),
            "dataset 'planes'",
        )
    )
    return [tuple(row.values()) for part in out for row in part.to_pylist()]


def test_a_python_function_makes_any_number_of_entries_with_their_records_place() -> None:
    rows = [
        ("N1", 2, "a", 0, 5, False),
        ("N2", 0, "b", 1, 6, False),
        ("N3", 1, "", 1, 7, False),
        ("N4", None, None, 1, 8, True),
    ]
    assert run(BY_SEAT, *rows) == [
        ("N1", 0, 0, 5, None, False), ("N1", 1, 0, 5, None, False), ("N3", 0, 1, 7, None, False),
        ("N4", None, 1, 8, None, True),
    ]  # fmt: skip
    assert run(BY_SEAT, rows[1]) == []


def test_what_pandas_calls_missing_is_null_in_an_entry() -> None:
    pandas = "__import__('pandas')"
    returned = f"[dict(tailnum='x', at={pandas}.NaT, seats={pandas}.NA, day={pandas}.NaT)]"
    assert run(WHATEVER, ("N1", 1, returned, 3, 11, False)) == [
        ("x", None, None, None, 3, 11, None, False)
    ]


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ("1 / 0", "failed: ZeroDivisionError: division by zero"),
        ("record['x']", "failed: KeyError: 'x' (extractors.py, line "),
        (
            "None",
            "returned the NoneType 'None': expected an iterable of dicts with tailnum string, at",
        ),
        (
            "{'tailnum': 'x'}",
            "returned the dict \"{'tailnum': 'x'}\": expected an iterable of dicts",
        ),
        ("7", "returned the int '7': expected an iterable of dicts"),
        (
            "[7]",
            "returned the int '7' for an entry: expected a dict with tailnum string, at timestamp",
        ),
        (
            "[{'tailnum': 'x'}]",
            "an entry without column 'at', with 'tailnum': expected a dict with tailnum string",
        ),
        (
            "[dict(tailnum='x', at=None, seats=None, day=None, y=1)]",
            "with column 'y', which is not declared",
        ),
        (
            "[dict(tailnum=7, at=None, seats=None, day=None)]",
            "column 'tailnum' as the int '7': expected it as string",
        ),
        (
            (
                "[dict(tailnum='x', at=dt.datetime(9999, 12, 31, 23,"
                " tzinfo=dt.timezone(dt.timedelta(hours=-5))), seats=1, day=None)]"
            ),
            "column 'at' as the datetime '9999-12-31 23:00:00-05:00': expected it as timestamp",
        ),
        (
            "[dict(tailnum='x', at=None, seats=1.5, day=None)]",
            "column 'seats' as the float '1.5': expected it as int",
        ),
        (
            "[dict(tailnum='x', at=None, seats=True, day=None)]",
            "column 'seats' as the bool 'True': expected it as int",
        ),
        (
            "[dict(tailnum='x', at=None, seats=2**40, day=None)]",
            "column 'seats' as the int '1099511627776'",
        ),
        (
            "[dict(tailnum='x', at=dt.datetime(2026, 1, 1), seats=1, day=None)]",
            "datetime without a zone",
        ),
        (
            "[dict(tailnum='x', at=None, seats=1, day=dt.datetime(2026, 1, 1))]",
            "column 'day' as the datetime",
        ),
        ("[dict(tailnum='\\ud800', at=None, seats=1, day=None)]", "column 'tailnum' as the str"),
    ],
)
def test_errors_of_a_python_function_name_partition_and_offset_of_the_record(
    returned: str, problem: str
) -> None:
    fine = (
        "[dict(tailnum='x', at=dt.datetime(2026, 1, 1, tzinfo=dt.UTC), seats=1, day=dt.date(2026,"
        " 1, 1))]"
    )
    with pytest.raises(DatasetError) as caught:
        run(WHATEVER, ("N1", 1, fine, 3, 11, False), ("N2", 1, returned, 3, 12, False))
    for part in (
        "dataset 'planes'",
        "the record at offset 12 of partition 3",
        f"extractor {WHATEVER.factory}",
        problem,
    ):
        assert part in caught.value.problem


def test_a_column_that_is_promised_unchanged_has_to_be() -> None:
    extractor = PythonExtractor(
        "tests.assets.extractors:renamed", "tailnum STRING, seats INT", ("tailnum",)
    )
    assert run(extractor, ("n1", 1, "", 0, 1, False)) == [("n1", 1, 0, 1, None, False)]
    with pytest.raises(
        DatasetError, match=r"offset 2 of partition 0.*'tailnum' as the str 'n1'.*unchanged.*'N1'"
    ):
        run(extractor, ("N1", 1, "", 0, 2, False))


def test_nan_is_equal_to_the_nan_that_is_passed_on_unchanged() -> None:
    marks = {
        PARTITION: pa.array([0], pa.int32()),
        OFFSET: [0],
        TIMESTAMP: pa.nulls(1, pa.timestamp("us", "UTC")),
        TOMBSTONE: [False],
    }
    records = pa.table({"k": ["a"], "ratio": [math.nan], **marks})
    extractor = PythonExtractor(
        "tests.assets.extractors:same", "k STRING, ratio DOUBLE", ("k", "ratio")
    )
    schema = Schema.of(k="string", ratio="double")
    assert (
        str(extractor.apply_arrow(records, schema, "dataset 'x'").to_pylist()[0]["ratio"]) == "nan"
    )


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        ("no.such.module:f", "can't be imported"),
        ("tests.assets.extractors:nothing", "can't be imported"),
        ("tests.assets.extractors:without_its_setting", r"failed \(KeyError: 'FLEET_TOKEN'\)"),
        ("tests.assets.extractors:NOT_A_FACTORY", "returns NoneType"),
        ("tests.assets.extractors:not_a_function", "returns int: expected a function"),
    ],
)
def test_a_factory_that_gives_no_function_is_refused(factory: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        run(PythonExtractor(factory, "a INT"), ("N1", 1, "", 0, 1, False))


def test_entries_of_a_function_are_deleted_by_tombstones_and_its_errors_pass_spark(
    sparkling: World,
) -> None:
    sparkling.stream("planes", RECORDS, ["tailnum"], 2)
    sparkling.send(
        "planes", [("N1", 1, "[dict(tailnum='N1', at=None, seats=5, day=None)]"), ("N2", 7, "[]")]
    )
    sparkling.send(
        "planes",
        [("N3", 1, "[dict(tailnum='N3', at=None, seats=None, day=None)]"), ("N1", None, None)],
    )
    sparkling.mark("planes", "v1", [0, 1])
    spec = planes(
        PythonExtractor(WHATEVER.factory, WHATEVER.columns, ("tailnum",)),
        columns=["tailnum", "seats"],
    )
    report = sparkling.advance(spec)
    assert (report.action, report.rows, report.counters["deleted"]) == ("sealed", 1, 1)
    assert sparkling.view(spec).get("N3") == {"tailnum": "N3", "seats": None}

    sparkling.send("planes", [("N1", 1, "record['x']")], version="v2")
    with pytest.raises(DatasetError, match=r"'planes'.*offset \d+ of partition \d.*KeyError: 'x'"):
        sparkling.advance(spec)


def test_a_function_with_an_undeclared_result_fails_the_run_and_consumes_nothing(
    sparkling: World,
) -> None:
    sparkling.stream("planes", RECORDS, ["tailnum"], 2)
    sparkling.send(
        "planes", [("N1", 1, "[dict(tailnum='N1', at=None, seats='many', day=None)]")], version="v1"
    )
    with pytest.raises(
        DatasetError, match=r"'planes'.*whatever_it_says.*'seats' as the str 'many'.* as int"
    ):
        sparkling.advance(planes(WHATEVER))
    manifest = StoredVersions(sparkling.lake, "planes").manifest()
    assert manifest is None or not (manifest.versions or manifest.delivered)
    corrected = PythonExtractor(
        WHATEVER.factory, WHATEVER.columns.replace("seats INT", "seats STRING")
    )
    assert sparkling.advance(planes(corrected)).action == "sealed"
    assert sparkling.view(planes(corrected)).get("N1")["seats"] == "many"  # type: ignore[index]


def test_an_extractor_works_on_queries_too(sparkling: World) -> None:
    sql = "SELECT 'N1' tailnum, 2 seats UNION ALL SELECT 'N2', 0"
    source = QuerySource(sql, Schema.of(tailnum="string", seats="int"), name="planes")
    spec = bounded_dataset(
        "seats", input=source, key=["tailnum", "seat"], broadcast=True, extractor=BY_SEAT
    )
    assert sparkling.advance(spec).rows == 2


def test_errors_are_found_in_the_text_that_spark_makes_of_them() -> None:
    assert decode_error("org.apache.spark.SparkException: Job aborted") is None
    text = "adjunct-error[SchemaMismatchError] it [next step] mend [adjunct-error]"
    error = decode_error(f"RuntimeError: {text}\n at org.apache")
    assert isinstance(error, SchemaMismatchError)
    assert (error.problem, error.next_step) == ("it", "mend")


@pytest.mark.parametrize(
    "returned",
    [
        "1 / 0 if 'N-secret' else 'N-secret'",
        "(_ for _ in ()).throw(ValueError('N-secret'))",
        "['N-secret']",
        "'N-secret'",
        "[dict(tailnum=b'N-secret', at=None, seats=None, day=None)]",
    ],
)
def test_no_value_of_a_sensitive_column_is_in_an_error(returned: str) -> None:
    with pytest.raises(DatasetError) as open_:
        run(WHATEVER, ("N-secret", 1, returned, 3, 12, False))
    hidden = mask_columns(WHATEVER, ("tailnum",))
    with pytest.raises(DatasetError) as caught:
        run(hidden, ("N-secret", 1, returned, 3, 12, False))
    assert "the record at offset 12 of partition 3" in caught.value.problem
    assert "N-secret" not in str(caught.value)
    assert "N-secret" in str(open_.value) or "ZeroDivisionError" in str(open_.value)
    reported = f"RuntimeError: {_raised(caught.value)}\n at org.apache"
    assert "N-secret" not in reported
    error = decode_error(reported)
    assert isinstance(error, DatasetError)
    assert error.problem == caught.value.problem


def _raised(error: DatasetError) -> str:
    def task() -> Iterator[int]:
        raise error
        yield 1

    with pytest.raises(RuntimeError) as raised:
        list(encode_task_errors(task()))
    # or Spark's log would show the error before it, with what it says
    assert raised.value.__suppress_context__
    return str(raised.value)
