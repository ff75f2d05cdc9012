"""Validators: rules that a version must satisfy before anybody can read it.

A validator is a named function of a Candidate. The ones here are frozen values, comparable and
picklable, and can be called directly: `min_rows(1000)(candidate)` returns a Verdict. Validators
with severity "warn" report and never reject a version.

An error that a validator raises about the data rejects the version. A mistake in the validator
fails the run instead, and the version waits, because a rejected version is not validated again.

Validators that check each row by itself (`Check.checks_rows`) also work for unbounded datasets, as
conditions of the rows of each advance: see assets/unbounded/row_rules.py.
"""

from __future__ import annotations

import inspect
import logging
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from numbers import Number
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import NonNegativeInt

from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    BoundedDataset,
    UnboundedDataset,
)
from dagster_adjunct.assets.declaration.policies import VALIDATOR_NAME, Severity, Validator
from dagster_adjunct.assets.reading.stored_file import count_nulls, list_stored_files
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.version import Verdict
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.reports import to_json_value
from dagster_adjunct.resources.schemas.paths import (
    Path,
    column_of,
    find_path,
    flat_name,
    require_value,
    simple_value_advice,
    split_path,
)
from dagster_adjunct.resources.schemas.schema import Schema, quote_name, quote_text
from dagster_adjunct.resources.schemas.types import is_nested
from dagster_adjunct.resources.spark.tasks import first_message_line
from dagster_adjunct.resources.sql.checking import (
    check_expression,
    check_select,
    needs_spark_analysis,
    nondeterministic_parts,
)
from dagster_adjunct.resources.sql.expression import (
    did_you_mean,
    multi_record_functions,
    other_records_construct,
    parse_expression,
)
from dagster_adjunct.resources.user_code import check_plain_function
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


