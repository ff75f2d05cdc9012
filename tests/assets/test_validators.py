"""Validators: each by itself, and all of them as the cycle asks them."""

from __future__ import annotations

import datetime as dt
import hashlib
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from py4j.protocol import Py4JJavaError, Py4JNetworkError
from pyspark.errors import AnalysisException, NumberFormatException, ParseException
from pyspark.sql import SparkSession

from dagster_adjunct.assets.bounded.advance import abandon_version, advance_version_set
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, bounded_dataset, version_set
from dagster_adjunct.assets.declaration.policies import DiscardPolicy, Validator
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.validation.validators import (
    Candidate,
    Check,
    Finding,
    custom,
    evaluate,
    iterate_sql_rules,
    min_rows,
    no_null_keys,
    no_nulls,
    row_count_within,
    schema_compatible,
    sql_check,
    unique_keys,
    values_in,
)
from dagster_adjunct.assets.versions.leases import list_live_leases
from dagster_adjunct.assets.versions.version import Verdict
from dagster_adjunct.resources.errors import (
    AdjunctError,
    CommitConflictError,
    ConfigurationError,
    DatasetError,
    ManifestMismatchError,
    SchemaMismatchError,
    StoreUnavailableError,
    ValidatorError,
)
from dagster_adjunct.resources.objects.local_store import LocalStore
from dagster_adjunct.resources.objects.store import InMemoryStore, ObjectStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World, no_spark
from tests.assets.cycle import builds, faulty
from tests.assets.sealing import table_of, view_of
from tests.faulty_store import Fault

SCHEMA = Schema.of(tailnum="string", seats="int", maker="string")
ROWS = [("N1", 100, "AIRBUS"), ("N2", None, "BOEING"), ("N3", 50, None), ("N4", 9, "CESSNA")]


def candidate(
    rows: list[Any] = ROWS,
    served: list[Any] | None = None,
    *,
    schema: Schema = SCHEMA,
    served_schema: Schema = SCHEMA,
    counters: dict[str, int] | None = None,
    store: ObjectStore | None = None,
    spark: Any = no_spark,
) -> Candidate:
    store = store or InMemoryStore()
    old = None if served is None else view_of(store, served, schema=served_schema, key=["tailnum"])
    new = view_of(store, rows, schema=schema, key=["tailnum"], number=2, counters=counters)
    return Candidate(new, old, spark)


def planes(count: int) -> list[Any]:
    return [(f"N{number:04d}", number, None) for number in range(count)]


# -- each by itself


def test_keys_are_unique_where_no_record_replaced_another() -> None:
    assert unique_keys()(candidate()).passed
    verdict = unique_keys()(candidate(counters={"read": 1007, "superseded": 3}))
    assert not verdict.passed
    assert verdict.message == "3 of 1,007 records have a key (tailnum) that a later record has too"
    assert verdict.facts == {"superseded": 3, "read": 1007}


def test_no_null_keys_looks_at_the_files_that_were_stored() -> None:
    checked = candidate()
    assert no_null_keys()(checked) == Verdict(
        name="no_null_keys",
        passed=True,
        message="4 rows have 'tailnum'",
        facts={"nulls": {"tailnum": 0}, "rows": 4},
    )
    generation = checked.view.sealed.generations[0]
    path = checked.view.store.staging_dir() / "replaced.parquet"
    pq.write_table(table_of(SCHEMA, [(None, 1, "x"), ("N2", 2, "x"), (None, 3, "x")]), path)
    data = path.read_bytes()
    stored = generation.files[0]
    checked.view.store.put(f"{generation.folder}/{stored.name}", data)
    object.__setattr__(stored, "size", len(data))
    object.__setattr__(stored, "sha256", hashlib.sha256(data).hexdigest())
    verdict = no_null_keys()(checked)
    assert not verdict.passed
    assert verdict.message == "2 of 4 rows have no 'tailnum'"


def test_a_stored_file_that_is_gone_refuses_the_version_by_name() -> None:
    checked = candidate()
    generation = checked.view.sealed.generations[0]
    checked.view.store.delete(f"{generation.folder}/{generation.files[0].name}")
    (verdict,) = evaluate([no_null_keys()], checked)
    assert not verdict.passed
    assert verdict.message.startswith(
        "ManifestMismatchError: dataset 'planes', version v000002-attempt2: the manifest"
    )
    assert "it is missing" in verdict.message


