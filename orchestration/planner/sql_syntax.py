"""Checks the syntax of an application's SQL with Spark's own parser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.extractors import Projection
from dagster_adjunct.assets.declaration.snapshots import QuerySnapshot
from dagster_adjunct.assets.declaration.sources import QuerySource
from dagster_adjunct.assets.validation.validators import iterate_sql_rules
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.planner.columns import format_place
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.sql.parser import parse_expression


def check_syntax(app: Application) -> None:
    """Raise PlanningError for the first SQL of an application that Spark can't parse.

    The parser runs in a JVM without a session, and only if there is more to parse than column names. Without Java
    nothing is checked.
    """
    asked = [one for one in _collect_sql(app) if one[1] or not _is_plain_column(one[0])]
    if not asked:
        return
    from dagster_adjunct.resources.spark.parser import syntax_errors

    mistakes: list[str] = []
    with suppress(ConfigurationError):  # no Java
        mistakes = syntax_errors([(text, whole) for text, whole, _, _ in asked])
    for mistake, (text, whole, what, facts) in zip(mistakes, asked, strict=False):
        if mistake:
            raise PlanningError(
                f"{what}: {text!r} is not a valid Spark SQL {'query' if whole else 'expression'}: {mistake}.",
                "Correct the SQL; Spark's parser reports the position.",
                application=app.name,
                **facts,
            )


def _is_plain_column(text: str) -> bool:
    expression = parse_expression(text)
    return expression.star or (expression.tree is None and not expression.unread)


def _collect_sql(app: Application) -> Iterator[tuple[str, bool, str, dict[str, str | None]]]:
    """Yield each SQL text, whether it is a whole query, its owner, and the fields for an error."""
    for operator in app.operators:
        place = None if operator.declared_at is None else format_place(operator.declared_at)
        for text in operator.spec.sql:
            yield text, False, operator.id, {"operator": operator.id, "declared_at": place}
    for dataset in app.datasets:
        place = None if dataset.declared_at is None else format_place(dataset.declared_at)
        for what, text, whole in _collect_dataset_sql(dataset):
            yield text, whole, f"{what} of dataset {dataset.name!r}", {"dataset": dataset.name, "declared_at": place}


def _collect_dataset_sql(dataset: AdjunctDataset) -> Iterator[tuple[str, str, bool]]:
    for name, text, is_select in iterate_sql_rules(dataset):
        yield f"validator {name!r}", text, is_select
    if isinstance(dataset.extractor, Projection):
        for text in filter(None, (*dict(dataset.extractor.select).values(), dataset.extractor.where)):
            yield "the projection", text, False
    if isinstance(dataset.input, QuerySource) and isinstance(dataset.input.query, str):
        yield "the query", dataset.input.query.replace("{version}", "''").replace("{partition}", "''"), True
    initial = dataset.following.initial
    if isinstance(initial, QuerySnapshot) and initial.sql is not None:
        yield "the snapshot's query", initial.sql, True
