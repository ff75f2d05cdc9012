"""Row rules: the validators of an unbounded dataset, as conditions of the rows that changes bring.

    changes -> flag those that break a rule -> count them -> raise, or give them a problem

A rule sees the row as it would be stored. Deletions have no row, and changes that can't be applied
for another reason are not checked. By `on_bad_change`, a change that breaks a rule fails the
advance, or becomes a dead letter: its key keeps the entry that it has. With severity "warn" it is
only counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_adjunct.assets.declaration.change_formats import PROBLEM
from dagster_adjunct.assets.declaration.change_values import (
    concat_reason,
    quote_column,
    quote_value,
    render_reason,
    render_reason_column,
)
from dagster_adjunct.assets.declaration.dataset import UnboundedDataset
from dagster_adjunct.assets.declaration.policies import Severity
from dagster_adjunct.assets.sources.changes import add_problem, add_problems
from dagster_adjunct.assets.sources.entries import hides_values
from dagster_adjunct.assets.versions.version import Verdict
from dagster_adjunct.resources.errors import BadChangeError, ConfigurationError, ValidatorError
from dagster_adjunct.resources.lazy_modules import F, pa, pc
from dagster_adjunct.resources.schemas.schema import Schema, named_column
from dagster_adjunct.resources.schemas.values import python_rows
from dagster_adjunct.resources.spark.tasks import first_message_line, raise_error_column
from dagster_adjunct.resources.sql.arrow_expressions import compile_expression
from dagster_adjunct.resources.sql.arrow_kernels import NeedsSpark
from dagster_adjunct.resources.sql.expression import parse_expression
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION, TOMBSTONE
from dagster_adjunct.resources.user_code import MASKED, truncate_text

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SAMPLE_SIZE = 5
_FLAG = "__breaks"
_SHOWN_TYPES = ("string", "boolean", "tinyint", "smallint", "int", "bigint", "date")
"""Types of which Spark and Arrow write every value alike."""
_CORRECT = (
    "Its commit was not made. Correct the validator, or what writes the stream, or declare"
    " on_bad_change=DeadLetters(STREAM), which sets such changes aside and counts them."
)
_CORRECT_SNAPSHOT = (
    "Nothing was published. Correct the row in the source, or the validator, and advance again."
)


@dataclass(frozen=True, slots=True)
class RowRule:
    """A validator as a condition that rows have to meet. `shown` are the columns whose values the
    reason for rejecting a row shows.
    """

    name: str
    condition: str
    severity: Severity
    shown: tuple[str, ...]

    @property
    def broken(self) -> str:
        """The SQL condition of rows that break it, also by null; the line break ends a comment."""
        return f"not coalesce(({self.condition}\n), false)"

    @property
    def expected(self) -> str:
        """The beginning of the reason for rejecting a row."""
        return f"validator {self.name!r} expects {self.condition}"


@dataclass(frozen=True, slots=True)
class RuleFinding:
    """How many changed rows a rule has seen (`rows`), how many of these break it (`failed`), and a
    few of the latter by key and place (`sample`).
    """

    rule: RowRule
    rows: int = 0
    failed: int = 0
    sample: tuple[str, ...] = ()

    def plus(self, other: RuleFinding) -> RuleFinding:
        """Return the finding over the rows of both."""
        return replace(
            self,
            rows=self.rows + other.rows,
            failed=self.failed + other.failed,
            sample=(*self.sample, *other.sample)[:SAMPLE_SIZE],
        )

    @property
    def verdict(self) -> Verdict:
        """The finding as the result of a validator."""
        message = f"{self.failed:,} of {self.rows:,} changed rows do not meet {self.rule.condition}"
        facts: dict[str, Any] = {"rows": self.rows, "failed": self.failed}
        if self.sample:
            message += f", such as {self.sample[0]}"
            facts["sample"] = list(self.sample)
        return Verdict(
            name=self.rule.name,
            passed=not self.failed,
            severity=self.rule.severity,
            message=message,
            facts=facts,
        )


Findings = tuple[RuleFinding, ...]


def add_findings(before: Findings, found: Findings) -> Findings:
    """Return what the rules have found `before` and now. Both are of the same rules, except that
    `before` may be empty.
    """
    if not before:
        return found
    return tuple(one.plus(other) for one, other in zip(before, found, strict=True))


def list_row_rules(spec: UnboundedDataset, columns: Schema) -> tuple[RowRule, ...]:
    """Return the dataset's validators as conditions of rows with these columns.

    Raises PlanningError for a validator that does not fit them.
    """
    rules = []
    for validator in spec.validators:
        condition = validator.row_condition(spec.name, columns)
        shown = []
        named = {column.name.lower() for column in parse_expression(condition).columns}
        for field in columns.fields:
            if field.name.lower() in named and field.type in _SHOWN_TYPES:
                shown.append(field.name)
        rules.append(RowRule(validator.name, condition, validator.severity, tuple(shown[:3])))
    return tuple(rules)


def list_rule_spark_needs(rules: Sequence[RowRule], columns: Schema) -> list[str]:
    """Return, in words, which rules only Spark can evaluate, and why."""
    needed = []
    for rule in rules:
        why = compile_expression(rule.broken, columns.types)
        if isinstance(why, str):
            needed.append(f"its validator {rule.name} ({why})")
    return needed


class CheckedTable(NamedTuple):
    """A table of checked rows, and what was found."""

    rows: pa.Table
    findings: Findings


class CheckedRows(NamedTuple):
    """Checked rows, and a function that returns what was found once they are written."""

    rows: Any
    read_findings: Callable[[], Findings]


def check_rows(
    changes: DataFrame | pa.Table, spec: UnboundedDataset, rules: Sequence[RowRule], columns: Schema
) -> CheckedRows:
    """Return the changes; those that break a rule get a problem.

    Without dead letters a broken rule raises BadChangeError instead, at once or when the frame is
    written. Rules of severity "warn" are only counted. `columns` are those that the rules name.
    Raises ValidatorError for a rule that Spark can't resolve, NeedsSpark where Arrow may not give
    Spark's result.
    """
    if not rules:
        return CheckedRows(changes, tuple)  # tuple() is: no findings
    if isinstance(changes, pa.Table):
        table = _check_table(changes, spec, rules, columns)
        return CheckedRows(table.rows, lambda: table.findings)
    is_checked = f"{PROBLEM} IS NULL AND NOT {TOMBSTONE}"
    flagged = _flag_rows(changes, spec.name, rules, is_checked)
    counted = _observe_rules(flagged, spec, rules, F.expr(is_checked), (PARTITION, OFFSET))
    if spec.dead_letters is None:
        place = concat_reason(
            "the change at offset ",
            F.col(OFFSET).cast("string"),
            " of partition ",
            F.col(PARTITION).cast("string"),
            " can't be applied",
        )
        checked = _raise_at_broken(counted.rows, spec, rules, place, _CORRECT)
    else:
        reasons = []
        for flagged_rule in _enforced(rules):
            reason = _reason_column(flagged_rule.rule, spec)
            reasons.append(F.when(F.col(flagged_rule.flag), reason))
        checked = add_problem(counted.rows, *reasons)
    return CheckedRows(checked.drop(*_flags(rules)), counted.read_findings)


def check_snapshot_rows(
    rows: DataFrame, spec: UnboundedDataset, rules: Sequence[RowRule]
) -> CheckedRows:
    """Return the rows of a bulk snapshot. Writing one that breaks a rule raises BadChangeError:
    there is no record to set aside.
    """
    if not rules:
        return CheckedRows(rows, tuple)
    flagged = _flag_rows(rows, spec.name, rules, "true")
    counted = _observe_rules(flagged, spec, rules, F.lit(True), ())
    place = F.lit("a row of the bulk snapshot can't be stored")
    checked = _raise_at_broken(counted.rows, spec, rules, place, _CORRECT_SNAPSHOT)
    return CheckedRows(checked.drop(*_flags(rules)), counted.read_findings)


def _flags(rules: Sequence[RowRule]) -> list[str]:
    """Return the column of each rule that says which rows break it."""
    return [f"{_FLAG}{number}" for number in range(len(rules))]


class _FlaggedRule(NamedTuple):
    """A rule, and the column that says which rows break it."""

    flag: str
    rule: RowRule


def _enforced(rules: Sequence[RowRule]) -> Iterator[_FlaggedRule]:
    """Yield the rules that reject rows."""
    for flag, rule in zip(_flags(rules), rules, strict=True):
        if rule.severity == "error":
            yield _FlaggedRule(flag, rule)


def _flag_rows(
    rows: DataFrame, dataset: str, rules: Sequence[RowRule], is_checked: str
) -> DataFrame:
    """Return the rows with a column for each rule: whether the row breaks it. Only rows that meet
    the SQL condition `is_checked` do. Raises ValidatorError.
    """
    for flag, rule in zip(_flags(rules), rules, strict=True):
        with _report_mistakes(dataset, rule):
            broken = f"CASE WHEN {is_checked} THEN {rule.broken} ELSE false END"
            rows = rows.withColumn(flag, F.expr(broken))
    return rows


@contextmanager
def _report_mistakes(dataset: str, rule: RowRule) -> Iterator[None]:
    """Raise ValidatorError for what Spark can't parse or resolve while the context lasts."""
    from pyspark.errors import AnalysisException

    try:
        yield
    except AnalysisException as error:
        raise ValidatorError(
            f"dataset {dataset!r}: validator {rule.name!r} can't be evaluated:"
            f" {first_message_line(error)}",
            "Nothing was committed. Correct the validator and advance again.",
            dataset=dataset,
            validator=rule.name,
        ) from error