def test_nulls_are_counted_by_column() -> None:
    verdict = no_nulls("seats", "maker")(candidate())
    assert (verdict.name, verdict.passed) == ("no_nulls_seats_maker", False)
    assert verdict.message == "1 of 4 rows have no 'seats'; 1 of 4 rows have no 'maker'"
    assert no_nulls("tailnum")(candidate()).passed
    with pytest.raises(ValidatorError) as caught:
        evaluate([no_nulls("wings")], candidate())
    assert (caught.value.dataset, caught.value.validator) == ("planes", "no_nulls_wings")


NESTED = Schema.of(
    {
        "id": "bigint",
        "owner": "struct<mail:string,home:struct<city:string,`zip.code`:int>,tags:array<string>>",
        "owner.mail": "string",
        "a": "struct<b:int,c:int>",
    }
)
OWNERS: list[Any] = [
    {"mail": "x", "home": {"city": "Oslo", "zip.code": 1}, "tags": [None]},
    {"mail": None, "home": {"city": None, "zip.code": None}, "tags": []},
    {"mail": "y", "home": None, "tags": None},
    None,
]


@pytest.mark.parametrize(
    ("name", "nulls"),
    [
        ("`owner`.`mail`", [owner is None or owner["mail"] is None for owner in OWNERS]),
        ("owner.home", [owner is None or owner["home"] is None for owner in OWNERS]),
        (
            "owner.home.city",
            [owner is None or not owner["home"] or not owner["home"]["city"] for owner in OWNERS],
        ),
        (
            "owner.home.`zip.code`",
            [
                owner is None or not owner["home"] or not owner["home"]["zip.code"]
                for owner in OWNERS
            ],
        ),
        ("owner.tags", [owner is None or owner["tags"] is None for owner in OWNERS]),
        ("owner", [owner is None for owner in OWNERS]),
        ("owner.mail", [False] * 4),  # a column with exactly this name
        ("a.b", [True] * 4),
        ("a.c", [False] * 4),
    ],
)
def test_nulls_are_counted_at_paths(name: str, nulls: list[bool]) -> None:
    rows = [(number, owner, "m", {"b": None, "c": 1}) for number, owner in enumerate(OWNERS)]
    view = view_of(InMemoryStore(), rows, schema=NESTED, key=["id"])
    verdict = no_nulls(name)(Candidate(view, None, no_spark))
    assert verdict.facts["nulls"] == {name: sum(nulls)}
    assert verdict.passed == (not any(nulls))
    assert repr(name) in verdict.message


def test_nulls_at_stored_steps_are_those_of_their_file_column() -> None:
    """Files may have a struct and a column whose paths are the same text, "a.b"."""
    kinds = {"a": "struct<b:int,`b.c`:int>", "a.b": "struct<c:int>", "id": "int"}
    rows = [(1, None, 5), (2, None, None), (3, 7, None)]
    written = [({"b": b, "b.c": 1}, {"c": c}, number) for number, b, c in rows]
    view = view_of(InMemoryStore(), written, schema=Schema.of(kinds), key=["id"])
    checked = Candidate(view, None, no_spark)
    found = no_nulls("`a.b`.c", "a.b", "`a`.`b`", "a.`b.c`")(checked).facts["nulls"]
    assert found == {"`a.b`.c": 2, "a.b": 0, "`a`.`b`": 2, "a.`b.c`": 0}


def test_a_path_that_does_not_exist_names_the_fields_there() -> None:
    view = view_of(InMemoryStore(), [(1, None, None, None)], schema=NESTED, key=["id"])
    with pytest.raises(SchemaMismatchError) as caught:
        no_nulls("owner.home.citty")(Candidate(view, None, no_spark))
    assert caught.value.column == "owner.home.citty"
    assert "city, `zip.code`" in caught.value.next_step


WIDER = Schema.of(tailnum="string", seats="int", maker="string", year="int")
LONGER = Schema.of(tailnum="string", seats="bigint", maker="string")
SHUFFLED = Schema.of(tailnum="string", maker="string", seats="int")


