"""A change format that does something before each decoding: what happens meanwhile, or goes
wrong, in an advance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pyarrow as pa

from dagster_adjunct.assets.declaration.change_formats import Upserts
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.resources.schemas.schema import Schema


@dataclass(frozen=True, slots=True)
class Acting(Upserts):
    """Upserts, decoded in process, before which `act` is called."""

    act: Callable[[], object] = lambda: None

    def decode_arrow(self, records: pa.Table, schema: Schema) -> pa.Table:
        self.act()
        return Upserts.decode_arrow(self, records, schema)


def acting(dataset: AdjunctDataset, act: Callable[[], object]) -> AdjunctDataset:
    """Return the table with `act` called before each chunk of its changes is decoded."""
    return replace(dataset, following=replace(dataset.following, changes=Acting(act)))


def failing(dataset: AdjunctDataset, chunk: int, error: Exception) -> AdjunctDataset:
    """Return the table with this error at the chunk of this number, once."""
    chunks: list[None] = []

    def act() -> None:
        chunks.append(None)
        if len(chunks) == chunk:
            raise error

    return acting(dataset, act)