Rule = Literal["exact", "additive", "any"]
SAMPLE_SIZE = 5
_SELECT = re.compile(r"(?:[\s(]|--[^\n]*\n|/\*.*?\*/)*(select|with)\b", re.IGNORECASE | re.DOTALL)
VERSION = "version"
CURRENT = "current"
"""The tables that a validator's SELECT reads: the candidate, and the served version."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: whether it passed, a message, and the counts behind it.

    `without_values` is the message without any values, for sensitive columns.
    """

    passed: bool
    message: str = ""
    facts: Mapping[str, Any] | None = None
    without_values: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A version that is built and not published, and the served one to compare it with (None before
    the first).

    `view` reads it whole or by key; `view.sealed.counters` has `read`, `superseded` (records
    replaced by a later one of the same key) and `deleted`. `spark` starts the session if a
    validator needs one.
    """

    view: VersionReader
    current: VersionReader | None
    spark: Callable[[], SparkSession]


_WHOLE = frozenset({"tinyint", "smallint", "int", "bigint"})
_FLOATS = frozenset({"float", "double"})
_TRUTHS = frozenset({"t", "true", "y", "yes", "1", "f", "false", "n", "no", "0"})
_NO_DIGITS = ("nan", "inf", "infinity")


def find_impossible_values(values: Iterable[object], kind: str) -> list[object]:
    """Return the values that a column of this type can't hold, such as 'a' and True in an int
    column.

    What a text column can be compared with depends on its rows, so no value is impossible there.
    """
    return [value for value in values if not _can_hold(value, kind)]


def _can_hold(value: object, kind: str) -> bool:
    """Whether a column of this type may hold the value."""
    if isinstance(value, str):
        return _can_read(value.strip().lower(), kind)
    if isinstance(value, bool):
        return kind in ("boolean", "string")
    if isinstance(value, Number | Decimal):
        return kind not in ("boolean", "date", "timestamp", "binary")
    if isinstance(value, date):  # or a datetime
        return kind in ("date", "timestamp", "string")
    return True


def _can_read(text: str, kind: str) -> bool:
    """Whether Spark may read this text, in lower case, as a value of this type. Of numbers, dates
    and times it is only checked that they have a digit.
    """
    if kind == "boolean":
        return text in _TRUTHS
    if kind in ("string", "binary"):
        return True
    has_fractions = kind in _FLOATS or kind.startswith("decimal")
    if has_fractions and text.lstrip("+-") in _NO_DIGITS:
        return True
    return any(map(str.isdigit, text))


_MESSAGE_LENGTH = 2_000
# Raised by an unknown column or a mistake in SQL or Python. Spark's AnalysisException counts as
# one, too.
_MISTAKES = (
    errors.ConfigurationError,
    errors.SchemaMismatchError,
    NameError,
    AttributeError,
    TypeError,
    ImportError,
    SyntaxError,
    OSError,  # a file or service used by the validator: not an error of the version
)
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Check:
    """A validator: `function(candidate, *arguments)`, which returns a Finding, or only True or
    False.

    `name` is the asset check's name in Dagster: letters, digits and underscores.
    """

    name: str
    function: Callable[..., Finding | bool]
    arguments: tuple[Any, ...] = ()
    severity: Severity = "error"

    def __post_init__(self) -> None:
        if not VALIDATOR_NAME.fullmatch(self.name):
            raise argument_error(
                f"a validator has the name {self.name!r}",
                "letters, digits and underscores, as Dagster's asset checks have them",
                argument="name",
            )
        given = ("candidate", *map(repr, self.arguments))
        check_plain_function(f"validator {self.name!r}", self.function, "function", *given)

    @property
    def checks_rows(self) -> bool:
        """Whether each row meets the rule by itself or does not, whatever the others are."""
        if self.function is check_sql:
            return _SELECT.match(self.arguments[0]) is None
        return self.function in (check_no_nulls, check_values_in)

    def row_condition(self, dataset: str, columns: Schema) -> str:
        """Return a rule that checks rows as a condition, in Spark SQL, of rows with these columns.

        Raises PlanningError for a column that is not among them, or an impossible value.
        """
        types: dict[str, str | None] = dict(columns.types)
        _check_rule(self, dataset, types, or_select="")
        if self.function is check_sql:
            _check_depends_on_row(self, dataset, types)
            return str(self.arguments[0])
        what = f"dataset {dataset!r}"
        if self.function is check_no_nulls:
            values = [_find_value(columns, name, what).expression for name in self.arguments]
            return " AND ".join(f"{value} IS NOT NULL" for value in values)
        name, allowed = self.arguments
        value = _find_value(columns, name, what)
        _check_literals(self, dataset, value, allowed)
        literals = ", ".join(_sql_literal(each) for each in allowed if each is not None)
        if not literals:  # only null is allowed
            return f"{value.expression} IS NULL"
        return f"{value.expression} IS NULL OR {value.expression} IN ({literals})"

    def __call__(self, candidate: Candidate) -> Verdict:
        """Run the check and return its verdict. Raises what the function raises."""
        answer: object = self.function(candidate, *self.arguments)
        # numpy and pandas answer with a truth value of their own.
        if type(answer).__name__ in ("bool", "bool_"):
            message = "it holds" if answer else "it does not hold"
            answer = Finding(bool(answer), message)
        # A Verdict is that of another validator that the function called.
        if not isinstance(answer, Finding | Verdict):
            raise argument_error(
                f"validator {self.name!r} returned {answer!r}",
                "True, False or a Finding",
                argument="function",
            )
        return Verdict(
            name=self.name,
            passed=answer.passed,
            severity=self.severity,
            message=answer.message[:_MESSAGE_LENGTH],
            facts={str(key): to_json_value(value) for key, value in (answer.facts or {}).items()},
            without_values=answer.without_values[:_MESSAGE_LENGTH],
        )


def validator_arguments(validator: Validator) -> dict[str, Any]:
    """Return a validator's arguments by name: {"fraction": 0.2, "minimum_rows": 0}."""
    if not isinstance(validator, Check) or not validator.arguments:
        return {}
    try:
        bound = inspect.signature(validator.function).bind(None, *validator.arguments)
    except (TypeError, ValueError):  # a function without a readable signature
        return {"arguments": to_json_value(validator.arguments)}
    return {name: to_json_value(value) for name, value in list(bound.arguments.items())[1:]}


def describe_rule(validator: Validator) -> str:
    """Return a validator's rule in one line: "row_count_within(fraction=0.2, minimum_rows=0)"."""
    if not isinstance(validator, Check):
        return type(validator).__name__
    name = getattr(validator.function, "__name__", type(validator.function).__name__)
    if getattr(validator.function, "__module__", "") == __name__:
        name = name.removeprefix("check_")
    given = [f"{argument}={value!r}" for argument, value in validator_arguments(validator).items()]
    return f"{name}({', '.join(given)})"


def check_unique_keys(candidate: Candidate) -> Finding:
    """Return whether every key was delivered once."""
    counters = candidate.view.sealed.counters
    superseded = counters.get("superseded", 0)
    read = counters.get("read", 0)
    facts = {"superseded": superseded, "read": read}
    if superseded:
        key = ", ".join(candidate.view.sealed.key)
        return Finding(
            False,
            f"{superseded:,} of {read:,} records have a key ({key}) that a later record has too",
            facts,
        )
    return Finding(True, f"{read:,} records, each with a key of its own", facts)