@pytest.mark.parametrize(
    ("new", "passing", "message"),
    [
        (SCHEMA, {"exact", "additive", "any"}, "the same 3 columns as version"),
        (WIDER, {"additive", "any"}, "added year (int)"),
        (Schema.of(tailnum="string", seats="int"), {"any"}, "removed maker"),
        (LONGER, {"any"}, "retyped seats (int to bigint)"),
        (
            SHUFFLED,
            {"additive", "any"},
            "the order is tailnum, maker, seats, was tailnum, seats, maker",
        ),
    ],
)
def test_schemas_are_compared_by_the_declared_rule(
    new: Schema, passing: set[str], message: str
) -> None:
    rows = [("N1", *([None] * (len(new.names) - 1)))]
    checked = candidate(rows, ROWS, schema=new)
    verdicts = {rule: schema_compatible(rule)(checked) for rule in ("exact", "additive", "any")}
    assert {rule for rule, verdict in verdicts.items() if verdict.passed} == passing
    assert all(message in verdict.message for verdict in verdicts.values())


def test_the_first_version_is_compared_with_nothing() -> None:
    assert schema_compatible("exact")(candidate()).passed
    assert row_count_within(0.0)(candidate()).passed


@pytest.mark.parametrize(
    ("served", "new", "passed"),
    [(100, 80, True), (100, 79, False), (100, 120, True), (100, 121, False), (100, 0, False)],
)
def test_row_counts_may_change_by_a_fraction_of_what_is_served(
    served: int, new: int, passed: bool
) -> None:
    verdict = row_count_within(0.2)(candidate(planes(new), planes(served)))
    assert verdict.passed is passed
    if new == 79:
        assert (
            "79 rows, -21.0% of the 100 of version v000001-attempt1: at most 20.0% is allowed"
            in verdict.message
        )


def test_a_change_of_exactly_the_allowed_fraction_passes() -> None:
    assert row_count_within(0.29)(candidate(planes(71), planes(100))).passed, (
        "although 0.29 * 100 is less than 29"
    )


def test_small_and_empty_versions_are_no_measure() -> None:
    assert not row_count_within(0.2, minimum_rows=10)(candidate(planes(20), planes(10))).passed
    assert row_count_within(0.2, minimum_rows=11)(candidate(planes(20), planes(10))).passed
    assert row_count_within(0.2)(candidate(planes(20), [])).passed


def test_a_least_number_of_rows() -> None:
    assert min_rows(4)(candidate()).passed
    assert min_rows(5)(candidate()).message == "4 rows, expected 5 or more"


@pytest.mark.parametrize(
    ("answer", "passed"),
    [
        (True, True),
        (False, False),
        (np.bool_(True), True),
        (Finding(True, "fine"), True),
        (Finding(False), False),
    ],
)
def test_a_custom_rule_answers_with_a_truth_value_or_a_finding(answer: Any, passed: bool) -> None:
    assert custom("mine", lambda checked: answer)(candidate()).passed is passed


def test_a_custom_rule_can_read_the_candidate_by_key() -> None:
    known = custom(
        "has_n1",
        lambda checked: Finding(checked.view.get("N1") is not None, "N1 must be there", {"n": 1}),
    )
    assert known(candidate()).passed
    assert known(candidate(planes(3))) == Verdict(
        name="has_n1", passed=False, message="N1 must be there", facts={"n": 1}
    )


def test_facts_become_what_json_can_hold() -> None:
    odd = {
        "n": np.int64(5),
        "x": math.nan,
        "d": dt.date(2026, 1, 2),
        "s": {"a"},
        7: (b"x", np.float32(0.5)),
    }
    verdict = custom("odd", lambda checked: Finding(True, "", odd))(candidate())
    assert verdict.facts == {"n": 5, "x": "nan", "d": "2026-01-02", "s": ["a"], "7": ["eA==", 0.5]}
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict


# -- asked together


def broken(checked: Candidate) -> bool:
    raise ValueError("the list of\nmakers is empty")


def unreachable(checked: Candidate) -> bool:
    raise StoreUnavailableError("the list of makers can't be reached.", "Try again.")


def test_all_are_asked_and_one_that_raises_has_failed_with_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    verdicts = evaluate(
        [min_rows(99), custom("mine", broken), no_nulls("seats", severity="warn")], candidate()
    )
    assert [(verdict.name, verdict.passed, verdict.severity) for verdict in verdicts] == [
        ("min_rows", False, "error"),
        ("mine", False, "error"),
        ("no_nulls_seats", False, "warn"),
    ]
    assert verdicts[1].message == "ValueError: the list of\nmakers is empty"
    logged = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert [str(error) for error in logged] == ["the list of\nmakers is empty"], (
        "with its traceback"
    )


