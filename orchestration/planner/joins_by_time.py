"""The joins whose records meet what was valid at their own time, as plans tell them."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.planner.plans.plan_parts import JoinByTime

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.orchestration.application.application import Application


def joins_by_time(app: Application) -> tuple[JoinByTime, ...]:
    """Return the joins by time, in the order of their definition."""
    joins = []
    for operator in app.operators:
        match = operator.spec.match
        if match is not None and match.dataset is not None and match.as_of is not None:
            by, known = match.as_of, _known(app.dataset(match.dataset))
            joins.append(JoinByTime(operator.id, match.dataset, by.column, by.before_history, by.on_null_time, known))
    return tuple(joins)


def _known(dataset: AdjunctDataset) -> str:
    history = dataset.following.history
    if history is None:
        return "its retained versions"
    return "all that it has had" if history == "all" else f"{_words(history)} below its newest change"


def _words(span: timedelta) -> str:
    return str(span).removesuffix(", 0:00:00")
