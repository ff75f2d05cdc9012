"""The operators that an application describes, in the order in which they were defined.

Input -> Filter / Map / Join / PartitionBy -> SendToStream / SendToTable -> ...
"""

from __future__ import annotations

from dataclasses import is_dataclass

from dagster_adjunct.orchestration.operators.spec.operator_spec import Operator, Spec
from dagster_adjunct.resources.declared_place import caller
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError


class OperatorGraph:
    """The operators of the application `name`; one stands after its inputs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.operators: dict[str, Operator] = {}
        self._read: set[str] = set()
        self._writers: dict[str, str] = {}
        self._joins: dict[str, str] = {}
        self._states: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {len(self.operators)} operators)"

    def next_id(self, kind: str, name: str = "") -> str:
        """Return the id that the next operator will have, if it is of this kind and name."""
        return f"{kind}-{len(self.operators) + 1}" + (f"-{name}" if name else "")

    def add(self, spec: Spec, inputs: tuple[str, ...], name: str = "") -> str:
        """Add an operator behind others, and return its id."""
        operator = Operator(self.next_id(spec.kind, name), inputs, spec, caller())
        _check_schemas_declared(operator)
        if len(inputs) > 1 and (spec.writes is not None or spec.match is not None):
            raise PlanningError(
                f"{operator.id} has the inputs {', '.join(inputs)}: expected one, because it writes records, or looks "
                "them up in a dataset.",
                "Bring the records together with an operator before it.",
                operator=operator.id,
            )
        named = {spec.over_time} if spec.over_time is not None else set()
        for state in sorted(named.union(spec.states)):  # a join keeps NAME-left, too
            other = self._states.setdefault(state, operator.id)
            if other != operator.id:
                raise PlanningError(
                    f"two operators keep state under the name {state!r}: {other} and {operator.id}.",
                    "Give one another name=.",
                    operator=operator.id,
                )
        self.operators[operator.id] = operator
        if spec.reads is not None:
            self._read.add(spec.reads)
        if spec.writes is not None:
            self._writers.setdefault(spec.writes, operator.id)
        if spec.match is not None and name:
            self._joins.setdefault(name, operator.id)
        return operator.id

    def join_called(self, name: str) -> str | None:
        """Return the id of the first join of this name, if there is one."""
        return self._joins.get(name)

    def writer_of(self, output: str) -> str | None:
        """Return the id of the first operator that writes to this output, if one does."""
        return self._writers.get(output)

    def refuse_writing(self, stream: str, what: str) -> None:
        """Refuse to write a stream that the application reads: its records would come back for ever."""
        if stream in self._read:
            raise self.loop(stream, what)

    def loop(self, stream: str, what: str) -> PlanningError:
        """Return the error for an input stream that the application also writes, as `what`."""
        return PlanningError(
            f"application {self.name!r}: stream {stream!r} is an input stream and is also {what}; its records "
            "would come back for ever.",
            "Go on with what send_to() returns instead of reading the stream again.",
            application=self.name,
            stream=stream,
        )


def _check_schemas_declared(operator: Operator) -> None:
    """Refuse an operator of which nobody can tell whether it makes sensitive columns: failures would tell them."""
    kind = type(operator.spec)
    if not is_dataclass(kind) and kind.declared_schemas is Spec.declared_schemas:
        raise ConfigurationError(
            f"{operator.id}: {kind.__name__} is no dataclass, and does not say its declared_schemas: which of its "
            "columns are sensitive can't be known.",
            "Make it a frozen dataclass, or let its declared_schemas say the schemas that it was given.",
            argument="spec",
            operator=operator.id,
        )