def raising(error: Exception) -> Callable[[Candidate], bool]:
    def rule(checked: Candidate) -> bool:
        raise error

    return rule


class JavaError(Py4JJavaError):  # type: ignore[misc]
    """A job that failed in a JVM that lives on."""

    __module__ = "py4j.protocol"

    def __init__(self) -> None:
        pass

    def __str__(self) -> str:
        return (
            "An error occurred while calling o1.count.\n: org.apache.spark.SparkException: job"
            " aborted\n\tat …"
        )


SYNTAX = ParseException("\n[PARSE_SYNTAX_ERROR] Syntax error at 'n'.\n\n== SQL ==\nn >\n")
MISTAKES = [
    ConfigurationError("the list of makers has no path.", "Set one."),
    SchemaMismatchError("dataset 'planes' has no column 'wings'.", "Check the name."),
    SYNTAX,
    AnalysisException("[UNRESOLVED_COLUMN] wings\n== SQL =="),
    NameError("name 'makers' is not defined"),
    AttributeError("'NoneType' object has no attribute 'rows'"),
    TypeError("unsupported operand"),
    ModuleNotFoundError("No module named 'makers'"),
    SyntaxError("invalid syntax"),
    ConnectionRefusedError(111, "Connection refused"),
]


@pytest.mark.parametrize("error", MISTAKES, ids=lambda error: type(error).__name__)
def test_a_mistake_in_a_validator_refuses_nothing_and_says_where_it_is(error: Exception) -> None:
    with pytest.raises(ValidatorError) as raised:
        evaluate([min_rows(99), custom("mine", raising(error))], candidate())
    reported = raised.value
    assert reported.__cause__ is error
    assert (reported.dataset, reported.validator) == ("planes", "mine")
    assert reported.problem.startswith(
        "dataset 'planes', version 'v2': validator 'mine' can't be evaluated: "
    )
    assert reported.problem.endswith(f"{type(error).__name__}: {first_message(error)}")
    assert "Correct the validator and advance again" in reported.next_step
    assert "adjunct dataset abandon planes v2 --reason" in reported.next_step


def first_message(error: Exception) -> str:
    return (
        error.problem if isinstance(error, AdjunctError) else str(error).strip().partition("\n")[0]
    )


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("no plane has 900 seats"),
        ValueError("'x' is no number"),
        DatasetError("dataset 'makers' was not found."),
        ZeroDivisionError("no plane at all"),
        KeyError("N1"),
        NumberFormatException("[CAST_INVALID_INPUT] The value 'x' can't be cast.\n== SQL =="),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_raised_about_the_data_refuses_the_version(error: Exception) -> None:
    (verdict,) = evaluate([custom("mine", raising(error))], candidate())
    assert not verdict.passed
    assert verdict.message == f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


