"""Partial updates with a default for the first one (SAMZA-2709): what a caller says.

What is done about it is in update_contract_layer.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from dagster_adjunct.resources.errors import TableError

V = TypeVar("V")
U = TypeVar("U")


class UpdateContract(Enum):
    """What may be done when an update meets no record."""

    UPDATE_ONLY = "update-only"
    UPDATE_WITH_DEFAULTS = "update-with-defaults"


@dataclass(frozen=True, slots=True)
class UpdateMessage(Generic[U, V]):
    """A part of a record to set (`update`), and the whole record to begin with where there is none."""

    update: U
    default: V | None = None

    def __post_init__(self) -> None:
        if self.update is None:
            raise TableError(
                "an UpdateMessage has None as its update; it must say what to change.",
                "Drop the message, or use delete() to remove a record.",
            )