def _raise_at_broken(
    rows: DataFrame, spec: UnboundedDataset, rules: Sequence[RowRule], place: Column, next_step: str
) -> DataFrame:
    """Return the rows; writing one that breaks a rule fails with BadChangeError, which says that
    the row is at `place`, and has the next step `next_step`.
    """
    # The error is raised in a column that every writer reads: Spark may optimise a filter away.
    mark = F.col(TOMBSTONE)
    for flag, rule in reversed([*_enforced(rules)]):  # so that the first rule is the outermost
        problem = concat_reason(
            f"dataset {spec.name!r}: ", place, ": ", _reason_column(rule, spec), "."
        )
        error = raise_error_column(
            BadChangeError, problem, next_step, dataset=spec.name, validator=rule.name
        )
        mark = F.when(F.col(flag), error).otherwise(mark)
    return rows.withColumn(TOMBSTONE, mark)


def _reason_column(rule: RowRule, spec: UnboundedDataset) -> Column:
    """Return the column with the reason why a row breaks the rule."""
    parts: list[str | Column] = [rule.expected]
    between = ": "
    for name in rule.shown:
        parts += [f"{between}{name} is ", quote_column(named_column(name).cast("string"))]
        between = ", "
    return render_reason_column(concat_reason(*parts), values=not hides_values(spec))


