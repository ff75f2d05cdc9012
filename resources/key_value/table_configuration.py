"""`KeyValueTableConfiguration`: what is declared of a table when it is created."""

from __future__ import annotations

from dataclasses import dataclass

from dagster_adjunct.resources.checked_numbers import check_whole_number
from dagster_adjunct.resources.errors import ConfigurationError

MOST_PARTITIONS = 2**16
"""On every backend: more would not fit the two bytes that some of them have for its number."""


@dataclass(frozen=True, slots=True)
class KeyValueTableConfiguration:
    """How many partitions a table has, for ever, and what its entries may have at most, besides the backend's limits.

    `longest_key` counts the bytes of a serialised key without its family, `longest_value` those of a serialised value.
    """

    partitions: int
    longest_key: int | None = None
    longest_value: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("partitions", 1), ("longest_key", 0), ("longest_value", 0)):
            value = getattr(self, name)
            if value is not None or name == "partitions":
                check_whole_number(
                    value,
                    f"{name}={value!r} of a key-value table",
                    f"a whole number from {least} on",
                    argument=name,
                    least=least,
                )
        if self.partitions > MOST_PARTITIONS:
            raise ConfigurationError(
                f"partitions={self.partitions:,} of a key-value table: expected at most {MOST_PARTITIONS:,}.",
                "Choose fewer: any number of families share a partition.",
                argument="partitions",
            )
