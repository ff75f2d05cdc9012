"""`FunctionLayer`: the lowest layer, which hands operations to a table's functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.tables.operation import Operation, OperationKind
from dagster_adjunct.resources.tables.outcomes import Outcomes
from dagster_adjunct.resources.tables.table_functions import TableFunction


@dataclass(frozen=True, slots=True)
class FunctionLayer:
    """Sends gets to the one function and writes to the other, each opened before its request."""

    table: str
    read_function: TableFunction | None
    write_function: TableFunction | None

    async def send(self, operation: Operation[Any]) -> Outcomes:
        if not len(operation):
            return Outcomes(0)
        function = self._function(operation)
        try:
            await function.open()
        except Exception as error:  # noqa: BLE001 - it becomes the outcome
            return Outcomes.all(len(operation), function.problem_of(error, sent=False))
        return await function.send(operation)

    async def close(self) -> None:
        for function in {id(f): f for f in (self.read_function, self.write_function) if f is not None}.values():
            await function.close()

    def _function(self, operation: Operation[Any]) -> TableFunction:
        reads = operation.kind is OperationKind.GET
        function = self.read_function if reads else self.write_function
        if function is None:
            verb, missing = ("asked for records", "read") if reads else ("asked to write", "write")
            raise ConfigurationError(
                f"table {self.table} was {verb} but has no {missing} function.",
                f"Declare it with {missing}_function=….",
                table=self.table,
            )
        if operation.args and not function.capabilities.takes_args:
            raise ConfigurationError(
                f"table {self.table}: a {operation.kind.value} came with {len(operation.args)} extra argument(s), and "
                f"{type(function).__name__} has no use for any.",
                "Leave them out, or give the table a function of your own that takes them.",
                table=self.table,
            )
        return function
