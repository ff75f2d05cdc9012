"""`KeyValueTableConfiguration`: what a key-value table is created with."""

from __future__ import annotations

from dataclasses import dataclass

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.key_value.addressing import LONGEST

MOST_PARTITIONS = 10_000


@dataclass(frozen=True, slots=True)
class KeyValueTableConfiguration:
    """How many partitions a table has, for ever, and what it takes.

    `longest_key` and `longest_value` are bytes of a serialised key (without its family) and of a serialised value;
    None leaves it to the backend. They can be changed: handles that are open go by what they were opened with, and
    entries that are there already stay.
    """

    partitions: int
    longest_key: int | None = None
    longest_value: int | None = None

    def __post_init__(self) -> None:
        _check("partitions", self.partitions, MOST_PARTITIONS)
        if self.longest_key is not None:
            _check("longest_key", self.longest_key, LONGEST)
        if self.longest_value is not None:
            _check("longest_value", self.longest_value, None)


def _check(name: str, value: object, most: int | None) -> None:
    in_range = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= (most or value)
    if not in_range:
        raise ConfigurationError(
            f"{name} of a key-value table is {value!r}: expected a whole number "
            + ("from 1 on." if most is None else f"from 1 to {most:,}."),
            "Change it.",
            argument=name,
        )