def check_no_null_keys(candidate: Candidate) -> Finding:
    """Return whether no key column has nulls."""
    return check_no_nulls(candidate, *candidate.view.sealed.key)


def check_no_nulls(candidate: Candidate, *columns: str) -> Finding:
    """Return whether no entry has a null in these columns, or at these paths."""
    view = candidate.view
    names = view.sealed.layout.names
    what = f"dataset {view.dataset!r}"
    steps = [names.of_steps(_find_value(view.schema, name, what).steps) for name in columns]
    counts = count_nulls(list_stored_files(view.store, view.dataset, view.sealed), steps)
    nulls = dict(zip(columns, counts, strict=True))
    facts = {"nulls": nulls, "rows": view.rows}
    broken = []
    for column, count in nulls.items():
        if count:
            broken.append(f"{count:,} of {view.rows:,} rows have no {column!r}")
    if broken:
        return Finding(False, "; ".join(broken), facts)
    return Finding(True, f"{view.rows:,} rows have {', '.join(map(repr, columns))}", facts)


def _find_value(schema: Schema, name: str, what: str) -> Path:
    """Return the value that the name of a column, or a path, means in rows with these columns.
    Raises SchemaMismatchError if there is none.
    """
    column = schema.field(column_of(name, schema.names), what)
    if column.name == name:
        return Path((name,), column.type)
    types = {column.name: column.type}
    return find_path(name, types) or require_value(name, types, what)


def check_schema_compatible(candidate: Candidate, rule: Rule) -> Finding:
    """Return whether the columns fit those of the served version, as the rule requires."""
    if candidate.current is None:
        return Finding(True, "the first version")
    served = candidate.current.version
    old = candidate.current.schema
    new = candidate.view.schema
    changes = _compare_columns(old, new)
    facts: dict[str, Any] = {**changes, "served": served}
    parts = [f"{what} {', '.join(names)}" for what, names in changes.items() if names]
    if not parts and old.names != new.names:
        parts = [f"the order is {', '.join(new.names)}, was {', '.join(old.names)}"]
    if not parts:
        return Finding(True, f"the same {len(new.names)} columns as version {served}", facts)
    if rule == "additive":
        passed = not changes["removed"] and not changes["retyped"]
    else:
        passed = rule == "any"
    return Finding(passed, f"against version {served}: {'; '.join(parts)}", facts)


def _compare_columns(old: Schema, new: Schema) -> dict[str, list[str]]:
    """Return the columns that were removed, got another type, or were added."""
    removed = []
    retyped = []
    for field in old.fields:
        if field.name not in new:
            removed.append(field.name)
        elif new.field(field.name).type != field.type:
            retyped.append(f"{field.name} ({field.type} to {new.field(field.name).type})")
    added = [f"{field.name} ({field.type})" for field in new.fields if field.name not in old]
    return {"removed": removed, "retyped": retyped, "added": added}


def check_row_count_within(candidate: Candidate, fraction: float, minimum_rows: int) -> Finding:
    """Return whether the number of rows is near that of the served version, and true if there is
    none, or one that is empty or has fewer than `minimum_rows`.
    """
    rows = candidate.view.rows or 0
    if candidate.current is None:
        return Finding(True, f"the first version, with {_count_rows(rows)}", {"rows": rows})
    served = candidate.current.rows or 0
    facts: dict[str, Any] = {
        "rows": rows,
        "served_rows": served,
        "served": candidate.current.version,
    }
    if not served or served < minimum_rows:
        return Finding(
            True,
            f"{_count_rows(rows)}; version {candidate.current.version} has only {served:,}",
            facts,
        )
    change = (rows - served) / served
    facts["change"] = round(change, 6)
    message = (
        f"{_count_rows(rows)}, {change:+.1%} of the {served:,} of version"
        f" {candidate.current.version}"
    )
    passed = abs(change) <= fraction  # exact at the limit, unlike fraction * served
    if not passed:
        message += f": at most {fraction:.1%} is allowed"
    return Finding(passed, message, facts)


def check_min_rows(candidate: Candidate, n: int) -> Finding:
    """Return whether there are at least `n` rows."""
    rows = candidate.view.rows or 0
    message = _count_rows(rows)
    if rows < n:
        message += f", expected {n:,} or more"
    return Finding(rows >= n, message, {"rows": rows})


