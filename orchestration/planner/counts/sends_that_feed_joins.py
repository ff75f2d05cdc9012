"""The connections between sends to a dataset's table and the joins that read it, which no graph of operators has.

A send ends its branch, and a join names its dataset. What both ask of their streams is looked at together: a send to a
dataset that nothing joins asks nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.spec.planning_values import Requirement

Needs = Mapping[str, tuple["Requirement | None", ...]]
"""What each operator that asks for anything asks of each of its inputs."""


def needs_of(app: Application) -> Needs:
    """Return what operators ask; a sink to a dataset that nothing joins asks nothing, its own exchange suffices."""
    asked = {operator.id: operator.spec.requirements(app) for operator in app.operators}
    joined = {need.dataset for needs in asked.values() for need in needs if need is not None and not need.feeds}
    kept = {
        operator: tuple(None if need and need.feeds and need.dataset not in joined else need for need in needs)
        for operator, needs in asked.items()
    }
    return {operator: needs for operator, needs in kept.items() if any(needs)}
