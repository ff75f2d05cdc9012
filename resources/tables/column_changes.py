"""`Changes`: an update that says for each column what is done to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dagster_adjunct.resources.errors import ConfigurationError

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Changes:
    """What an update does to columns; a plain mapping as an update is the same as `Changes(set=mapping)`.

    - `set`: gives columns their values; None sets null.
    - `add`: adds numbers to columns; a column that is null or not there counts as 0. None adds nothing. What is added
      to a column of JSON is a mapping, whose members replace those of the same names and leave the others alone.
    - `append`: puts values at the end of list columns; one that is null or not there counts as empty. Each value is a
      list of what is appended; None or an empty list appends nothing.
    - `remove`: makes columns null, or takes them out of records whose store has no fixed columns.

    A column is named in one of the four only.
    """

    set: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    add: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    append: Mapping[str, Sequence[Any]] = field(default_factory=lambda: _NOTHING)
    remove: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.remove, str):
            raise ConfigurationError(
                f"Changes have remove={self.remove!r}, which is one text; expected the names of columns.",
                f"Write remove=[{self.remove!r}].",
                argument="remove",
            )

    @property
    def repeatable(self) -> bool:
        """Whether applying it twice in a row comes to the same as once."""
        return not self.add and not self.append


def changes_of(update: Mapping[str, Any] | Changes) -> Changes:
    """The update as `Changes`."""
    return update if isinstance(update, Changes) else Changes(set=update)
