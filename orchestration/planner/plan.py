"""`ExecutionPlan`: the result of planning, as immutable data, and its JSON format.

A plan's JSON is one object: `format`, the number of the format, and a member for each field of
`ExecutionPlan`. Readers ignore unknown members; a change of meaning increases the number.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from dagster_adjunct.orchestration.operators.operator import PlannedStream
from dagster_adjunct.orchestration.planner.planned import PlannedApplication, PlannedOperator, Task
from dagster_adjunct.orchestration.planner.render import (
    describe_differences,
    render_mermaid,
    render_text,
)
from dagster_adjunct.resources.documents import first_validation_problem
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    MalformedDocumentError,
    PlanningError,
)
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.reports import to_json_value
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from dagster_adjunct.resources.validation import validated_methods

FORMAT = 1
_HOW_TO_WRITE = "Write it with adjunct plan MODULE:APP --format json."


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RestatingOperators:
    """The operators that compute results again, and those of them that are `unsent`: they do not
    send to their tables.
    """

    operators: frozenset[str]
    unsent: frozenset[str]


@validated_methods
@dataclass(frozen=True, slots=True)
class ExecutionPlan(PlannedApplication):
    """A proven application. Equal applications and catalogs give equal plans."""

    def stream(self, name: str) -> PlannedStream:
        """Return the planned stream of this name; raises PlanningError for an unknown one.

        A stream that the application reads or writes comes before the side input of a dataset that
        is built from the same stream.
        """
        streams = sorted(self.streams, key=lambda stream: stream.dataset is not None)
        # Reversed: of several streams with one name, the dictionary has the last one.
        return self._find("stream", name, {stream.name: stream for stream in reversed(streams)})

    def operator(self, operator_id: str) -> PlannedOperator:
        """Return the planned operator of this id; raises PlanningError for an unknown one."""
        return self._find(
            "operator", operator_id, {operator.id: operator for operator in self.operators}
        )

    def task(self, name: str) -> Task:
        """Return the task of this name: "Partition 3", or "Task 3" if tasks own several partitions.

        Raises PlanningError for an unknown name.
        """
        return self._find("task", name, {task.name: task for task in self.tasks})

    def _find(self, kind: str, name: str, known: Mapping[str, T]) -> T:
        """Return the value of this name in `known`; without one, raises PlanningError, which lists
        the first names. `kind` says what they name.
        """
        if name not in known:
            shown = [*known][:10]
            if len(known) > len(shown):
                shown.append("…")
            problem = (
                f"the plan of {self.application!r} has no {kind} {name!r}; it has"
                f" {', '.join(shown)}."
            )
            about: dict[str, Any] = {"application": self.application}
            if kind != "task":  # errors have no field for a task
                about[kind] = name
            raise PlanningError(problem, "Check the name.", **about)
        return known[name]

    def partitions_by_task(self) -> dict[str, frozenset[SystemStreamPartition]]:
        """Return the partitions that each task has positions in, by its name: those of inputs, and
        of the changes of datasets by which results are restated.
        """
        changes = set()
        for restated in self.late_data.restatements:
            system, dataset = split_stream_name(restated.changes)
            for number in range(restated.partitions):
                changes.add(SystemStreamPartition(system, dataset, number))
        owned = {}
        for place, task in enumerate(self.tasks):
            ssps = [ssp for ssp in changes if ssp.partition % len(self.tasks) == place]
            owned[task.name] = frozenset((*task.ssps, *ssps))
        return owned

    def operators_that_restate(self, datasets: Collection[str]) -> RestatingOperators:
        """Return the operators that compute results again when these datasets have changed.

        An operator is unsent only if it is so for all of these datasets.
        """
        needed: set[str] = set()
        sent: set[str] = set()
        unsent: set[str] = set()
        for restated in self.late_data.restatements:
            if restated.dataset in datasets:
                needed.update(restated.operators)
                unsent.update(restated.unsent)
                sent |= {*restated.operators} - {*restated.unsent}
        return RestatingOperators(frozenset(needed), frozenset(unsent - sent))

    def tables_joined_after_sends(self) -> frozenset[str]:
        """Return the names of the local tables in which a join finds records that are sent in
        the same batch.
        """
        return frozenset(join.dataset for join in self.fed_joins if join.last_send is not None)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values, with the format's number."""
        document: dict[str, Any] = {"format": FORMAT}
        for member in fields(self):
            if member.compare:
                document[member.name] = to_json_value(getattr(self, member.name))
        for restated in document["late_data"]["restatements"]:
            del restated["costs"]
        return document

    @classmethod
    def from_json(cls, document: object) -> ExecutionPlan:
        """Return the plan from what `to_json` returned.

        Raises MalformedDocumentError for a later format, and for an invalid document; the error
        names the wrong member.
        """
        if not isinstance(document, dict):
            raise _malformed_error(f"it is {type(document).__name__}: expected an object")
        stored = document.get("format")
        if type(stored) is not int or stored < 1:  # a bool would be an int, too
            raise _malformed_error(f"its format is {stored!r}: expected a whole number from 1")
        if stored > FORMAT:
            raise _malformed_error(
                f"it has format {stored}, and this version of dagster-adjunct reads formats up to"
                f" {FORMAT}",
                "Read it with the version that wrote it, or a later one, or write it again:"
                f" {_HOW_TO_WRITE}",
            )
        try:
            if isinstance(document.get("tasks"), list):
                tasks = [_parse_partitions(task) for task in document["tasks"]]
                document = {**document, "tasks": tasks}
            # Strict validation rejects lists for tuples, except of JSON text, and it rejects a
            # string for a number.
            return TypeAdapter(cls).validate_json(json.dumps(document), strict=True)
        except ValidationError as error:
            raise _malformed_error(first_validation_problem(error)) from error
        except (ConfigurationError, TypeError) as error:
            raise _malformed_error(str(error)) from error

    def differences_from(self, older: ExecutionPlan) -> tuple[str, ...]:
        """Return the differences from an older plan, one line each; a new number of an operator
        is no difference.
        """
        return describe_differences(older.to_json(), self.to_json())

    def to_mermaid(self) -> str:
        """Return the plan as a Mermaid flowchart."""
        return render_mermaid(self)

    def render(self) -> str:
        """Return the plan as readable text."""
        return render_text(self)


def _parse_partitions(task: Any) -> Any:
    """Return a task of a plan's JSON with its partitions ("system.stream.3") parsed."""
    if not isinstance(task, dict) or not isinstance(task.get("ssps"), list):
        return task
    return {**task, "ssps": [asdict(SystemStreamPartition.parse(ssp)) for ssp in task["ssps"]]}


def _malformed_error(what: str, next_step: str = _HOW_TO_WRITE) -> MalformedDocumentError:
    """Return the error for a plan document that can't be read because of `what`."""
    return MalformedDocumentError(
        f"the plan document can't be read: {what}.", next_step, document="plan"
    )