def check_values_in(candidate: Candidate, column: str, values: tuple[Any, ...]) -> Finding:
    """Return whether every value of the column, or at the path, is null or one of `values`."""
    from pyspark.errors import DateTimeException, NumberFormatException

    path = _find_value(candidate.view.schema, column, f"dataset {candidate.view.dataset!r}")
    entries = candidate.view.frame(candidate.spark())  # before columns, which need a session
    found = F.col(path.expression)
    # In SQL, no value is outside of a list with a null.
    allowed = found.isin(*[value for value in values if value is not None])
    others = entries.where(found.isNotNull() & ~allowed)
    try:
        counted = (
            others.groupBy(found.alias("value")).count().orderBy(F.desc("count"), "value").collect()
        )
    except (NumberFormatException, DateTimeException) as error:
        # Spark only casts to compare with values of another type, so the data is not the cause.
        # Its message may have a value of the column, which may be sensitive.
        raise errors.ConfigurationError(
            f"values_in({column!r}) has values that can't be compared with the column's type,"
            f" {path.type}: {_condition(error)}.",
            "List values of that type.",
            argument="values",
        ) from None
    if not counted:
        return Finding(
            True,
            f"{column!r} holds nothing but the {len(values):,} allowed values",
            {"violations": 0},
        )
    violations = sum(row["count"] for row in counted)
    listed = []
    sample = []
    for value, count in counted[:SAMPLE_SIZE]:
        listed.append(f"{value!r} ({count:,})")
        sample.append([to_json_value(value), count])
    message = ", ".join(listed)
    if len(counted) > SAMPLE_SIZE:
        message += f" and {len(counted) - SAMPLE_SIZE:,} more"
    facts = {
        "violations": violations,
        "values": len(counted),
        "sample_of": column,
        "sample": sample,
    }
    counted_only = f"other values of {column!r} in {_count_rows(violations)}"
    return Finding(False, f"{counted_only}: {message}", facts, counted_only)


def check_sql(candidate: Candidate, sql: str) -> Finding:
    """Return whether no row breaks a rule in Spark SQL, a condition or a SELECT."""
    broken = _broken_rows(candidate, sql)
    violations = broken.count()
    if not violations:
        return Finding(True, "no row breaks it", {"violations": 0})
    # A SELECT may not return the key columns, or those of both sides of a join: then the sample is
    # of its own rows.
    key = [name for name in candidate.view.sealed.key if broken.columns.count(name) == 1]
    selected = [*map(quote_name, key)] or ["*"]
    sample = []
    listed = []
    for row in broken.select(*selected).limit(SAMPLE_SIZE).collect():
        values = [*map(to_json_value, row)]
        sample.append(values)
        if len(values) == 1:
            listed.append(repr(values[0]))
        else:
            listed.append(repr(tuple(values)))
    what = ", ".join(key) or "rows"
    message = f"{what} {', '.join(listed)}"
    if violations > len(sample):
        message += " …"
    facts = {"violations": violations, "sample_of": what, "sample": sample}
    counted_only = f"broken by {_count_rows(violations)}"
    return Finding(False, f"{counted_only}: {message}", facts, counted_only)


def _count_rows(count: int) -> str:
    """Return a number of rows in words, for messages."""
    if count == 1:
        return "1 row"
    return f"{count:,} rows"


def _broken_rows(candidate: Candidate, sql: str) -> DataFrame:
    """Return the rows that break a rule in Spark SQL: those for which a condition is false or
    null, or the result of a SELECT.
    """
    spark = candidate.spark()
    version = candidate.view.frame(spark)
    if not _SELECT.match(sql):
        return version.where(~F.coalesce(F.expr(sql), F.lit(False)))
    if candidate.current is None:  # before the first version, the table is empty
        current = version.limit(0)
    else:
        current = candidate.current.frame(spark)
    tables_read = {VERSION: version, CURRENT: current}
    mark = uuid.uuid4().hex
    try:
        for name, frame in tables_read.items():
            frame.createOrReplaceTempView(f"{name}_{mark}")
        # As common table expressions, so that views of the user's session neither conflict nor are
        # overwritten.
        tables = ", ".join(f"{name} AS (SELECT * FROM {name}_{mark})" for name in tables_read)
        return spark.sql(f"WITH {tables} SELECT * FROM (\n{sql}\n)")
    finally:
        for name in tables_read:
            spark.catalog.dropTempView(f"{name}_{mark}")


# -- declared on a dataset: validators=[unique_keys(), row_count_within(0.2), …]


@validated
def unique_keys(*, severity: Severity = "error") -> Check:
    """Require that every key was delivered once: no record was replaced by a later one of the
    same key.
    """
    return Check("unique_keys", check_unique_keys, severity=severity)


