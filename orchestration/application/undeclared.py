"""What is said where an operator gets something that its application has not declared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dagster_adjunct.resources.errors import PlanningError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.operator_graph import OperatorGraph


class OfApplication(Protocol):
    """What an application has declared, or the records of one of its operators."""

    @property
    def graph(self) -> OperatorGraph: ...


_CALLS = {
    "dataset or remote table": "app.table(…) or app.local_table(…)",
    "output stream or table": "app.output_stream(…), app.table(…) or app.local_table(…)",
    "output stream": "app.output_stream(…)",
    "remote table": "app.table(…)",
}


def not_declared(passed: object, where: str, expected: str, application: str) -> PlanningError:
    """Return the error for `passed`, where a declared `expected` was expected."""
    problem = f"which application {application!r} has not declared: expected a declared {expected}."
    calls = f"Pass what {_CALLS[expected]} returned."
    operator = getattr(passed, "operator", None)
    if operator is None:
        return PlanningError(
            f"{where} got {getattr(passed, 'name', None) or passed!r}, {problem}", calls, application=application
        )
    joined = expected == "dataset or remote table"
    return PlanningError(
        f"{where} got the records of {operator}: expected a declared {expected}.",
        "join() takes tables. Two streams meet within a time with join_stream(other, on=…, within=…, name=…); or "
        "follow the other one as a table, app.table(unbounded_dataset(…)), or put the records of both into one with "
        "merge()."
        if joined
        else calls,
        application=application,
        operator=operator,
    )


def check_ours(graph: OperatorGraph, target: OfApplication, name: str) -> None:
    """Raise PlanningError where `target`, called `name`, is of another application than the operators of `graph`."""
    if target.graph is graph:
        return
    raise PlanningError(
        f"{name!r} was declared by application {target.graph.name!r}, and is used by {graph.name!r}.",
        "Declare it with this application's table(), local_table() or output_stream()."
        if getattr(target, "operator", None) is None
        else "Declare it with this application, too: an input in both is app.input_stream(…) of each.",
        application=graph.name,
    )