@pytest.mark.parametrize(
    "error",
    [
        *MISTAKES,
        StoreUnavailableError("the list of makers can't be reached.", "Try again."),
        JavaError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_warning_that_can_t_be_evaluated_stops_nothing(error: Exception) -> None:
    (verdict,) = evaluate([custom("mine", raising(error), severity="warn")], candidate())
    assert (verdict.passed, verdict.severity) == (False, "warn")
    reported = str(error) if isinstance(error, AdjunctError) else first_message(error)
    if isinstance(error, JavaError):
        reported = "org.apache.spark.SparkException: job aborted"
    assert verdict.message == f"{type(error).__name__}: {reported}"


def test_what_may_work_later_says_nothing_of_the_version() -> None:
    with pytest.raises(StoreUnavailableError):
        evaluate([custom("mine", unreachable)], candidate())


def test_a_jvm_that_breaks_says_nothing_of_the_version() -> None:
    def failing(checked: Candidate) -> bool:
        raise Py4JNetworkError("Answer from Java side is empty")

    with pytest.raises(Py4JNetworkError):
        evaluate([custom("mine", failing)], candidate())


def test_an_answer_that_says_nothing_is_a_mistake_with_what_to_return() -> None:
    with pytest.raises(
        ValidatorError, match="'mine' returned None: expected True, False or a Finding"
    ):
        evaluate([custom("mine", lambda checked: None)], candidate())  # type: ignore[arg-type, return-value]


def test_a_validator_of_another_class_keeps_its_declared_name_and_severity() -> None:
    class Odd:
        name, severity = "odd", "warn"

        def __call__(self, checked: Candidate) -> Verdict:
            return Verdict(name="another", passed=False)

    odd = Odd()
    assert isinstance(odd, Validator)
    (verdict,) = evaluate([odd], candidate())
    assert (verdict.name, verdict.severity) == ("odd", "warn")

    class Silent(Odd):
        name, severity = "silent", "error"

        def __call__(self, checked: Candidate) -> Verdict:
            return None  # type: ignore[return-value]

    with pytest.raises(ValidatorError) as caught:
        evaluate([Silent()], candidate())
    assert (caught.value.dataset, caught.value.validator) == ("planes", "silent")


# -- declared


def test_validators_are_values() -> None:
    def rules() -> list[Check]:
        return [
            unique_keys(),
            no_nulls("a", "b"),
            row_count_within(0.1, 5),
            values_in("a", ["x"]),
            sql_check("s", "a"),
        ]

    mine, again = rules(), rules()
    assert mine == again
    assert pickle.loads(pickle.dumps(mine)) == mine
    assert custom("b", broken) == pickle.loads(pickle.dumps(custom("b", broken)))
    assert min_rows(1) != min_rows(2)
    assert hash(mine[0]) == hash(again[0])


def test_names_are_safe_for_dagster_and_stable() -> None:
    assert no_nulls("a b", "ü").name == "no_nulls_ax20b_xfc"
    assert no_nulls("customer.`e mail`").name == "no_nulls_customer_ex20mail"
    assert values_in("maker", ["x"]).name == "values_in_maker"
    for name in ("", "with space", "a-b", 5):
        with pytest.raises(ConfigurationError) as failure:
            sql_check(name, "true")  # type: ignore[arg-type]
        assert failure.value.argument == "name"


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: row_count_within(-0.1), "fraction"),
        (lambda: row_count_within(math.nan), "fraction"),
        (lambda: row_count_within(20), "fraction"),
        (lambda: row_count_within(0.1, -1), "minimum_rows"),
        (lambda: min_rows(True), "n"),
        (lambda: schema_compatible("strict"), "rule"),  # type: ignore[arg-type]
        (lambda: no_nulls(), "columns"),
        (lambda: values_in("a", "x"), "values"),
        (lambda: values_in("a", []), "values"),
        (lambda: sql_check("s", "  "), "sql"),
        (lambda: unique_keys(severity="info"), "severity"),  # type: ignore[arg-type]
        (lambda: custom("c", 5), "function"),  # type: ignore[arg-type]
    ],
)
def test_what_can_t_work_is_refused_where_it_is_written(make: Any, argument: str) -> None:
    with pytest.raises(ConfigurationError) as failure:
        make()
    assert failure.value.argument == argument


@pytest.mark.parametrize(
    "values", [{"x": 1}.keys(), {"x"}, frozenset("x"), np.array(["x"]), pd.Series(["x"]), iter("x")]
)
def test_allowed_values_may_be_any_collection(values: Any) -> None:
    assert values_in("a", values).arguments == ("a", ("x",))


def declared(*validators: Any) -> None:
    bounded_dataset(
        "planes", input="lake.planes", key="tailnum", broadcast=True, validators=validators
    )


def test_a_dataset_refuses_validators_that_cant_be_distinguished_or_are_none() -> None:
    declared(unique_keys(), min_rows(1))
    with pytest.raises(ConfigurationError) as caught:
        declared(min_rows(1), unique_keys(), min_rows(2))
    assert caught.value.argument == "validators"
    for wrong in (unique_keys, Check):
        with pytest.raises(ConfigurationError) as failure:
            declared(wrong)
        assert failure.value.argument == "validators"


def test_a_damaged_file_is_an_error_where_a_validator_is_called_by_hand() -> None:
    checked = candidate()
    generation = checked.view.sealed.generations[0]
    key = f"{generation.folder}/{generation.files[0].name}"
    checked.view.store.put(key, b"not parquet")
    with pytest.raises(ManifestMismatchError) as caught:
        no_null_keys()(checked)
    assert caught.value.key == key


# -- on Spark


@pytest.fixture
def on_spark(tmp_path: Path, spark: SparkSession) -> Candidate:
    served = [("N1", 100, "AIRBUS"), ("N9", 5, "BOEING")]
    return candidate(ROWS, served, store=LocalStore(tmp_path), spark=lambda: spark)