@validated
def no_null_keys(*, severity: Severity = "error") -> Check:
    """Require that no key column has nulls, by the counts in the files' footers.

    Null keys already fail the build; this confirms it for the stored files.
    """
    return Check("no_null_keys", check_no_null_keys, severity=severity)


@validated
def no_nulls(*columns: str, severity: Severity = "error") -> Check:
    """Require that no entry has a null in these columns, or at these paths, by the counts in the
    files' footers.
    """
    if not columns:
        raise argument_error(
            "no_nulls() names no columns", "those that must have values", argument="columns"
        )
    return Check(f"no_nulls_{_name_part(columns)}", check_no_nulls, tuple(columns), severity)


@validated
def schema_compatible(rule: Rule = "additive", *, severity: Severity = "error") -> Check:
    """Require that the columns fit those of the served version; the first version always passes.

    "exact": the same columns with the same types in the same order. "additive": columns may be
    added, but not removed or changed in type. "any": every difference passes and is reported.
    """
    return Check("schema_compatible", check_schema_compatible, (rule,), severity)


@validated
def row_count_within(
    fraction: float, minimum_rows: NonNegativeInt = 0, *, severity: Severity = "error"
) -> Check:
    """Require that the number of rows differs from the served version's by at most this fraction
    (0.2 is 20 %).

    The first version passes, and so does one after a version with fewer than `minimum_rows` rows
    (or none).
    """
    if not 0 <= fraction <= 1:
        raise argument_error(
            f"row_count_within has the fraction {fraction!r}",
            "0 to 1",
            "Pass a fraction, not a percentage: 0.2 is 20 %. For a wider limit, write your own"
            " rule: custom(NAME, …).",
            argument="fraction",
        )
    return Check(
        "row_count_within", check_row_count_within, (float(fraction), minimum_rows), severity
    )


@validated
def min_rows(n: NonNegativeInt, *, severity: Severity = "error") -> Check:
    """Require at least `n` rows."""
    return Check("min_rows", check_min_rows, (n,), severity)


@validated
def values_in(column: str, values: Iterable[Any], *, severity: Severity = "error") -> Check:
    """Require that every value of the column, or at the path, is one of `values`; nulls pass (see
    `no_nulls`). Runs on Spark.
    """
    allowed = tuple(values)
    if not allowed:
        raise argument_error(
            f"values_in({column!r}) has no values", "at least one", argument="values"
        )
    return Check(f"values_in_{_name_part((column,))}", check_values_in, (column, allowed), severity)


@validated
def sql_check(name: str, sql: str, *, severity: Severity = "error") -> Check:
    """Define a rule in Spark SQL: a condition that each row must meet, or a SELECT of the rows that
    break the rule.

    A row for which the condition is null breaks it. In a SELECT, the candidate is the table
    `version`, and the served version is `current` (empty before the first): `sql_check("known",
    "SELECT v.* FROM version v ANTI JOIN current c USING (tailnum)")`. The verdict has the number of
    broken rows and the keys of some.
    """
    if not sql.strip():
        raise errors.ConfigurationError(
            f"sql_check({name!r}) has no SQL.", "Write a condition or a SELECT.", argument="sql"
        )
    return Check(name, check_sql, (sql.strip().rstrip(";"),), severity)


@validated
def custom(
    name: str, function: Callable[[Candidate], Finding | bool], *, severity: Severity = "error"
) -> Check:
    """Define a rule in Python: the function returns True or False, or a Finding with more detail.

    An error about the data (an AssertionError, a ValueError) rejects the version, with the error's
    text. A mistake in the code (a NameError, an AttributeError, a TypeError) and a TransientError
    end the run instead, and the next run tries again. With a module-level function (not a lambda)
    the validator is picklable.
    """
    return Check(name, function, severity=severity)


# -- evaluated between build and seal


@validated
def evaluate(
    validators: Sequence[Validator], candidate: Candidate, sensitive: Collection[str] = ()
) -> tuple[Verdict, ...]:
    """Run all validators on the candidate and return their verdicts, without samples of `sensitive`
    columns.

    A validator that raises gets a failed verdict with the error's text. Raises ValidatorError for a
    mistake in a validator, and ConfigurationError if one needs Spark and there is none;
    TransientError, MemoryError and py4j errors propagate unchanged. With severity "warn" only that
    ConfigurationError, MemoryError and a broken JVM propagate, and everything else is a failed
    verdict.
    """
    hides = bool(sensitive)
    verdicts = []
    for validator in validators:
        verdict = _evaluate_one(validator, candidate, hides_values=hides)
        verdicts.append(_hide_sensitive_values(verdict, sensitive))
    return tuple(verdicts)


