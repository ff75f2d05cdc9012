"""What users write of a dataset, in the form that its declaration keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dagster_adjunct.resources.errors import ConfigurationError


def spread_by(
    name: str,
    key: str | Sequence[str],
    partitions: int | None,
    partition_by: str | Sequence[str] | None,
    broadcast: bool,
) -> tuple[str, ...]:
    """Return the columns that choose the bucket: the whole key unless given, none of a broadcast copy."""
    if broadcast == (partitions is not None):
        given = "both partitions and broadcast=True" if broadcast else "neither partitions nor broadcast=True"
        raise ConfigurationError(
            f"dataset {name!r} has {given}: expected exactly one.",
            "Write partitions=N to spread it by key, or broadcast=True for one copy on every task.",
            argument="partitions",
            dataset=name,
        )
    if partition_by is not None:
        return names(partition_by)
    return () if broadcast else names(key)


def names(value: str | Sequence[str]) -> tuple[str, ...]:
    """Return names given as one text or several."""
    return (value,) if isinstance(value, str) else tuple(value)


def descriptions(name: str, given: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    """Return the columns' descriptions as a declaration keeps them."""
    if given is None:
        return ()
    if not isinstance(given, Mapping) or not all(isinstance(text, str) for text in given.values()):
        raise ConfigurationError(
            f"dataset {name!r} has column_descriptions={given!r}: expected a text for each column.",
            'Write {"seats": "Seats, as the manufacturer tells", …}.',
            argument="column_descriptions",
            dataset=name,
        )
    return tuple(given.items())