@pytest.mark.spark
def test_rules_in_sql_count_what_breaks_them_and_tell_some_keys(
    on_spark: Candidate, spark: SparkSession
) -> None:
    spark.range(3).createOrReplaceTempView("version")  # the user's own view of this name
    rules = [
        sql_check("seats_known", "seats > 9"),
        sql_check("seats_or_none", "seats IS NULL OR seats > 0"),
        sql_check("none_lost", "SELECT c.* FROM current c ANTI JOIN version v USING (tailnum);"),
        sql_check(
            "with_names",
            "WITH small AS (SELECT tailnum FROM version WHERE seats < 60) SELECT * FROM small",
        ),
        sql_check("numbers", "CAST(maker AS INT) > 0"),
        values_in("maker", ["AIRBUS", "BOEING"]),
        values_in("seats", [9, 50, 100]),
    ]
    verdicts = {verdict.name: verdict for verdict in evaluate(rules, on_spark)}
    assert {name for name, verdict in verdicts.items() if verdict.passed} == {
        "seats_or_none",
        "values_in_seats",
    }
    assert verdicts["seats_known"].facts["violations"] == 2, "a null is not known to be right"
    assert sorted(verdicts["seats_known"].facts["sample"]) == [["N2"], ["N4"]]
    assert verdicts["none_lost"].message == "broken by 1 row: tailnum 'N9'"
    assert sorted(verdicts["with_names"].facts["sample"]) == [["N3"], ["N4"]]
    assert verdicts["numbers"].message.startswith("NumberFormatException: [CAST_INVALID_INPUT]")
    assert verdicts["values_in_maker"].message == "other values of 'maker' in 1 row: 'CESSNA' (1)"
    with_null = {
        verdict.message
        for verdict in evaluate([values_in("maker", ["AIRBUS", "BOEING", None])], on_spark)
    }
    assert with_null == {verdicts["values_in_maker"].message}
    assert values_in("maker", [None])(on_spark).facts["violations"] == 3
    hidden = {
        verdict.name: verdict.message
        for verdict in evaluate([rules[2], *rules[4:6]], on_spark, ["maker", "tailnum"])
    }
    assert hidden == {
        "numbers": (
            "NumberFormatException: [CAST_INVALID_INPUT]: values of sensitive columns are hidden"
        ),
        "none_lost": "broken by 1 row: values of sensitive columns are hidden",
        "values_in_maker": (
            "other values of 'maker' in 1 row: values of sensitive columns are hidden"
        ),
    }
    both = sql_check("both", "SELECT * FROM version v JOIN current c ON v.tailnum = c.tailnum")
    assert both(on_spark).facts["sample_of"] == "rows", "where two columns have the name of the key"
    assert spark.table("version").count() == 3
    rows = spark.sql("SHOW TABLES").collect()
    assert [row.tableName for row in rows if row.isTemporary] == ["version"]
    spark.catalog.dropTempView("version")
    alone = Candidate(on_spark.view, None, on_spark.spark)
    assert sql_check("none_lost", "SELECT c.* FROM current c ANTI JOIN version v USING (tailnum)")(
        alone
    ).passed


@pytest.mark.spark
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            sql_check("wrong", "SELECT nothing FROM version"),
            "AnalysisException: [UNRESOLVED_COLUMN",
        ),
        (sql_check("wrong", "wings > 2"), "AnalysisException: [UNRESOLVED_COLUMN"),
        (sql_check("wrong", "seats are plenty"), "ParseException: [PARSE_SYNTAX_ERROR]"),
        (values_in("wings", [2]), "SchemaMismatchError: dataset 'planes' has no column 'wings'"),
        (
            values_in("seats", ["x"]),
            "can't be compared with the column's type, int: [CAST_INVALID_INPUT]",
        ),
        (
            values_in("maker", [5]),
            "can't be compared with the column's type, string: [CAST_INVALID_INPUT]",
        ),
    ],
)
def test_a_rule_that_does_not_fit_the_columns_refuses_nothing(
    on_spark: Candidate, wrong: Check, message: str
) -> None:
    with pytest.raises(ValidatorError) as raised:
        evaluate([wrong], on_spark)
    assert message in raised.value.problem
    assert "AIRBUS" not in raised.value.problem
    (warned,) = evaluate([replace(wrong, severity="warn")], on_spark)
    assert not warned.passed
    assert message in warned.message