def _hide_sensitive_values(verdict: Verdict, sensitive: Collection[str]) -> Verdict:
    """Return the verdict without values of sensitive columns; messages of rules in Python are
    unchanged.
    """
    result = verdict.model_copy(update={"without_values": ""})
    # The names of columns, a path, or "rows" for all columns.
    sampled = verdict.facts.get("sample_of")
    has_sample = sampled is not None and "sample" in verdict.facts
    if not sensitive or not has_sample:
        return result
    hidden = {*map(str.lower, sensitive)}
    columns = set()
    for name in map(str.strip, str(sampled).lower().split(",")):
        columns |= {name, *split_path(name)[:1]}
    if sampled != "rows" and hidden.isdisjoint(columns):
        return result
    facts = {name: value for name, value in verdict.facts.items() if name != "sample"}
    parts = (verdict.without_values, "values of sensitive columns are hidden")
    message = ": ".join(filter(None, parts))
    return result.model_copy(update={"facts": facts, "message": message})


def _evaluate_one(validator: Validator, candidate: Candidate, *, hides_values: bool) -> Verdict:
    """Return the verdict of one validator; raises what `evaluate` raises."""
    warns = validator.severity == "warn"
    try:
        verdict: object = validator(candidate)
        if not isinstance(verdict, Verdict):
            raise errors.ConfigurationError(
                f"validator {validator.name!r} returned {verdict!r}: expected a Verdict.",
                "Return a Verdict from its __call__, or use custom(NAME, function).",
                argument="validators",
            )
    except Exception as error:  # user code: any error becomes the verdict, with its text
        if isinstance(error, errors.ConfigurationError) and error.argument == "spark":
            of = _describe_validator(validator, candidate)
            raise error.reworded(f"{of}: {error.problem}", error.next_step) from error
        if _propagates(error, warns):
            raise
        is_mistake = isinstance(error, _MISTAKES) or _is_analysis_error(error)
        if is_mistake and not warns:
            raise _mistake_error(validator, candidate, error) from error
        return _failed_verdict(validator, candidate, error, hides_values)
    return verdict.model_copy(update={"name": validator.name, "severity": validator.severity})


def _failed_verdict(
    validator: Validator, candidate: Candidate, error: Exception, hides_values: bool
) -> Verdict:
    """Return the verdict of a validator that raised this error; Spark's may show values."""
    text = str(error)
    logged: Exception | None = error
    if _package(error) in ("pyspark", "py4j"):
        text = first_message_line(error)  # Spark appends its whole plan
        # Spark names the value that it can't convert.
        if hides_values and not _is_analysis_error(error):
            text = f"{_condition(error)}: values of sensitive columns are hidden"
            logged = None
    version = candidate.view.version
    _logger.error("validator %s raised on version %s", validator.name, version, exc_info=logged)
    message = f"{type(error).__name__}: {text}"[:_MESSAGE_LENGTH]
    return Verdict(name=validator.name, passed=False, severity=validator.severity, message=message)


def _describe_validator(validator: Validator, candidate: Candidate) -> str:
    """Return which validator of which version an error is about."""
    view = candidate.view
    version = view.sealed.name or view.version
    return f"dataset {view.dataset!r}, version {version!r}: validator {validator.name!r}"


def _is_analysis_error(error: Exception) -> bool:
    """Whether Spark could not resolve a name or a type."""
    return _package(error) == "pyspark" and _is_a(error, "AnalysisException")


def _propagates(error: Exception, warns: bool) -> bool:
    """Whether an error has its cause neither in the version nor in the validator, and so
    propagates.

    If the validator only `warns`, a TransientError and an exception within the JVM (Py4JJavaError)
    don't propagate. Py4J's other errors say that the JVM itself is broken.
    """
    if isinstance(error, MemoryError):
        return True
    if _package(error) == "py4j":
        return not warns or not _is_a(error, "Py4JJavaError")
    return isinstance(error, errors.TransientError) and not warns


def _is_a(error: Exception, name: str) -> bool:
    """Whether an error is of the class of this name, whose package may not be installed."""
    return any(cls.__name__ == name for cls in type(error).__mro__)


def _package(error: Exception) -> str:
    """Return the top-level package of an error's class."""
    return type(error).__module__.partition(".")[0]


