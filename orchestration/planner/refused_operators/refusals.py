"""What is wrong with operators, all at once: each by the line of the user's file, none that follows from another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import PlanningError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.spec.operator_spec import Operator
    from dagster_adjunct.resources.declared_place import Place


class Refusals:
    """Errors of operators, collected in their order."""

    def __init__(self) -> None:
        self._errors: list[PlanningError] = []
        self._refused: set[str] = set()

    def stop(self, operator: Operator) -> bool:
        """Whether nothing can be said of an operator, because one before it was refused."""
        if self._refused.isdisjoint(operator.inputs):
            return False
        self._refused.add(operator.id)
        return True

    @contextmanager
    def of(self, operator: Operator) -> Iterator[None]:
        """Keep the PlanningError that is raised within, as one of this operator."""
        try:
            yield
        except PlanningError as error:
            self._errors.append(placed(error, operator))
            self._refused.add(operator.id)

    def tell(self) -> None:
        """Raise what was collected: the error itself, or one PlanningError that lists them."""
        if not self._errors:
            return
        first = self._errors[0]
        if len(self._errors) == 1:
            raise first
        raise PlanningError(
            f"{len(self._errors)} operators can't work:\n" + "\n".join(f"- {error}" for error in self._errors),
            "Correct each.",
            operator=first.operator,
            column=first.column,
        )


def placed(error: PlanningError, operator: Operator) -> PlanningError:
    """Return an error of an operator with the line that made it before its text."""
    if operator.declared_at is None or error.declared_at is not None:
        return error
    line = shown(operator.declared_at)
    told = error.reworded(error.problem, error.next_step, operator=operator.id, declared_at=line)
    told.__cause__ = error.__cause__
    return told


def shown(place: Place) -> str:
    """Return a line as the user knows it: "visits.py:12", from the working directory where it is below that."""
    file = Path(place.file)
    below = file.is_relative_to(Path.cwd())
    return f"{file.relative_to(Path.cwd()) if below else file}:{place.line}"