def _observe_rules(
    rows: DataFrame,
    spec: UnboundedDataset,
    rules: Sequence[RowRule],
    is_checked: Column,
    place: tuple[str, ...],
) -> CheckedRows:
    """Return the flagged rows, which Spark counts for each rule while they are written, and a
    function that returns the findings.

    Spark also takes a sample of the rows that break a rule: one of each of SAMPLE_SIZE groups of
    keys, by their hashes. `place` has the columns that say where a row is, () for a bulk snapshot.
    """
    from pyspark.sql import Observation

    observed = Observation()
    key = [named_column(name).alias(f"k{number}") for number, name in enumerate(spec.key)]
    described = F.struct(*place, *key)
    group = F.pmod(F.hash(*map(named_column, spec.key)), F.lit(SAMPLE_SIZE))
    metrics = [F.count_if(is_checked).alias("rows")]
    for number, flag in enumerate(_flags(rules)):
        metrics.append(F.count_if(F.col(flag)).alias(f"failed{number}"))
        for part in range(SAMPLE_SIZE):
            sample = F.min(F.when(F.col(flag) & (group == part), described))
            metrics.append(sample.alias(f"sample{number}_{part}"))

    def read_findings() -> Findings:
        return _findings_from_metrics(observed.get, spec, rules, len(place))

    return CheckedRows(rows.observe(observed, *metrics), read_findings)


def _findings_from_metrics(
    metrics: Mapping[str, Any], spec: UnboundedDataset, rules: Sequence[RowRule], place_columns: int
) -> Findings:
    """Return what Spark has observed as findings. Sampled rows begin with this number of columns of
    their place.
    """
    found = []
    for number, rule in enumerate(rules):
        failed = int(metrics[f"failed{number}"])
        sampled = (metrics[f"sample{number}_{part}"] for part in range(SAMPLE_SIZE))
        sample = [tuple(row) for row in sampled if row is not None]
        sample.sort(key=lambda row: row[:place_columns])
        described = tuple(_describe_row(spec, row, place_columns) for row in sample)
        found.append(RuleFinding(rule, int(metrics["rows"]), failed, described))
    return tuple(found)