def _condition(error: Exception) -> str:
    """Return the name of Spark's error condition, such as [CAST_INVALID_INPUT], whose message
    may show values.
    """
    named = re.match(r"\[[\w.]+\]", first_message_line(error))
    if named is None:
        return "an error of a row"
    return named[0]


def _mistake_error(
    validator: Validator, candidate: Candidate, error: Exception
) -> errors.ValidatorError:
    """Return the error for a mistake in a validator, which has raised `error`."""
    view = candidate.view
    version = view.sealed.name or view.version
    if isinstance(error, errors.AdjunctError):
        text = error.problem
    else:
        text = first_message_line(error)
    return errors.ValidatorError(
        f"{_describe_validator(validator, candidate)} can't be evaluated: {type(error).__name__}:"
        f" {text[:_MESSAGE_LENGTH]}",
        "Nothing was published or rejected, and the version waits. Correct the validator and"
        " advance again; or give this version up: adjunct dataset abandon"
        f" {view.dataset} {version} --reason ….",
        dataset=view.dataset,
        version=view.version,
        validator=validator.name,
    )


def _name_part(columns: Sequence[str]) -> str:
    """Return column names and paths as part of a check's name; unsafe characters become their code
    points.
    """
    parts = []
    for column in columns:
        part = ""
        for letter in flat_name(column):
            is_safe = letter.isascii() and (letter.isalnum() or letter == "_")
            part += letter if is_safe else f"x{ord(letter):x}"
        parts.append(part)
    return "_".join(parts)


def check_validator_columns(dataset: BoundedDataset | UnboundedDataset, stored: Schema) -> None:
    """Raise PlanningError for a validator that names a column which the dataset won't have, or an
    impossible value.

    A condition of `sql_check` must be boolean, if its type is known. In a SELECT from the new
    version alone all names are checked, in a join only those qualified as the version's; functions
    are not checked.
    """
    if isinstance(dataset, UnboundedDataset):
        for rule in dataset.validators:
            rule.row_condition(dataset.name, stored)
        return
    types: dict[str, str | None] = {field.name: field.type for field in stored.fields}
    for check in _list_checks(dataset, check_no_nulls, check_values_in, check_sql):
        _check_rule(check, dataset.name, types, or_select=", or a SELECT")


def _check_rule(
    check: Check, dataset: str, types: dict[str, str | None], *, or_select: str
) -> None:
    """Raise PlanningError for a mistake in a rule on columns of these types, as
    `check_validator_columns`. `or_select` is what may stand for a condition.
    """
    what = _name_validator(check, dataset)
    if check.function is check_no_nulls:
        for name in check.arguments:
            _check_column(what, dataset, name, types)
    elif check.function is check_values_in:
        column, values = check.arguments
        _check_allowed(what, dataset, column, values, types)
    elif check.checks_rows:
        _check_condition(what, dataset, check.arguments[0], types, or_select)
    else:
        step = "Correct the validator."
        check_select(what, check.arguments[0], VERSION, types, side="the dataset", next_step=step)


def _name_validator(check: Check, dataset: str) -> str:
    """Return what a planning error calls a validator."""
    return f"validator {check.name!r} of dataset {dataset!r}"


def _check_allowed(
    what: str, dataset: str, column: str, values: tuple[Any, ...], types: Mapping[str, str | None]
) -> None:
    """Raise PlanningError for a column that has no simple values, or can't have these."""
    kind = _check_column(what, dataset, column, types)
    if is_nested(kind):
        raise errors.PlanningError(
            f"{what}: {column!r} is {kind}: expected a simple value.",
            simple_value_advice(column, kind),
            dataset=dataset,
            column=column,
        )
    wrong = find_impossible_values(values, kind)
    if wrong:
        raise errors.PlanningError(
            f"{what}: it allows {wrong[0]!r} in column {column!r}, which is {kind}.",
            f"List values of type {kind}.",
            dataset=dataset,
            column=column,
        )


def _check_depends_on_row(check: Check, dataset: str, types: Mapping[str, str | None]) -> None:
    """Raise PlanningError for a condition that may give another result when the row is read again:
    what is set aside, and what is stored, are computed one after the other.
    """
    condition = check.arguments[0]
    used = other_records_construct(condition)
    if not used:
        used = ", ".join(nondeterministic_parts(condition, types))
    if used:
        raise errors.PlanningError(
            f"{_name_validator(check, dataset)}: {condition!r} uses {used}: expected a condition"
            " that depends on the changed row alone.",
            "Compare columns of the row, or have its producer add what is missing.",
            dataset=dataset,
        )