@pytest.mark.parametrize(
    "before", ["", "(", "-- which planes\n", "/* which\nplanes */ ", "--\n\t(/**/\n"]
)
def test_a_select_may_begin_with_comments(before: str) -> None:
    rules = fleet(
        sql_check("a", f"{before}SELECT * FROM version"), sql_check("b", f"{before}selected > 0")
    )
    assert [is_select for _, _, is_select in iterate_sql_rules(rules)] == [True, False]


# -- in a cycle


@pytest.fixture
def plain(world: World) -> World:
    """A lake with a stream of planes, on which versions are built without Spark."""
    world.spark = IN_PROCESS
    world.stream("planes", SCHEMA, ["tailnum"], 1)
    return world


def fleet(*validators: Validator) -> AdjunctDataset:
    return bounded_dataset(
        "planes", input="lake.planes", key="tailnum", partitions=2, validators=validators
    )


def test_a_mistake_costs_no_version_and_no_build(plain: World) -> None:
    lake = faulty(plain)
    plain.send("planes", ROWS, version="v1")
    assert plain.advance(fleet(), lake=lake).action == "sealed"
    plain.send("planes", planes(5), version="v2")
    plain.send("planes", planes(6), version="v3")
    store = StoredVersions(plain.lake, fleet())
    before = store.require_manifest()
    wrong = [no_nulls("wings"), min_rows(1)]
    for _ in range(2):
        with pytest.raises(ValidatorError, match="version 'v2'") as caught:
            plain.advance(fleet(*wrong), lake=lake)
        assert (caught.value.dataset, caught.value.validator) == ("planes", "no_nulls_wings")
        assert store.require_manifest() == before
    report = plain.advance(fleet(no_nulls("tailnum"), min_rows(1)), lake=lake)
    assert (report.action, len(report.sealed), report.rejected, report.rows) == ("sealed", 2, (), 6)
    assert builds(lake) == 3, "each was built once"


@pytest.mark.parametrize("rule", [values_in("tailnum", ["N1"]), sql_check("known", "seats > 0")])
def test_a_rule_that_needs_spark_rejects_nothing_without_it(plain: World, rule: Validator) -> None:
    plain.send("planes", ROWS, version="v1")
    with pytest.raises(ConfigurationError) as caught:
        plain.advance(fleet(rule))
    assert caught.value.argument == "spark"
    assert plain.advance(fleet()).action == "sealed", "it was not rejected"


def test_the_first_version_that_meets_a_mistake_can_be_abandoned_as_the_error_says(
    plain: World,
) -> None:
    plain.send("planes", ROWS, version="v1")
    with pytest.raises(ValidatorError):
        plain.advance(fleet(custom("mine", raising(NameError("name 'x' is not defined")))))
    manifest = StoredVersions(plain.lake, fleet()).require_manifest()
    assert (manifest.versions, manifest.delivered) == ((), ())
    abandon_version(plain.lake, "planes", "v1", reason="a wrong rule", by="ada")
    plain.send("planes", planes(3), version="v2")
    assert plain.advance(fleet(min_rows(1))).rows == 3


def two_versions(world: World) -> None:
    for version, rows in (("v1", ROWS), ("v2", planes(3))):
        world.send("planes", rows, version=version)
        world.advance(fleet())


def take_back_and_discard(world: World) -> None:
    operator = open_dataset(world.lake, "planes", lease=False)
    operator.rollback("v1", reason="v2 is wrong", by="ada")
    operator.revoke("v2", reason="wrong", by="ada")
    discard(world.lake, "planes", DiscardPolicy(keep=1, grace=dt.timedelta(0)), by="ada")


def test_the_version_that_is_compared_with_is_held_meanwhile(plain: World) -> None:
    two_versions(plain)

    def compare(candidate: Candidate) -> bool:
        assert candidate.current is not None
        take_back_and_discard(plain)
        assert [
            lease.holder for lease in list_live_leases(plain.lake, "planes", plain.lake.now())
        ] == ["validation by test"]
        return candidate.current.get("N0001") is not None

    plain.send("planes", planes(4), version="v3")
    report = plain.advance(fleet(custom("compared", compare)))
    assert (report.action, report.rejected, report.rows) == ("sealed", (), 4)
    assert list_live_leases(plain.lake, "planes", plain.lake.now()) == []


