"""What all parts of a stream's interface stand on: the operator that records leave, and the next one behind it."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.operator_graph import OperatorGraph
    from dagster_adjunct.orchestration.operators.spec.operator_spec import Spec


class AppliesOperators:
    """The records that leave an `operator` of a `graph`."""

    __slots__ = ()
    graph: OperatorGraph
    operator: str

    @abstractmethod
    def apply(self, spec: Spec, *others: Self, name: str = "") -> Self:
        """Return the records that an operator makes of these, and of those of `others`."""