def _check_literals(check: Check, dataset: str, value: Path, allowed: Iterable[Any]) -> None:
    """Raise PlanningError for allowed values that have no literal, or that a text may be no form
    of: comparing them would fail at some rows.
    """
    has_texts = value.type == "string"
    for each in allowed:
        has_literal = isinstance(each, str | bool | int | float | Decimal | date | bytes)
        is_text = isinstance(each, str)
        if each is None or (has_literal and is_text == has_texts):
            continue
        raise errors.PlanningError(
            f"{_name_validator(check, dataset)}: it allows {each!r} in {str(value)!r}, which is"
            f" {value.type}.",
            f"List values of type {value.type}.",
            dataset=dataset,
            column=value.column,
        )


def _sql_literal(value: object) -> str:
    """Return a value as a literal of Spark SQL; times without a zone are in UTC."""
    if isinstance(value, str):
        return quote_text(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, bytes):
        return f"X'{value.hex()}'"
    if isinstance(value, datetime):
        moment = value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
        return f"TIMESTAMP'{moment:%Y-%m-%d %H:%M:%S.%f}'"
    if isinstance(value, date):
        return f"DATE'{value}'"
    if isinstance(value, float):
        return f"CAST('{value!r}' AS DOUBLE)"
    if isinstance(value, Decimal):
        return f"{value:f}"
    return str(value)


def _check_column(what: str, dataset: str, name: str, types: Mapping[str, str | None]) -> str:
    """Return the type of a column, or of the value at a path. Raises PlanningError for one that the
    dataset won't have.
    """
    column = column_of(name, types.keys())
    if column not in types:
        raise errors.PlanningError(
            f"{what}: the dataset has no column {column!r}; its columns are {', '.join(types)}.",
            f"{did_you_mean(column, types)}Correct the validator.",
            dataset=dataset,
            column=name,
        )
    kind = str(types[column])
    if column == name:
        return kind
    try:
        path = find_path(name, types) or require_value(name, {column: kind}, what)
    except errors.SchemaMismatchError as error:
        raise errors.PlanningError(
            error.problem, error.next_step, dataset=dataset, column=name
        ) from error
    return path.type


def _list_checks(dataset: AdjunctDataset, *functions: object) -> list[Check]:
    """Return the dataset's validators that are evaluated by one of these functions."""
    validators: tuple[Validator, ...] = getattr(dataset, "validators", ())
    checks = [validator for validator in validators if isinstance(validator, Check)]
    return [check for check in checks if check.function in functions]


class SqlRule(NamedTuple):
    """The name and SQL of a validator, and whether it is a SELECT rather than a condition."""

    name: str
    sql: str
    is_select: bool


def iterate_sql_rules(dataset: AdjunctDataset) -> Iterator[SqlRule]:
    """Yield the validators in SQL."""
    for check in _list_checks(dataset, check_sql):
        (sql,) = check.arguments
        yield SqlRule(check.name, sql, is_select=not check.checks_rows)


def list_spark_validators(dataset: BoundedDataset) -> list[str]:
    """Return the names of the validators that Spark evaluates; what functions of the user need
    is unknown.
    """
    return [check.name for check in _list_checks(dataset, check_sql, check_values_in)]


def is_left_to_spark(select: str) -> bool:
    """Whether some names of a validator's SELECT are only checked by Spark, even if all columns
    are known.
    """
    return needs_spark_analysis(select, VERSION)


def _check_condition(
    what: str, dataset: str, condition: str, types: dict[str, str | None], or_select: str
) -> None:
    """Raise PlanningError for a condition that names unknown columns, takes several rows, or is not
    boolean; for `or_select` see `_check_rule`. One with a metadata column, which begins with `__`,
    is not checked.
    """
    if any(column.name.startswith("__") for column in parse_expression(condition).columns):
        return
    over = [name for name, _ in multi_record_functions(condition)]
    if over:
        if or_select:
            step = "Write a SELECT of the rows that break the rule."
        else:
            step = "Write a condition of one row; several are compared in a bounded dataset only."
        raise errors.PlanningError(
            f"{what}: the condition {condition!r} takes {over[0]}() over several rows: expected one"
            " that is true or false for each row.",
            step,
            dataset=dataset,
        )
    correct = "Correct the validator."
    kind = check_expression(
        what, condition, tuple(types), types, side="the dataset", next_step=correct
    )
    if kind not in (None, "boolean"):
        raise errors.PlanningError(
            f"{what}: {condition!r} has the type {kind}: expected a condition{or_select}.",
            f"Compare it with something: {condition} is not null.",
            dataset=dataset,
        )