def _describe_row(spec: UnboundedDataset, row: Sequence[Any], place_columns: int) -> str:
    """Return the key of a row and its place in words. `place_columns` is 2 if the row begins with
    its partition and offset, else 0; the other values are those of its key.
    """
    hidden = {*map(str.lower, spec.masked)}
    parts = []
    for name, value in zip(spec.key, row[place_columns:], strict=True):
        text = MASKED
        if name.lower() not in hidden:
            # Times are in UTC, which is left out.
            plain = value.replace(tzinfo=None) if isinstance(value, datetime) else value
            text = truncate_text(str(plain))
        parts.append(f"{name} = {text}")
    described = ", ".join(parts)
    if place_columns:
        described += f" at {spec.input}.{row[0]} offset {row[1]}"
    return described


def _check_table(
    changes: pa.Table, spec: UnboundedDataset, rules: Sequence[RowRule], columns: Schema
) -> CheckedTable:
    """Return the changes of an Arrow table, with a problem where they break a rule (the first one),
    and the findings; see `check_rows`.
    """
    is_checked = pc.and_(pc.is_null(changes.column(PROBLEM)), pc.invert(changes.column(TOMBSTONE)))
    checked = pc.indices_nonzero(is_checked)
    rows = changes.take(checked)
    found = []
    reasons: dict[int, str] = {}  # by index among the changes
    for rule in rules:
        indices = _find_broken(rule, rows, columns)
        broken = rows.take(indices)
        found.append(_find_in_table(rule, spec, rows.num_rows, broken))
        if rule.severity == "warn":
            continue
        rule_reasons = _reasons(rule, spec, broken)
        for change, reason in zip(checked.take(indices).to_pylist(), rule_reasons, strict=True):
            reasons.setdefault(change, reason)
    if reasons:
        changes = add_problems(changes, [*map(reasons.get, range(changes.num_rows))])
    return CheckedTable(changes, tuple(found))


def _find_broken(rule: RowRule, rows: pa.Table, columns: Schema) -> pa.Array:
    """Return the indices of the rows that break a rule. Raises NeedsSpark where Arrow may not give
    Spark's result.
    """
    compiled = compile_expression(rule.broken, columns.types)
    if isinstance(compiled, str):
        raise NeedsSpark(compiled)
    return pc.indices_nonzero(compiled.evaluate(rows))


def _find_in_table(
    rule: RowRule, spec: UnboundedDataset, rows: int, broken: pa.Table
) -> RuleFinding:
    """Return the finding about the `broken` rows among `rows` many, the first ones as the sample.
    Raises BadChangeError for the first one if the rule rejects rows and they can't be set aside.
    """
    ordered = broken.sort_by([(PARTITION, "ascending"), (OFFSET, "ascending")])
    if broken.num_rows and rule.severity == "error" and spec.dead_letters is None:
        raise _broken_error(spec, rule, ordered.slice(0, 1))
    sample = python_rows(ordered.slice(0, SAMPLE_SIZE).select([PARTITION, OFFSET, *spec.key]))
    shown = tuple(_describe_row(spec, tuple(row.values()), 2) for row in sample)
    return RuleFinding(rule, rows, broken.num_rows, shown)


def _broken_error(spec: UnboundedDataset, rule: RowRule, row: pa.Table) -> BadChangeError:
    """Return the error for a change, given as a table of one row, that breaks a rule."""
    (place,) = row.select([PARTITION, OFFSET]).to_pylist()
    (reason,) = _reasons(rule, spec, row)
    return BadChangeError(
        f"dataset {spec.name!r}: the change at offset {place[OFFSET]} of partition"
        f" {place[PARTITION]} can't be applied: {reason}.",
        _CORRECT,
        dataset=spec.name,
        validator=rule.name,
    )


def _reasons(rule: RowRule, spec: UnboundedDataset, rows: pa.Table) -> list[str]:
    """Return why each of these rows breaks the rule, in the words of `_reason_column`."""
    texts = {name: rows.column(name).cast("string").to_pylist() for name in rule.shown}
    reasons = []
    for number in range(rows.num_rows):
        found = [f"{name} is {quote_value(values[number])}" for name, values in texts.items()]
        reason = rule.expected
        if found:
            reason += f": {', '.join(found)}"
        reasons.append(str(render_reason(reason, values=not hides_values(spec))))
    return reasons


def needs_spark_error(spec: UnboundedDataset, reason: NeedsSpark) -> ConfigurationError:
    """Return the error for a rule that only Spark evaluates for certain, where there is none."""
    return ConfigurationError(
        f"dataset {spec.name!r}: a validator meets a row that only Spark checks for certain"
        f" ({reason}), but IN_PROCESS, or the master none, was given.",
        "Pass a session, or open one with session_scope() and another master than none.",
        argument="spark",
    )
