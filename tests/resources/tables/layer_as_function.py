"""A layer as the function of a table: it has only the layer's `send`."""

from __future__ import annotations

from typing import Any

from dagster_adjunct.resources.tables.layer import Capabilities, Layer
from dagster_adjunct.resources.tables.operation import Operation
from dagster_adjunct.resources.tables.outcomes import Outcomes
from dagster_adjunct.resources.tables.table_functions import StoreFunction


class LayerAsFunction(StoreFunction[Any, Any, Any]):
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
