"""`LayerAsFunction`: a layer, and all that is under it, as the function of a table."""

from __future__ import annotations

from typing import Any

from dagster_adjunct.resources.tables.layer import Capabilities, Layer
from dagster_adjunct.resources.tables.operation import Operation
from dagster_adjunct.resources.tables.outcomes import Outcomes
from dagster_adjunct.resources.tables.table_functions import StoreFunction


class LayerAsFunction(StoreFunction[Any, Any, Any]):
    """A function that hands each operation to `layer`; `capabilities` are those of the function beneath it.

    So a single layer has the methods of a table, and may stand under all layers of another one. What a layer keeps
    belongs to its process: one that is to travel to tasks is made there.
    """

    def __init__(self, layer: Layer, capabilities: Capabilities) -> None:
        self._layer = layer
        self._capabilities = capabilities

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def send(self, operation: Operation[Any]) -> Outcomes:
        return await self._layer.send(operation)

    async def close(self) -> None:
        await self._layer.close()