def test_a_discarded_version_to_compare_with_is_a_conflict_and_costs_no_build(plain: World) -> None:
    two_versions(plain)
    lake = faulty(plain, Fault("upload", 1, "meanwhile", lambda: take_back_and_discard(plain)))
    plain.send("planes", planes(4), version="v3")
    with pytest.raises(CommitConflictError) as failure:
        plain.advance(fleet(min_rows(1)), lake=lake)
    assert failure.value.dataset == "planes"
    assert plain.advance(fleet(min_rows(1)), lake=lake).rows == 4
    assert builds(lake) == 1


def test_a_mistake_in_one_member_of_a_set_publishes_none_and_rejects_none(plain: World) -> None:
    plain.stream("makers", SCHEMA, ["tailnum"], 1)
    for stream in ("planes", "makers"):
        plain.send(stream, ROWS, version="v1")

    def members(*rules: Validator) -> tuple[AdjunctDataset, ...]:
        makers = bounded_dataset(
            "makers", input="lake.makers", key="tailnum", partitions=2, validators=rules
        )
        return version_set("fleet", fleet(min_rows(1)), makers)

    def advance(specs: tuple[AdjunctDataset, ...]) -> list[str]:
        return [
            r.action
            for r in advance_version_set(
                specs, lake=plain.lake, systems=plain.systems, spark=plain.spark, by="test"
            )
        ]

    with pytest.raises(ValidatorError) as caught:
        advance(members(no_nulls("wings")))
    assert (caught.value.dataset, caught.value.validator) == ("makers", "no_nulls_wings")
    assert advance(members()) == ["sealed", "sealed"]


def test_a_warning_with_a_mistake_is_on_record_with_the_version_that_it_let_pass(
    plain: World,
) -> None:
    plain.send("planes", ROWS, version="v1")
    report = plain.advance(fleet(no_nulls("wings", severity="warn")))
    assert report.action == "sealed"
    (verdict,) = report.verdicts
    assert not verdict.passed
    assert "has no column 'wings'" in verdict.message


def test_values_of_sensitive_columns_are_in_no_verdict() -> None:
    def tells(of: str) -> Callable[[Candidate], Finding]:
        facts = {"violations": 1, "sample_of": of, "sample": [["ann@example.com"]]}
        return lambda candidate: Finding(
            False, "'ann@example.com': 1 rows break it", facts, "1 rows break: it"
        )

    rules = [
        custom("known", tells("email")),
        custom("whole", tells("rows")),
        custom("other", tells("id")),
    ]
    nothing = object.__new__(Candidate)
    known, whole, other = evaluate(rules, nothing, sensitive=["Email"])
    for verdict in (known, whole):
        assert "ann@" not in verdict.model_dump_json()
        assert verdict.message == "1 rows break: it: values of sensitive columns are hidden"
        assert verdict.facts["violations"] == 1
    assert "ann@" in other.message
    assert "ann@" in evaluate(rules, nothing)[0].message
    for verdict in (known, other):
        assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict, (
            "it is what is read back"
        )


@pytest.mark.spark
def test_allowed_values_are_those_of_a_path_and_hidden_with_its_column(
    tmp_path: Path, spark: SparkSession
) -> None:
    rows = [(number, owner, "m", None) for number, owner in enumerate(OWNERS)]
    view = view_of(LocalStore(tmp_path), rows, schema=NESTED, key=["id"])
    checked = Candidate(view, None, lambda: spark)
    rules = [values_in("owner.home.city", ["Oslo"]), values_in("`owner`.mail", ["x"])]
    passed, failed = evaluate(rules, checked)
    assert passed.passed
    assert failed.facts["sample_of"] == "`owner`.mail"
    assert failed.facts["sample"] == [["y", 1]]
    (hidden,) = evaluate(rules[1:], checked, sensitive=["Owner"])
    assert hidden.message == (
        "other values of '`owner`.mail' in 1 row: values of sensitive columns are hidden"
    )
    assert "sample" not in hidden.facts


def test_a_rule_without_a_message_free_of_values_is_silent_on_sensitive_columns() -> None:
    facts = {"sample_of": "email", "sample": [["ann@example.com"]]}
    rule = custom("known", lambda candidate: Finding(False, "ann@example.com: is not known", facts))
    nothing = object.__new__(Candidate)
    (verdict,) = evaluate([rule], nothing, sensitive=["email"])
    assert (verdict.message, verdict.facts) == (
        "values of sensitive columns are hidden",
        {"sample_of": "email"},
    )
