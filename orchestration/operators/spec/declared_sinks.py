"""What operators ask of the application that they stand in: its outputs, datasets and tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset


class KeyedTable(Protocol):
    """What planning needs of a remote table: its name and the columns of its key."""

    @property
    def name(self) -> str: ...

    @property
    def key(self) -> tuple[str, ...]: ...


class DeclaredOutput(Protocol):
    """An output stream: "system.stream", its partition count, and the columns that choose the partition."""

    @property
    def name(self) -> str: ...

    @property
    def partitions(self) -> int: ...

    @property
    def key(self) -> tuple[str, ...]: ...


class Declarations(Protocol):
    """What an application declares, by name."""

    @property
    def name(self) -> str: ...

    @property
    def outputs(self) -> Mapping[str, DeclaredOutput]: ...

    @property
    def tables(self) -> Mapping[str, KeyedTable]: ...

    def dataset(self, name: str) -> AdjunctDataset:
        """Return the declared dataset of this name."""
        ...

    def table_key(self, name: str) -> tuple[str, ...]:
        """Return the key columns of a declared remote table."""
        ...
