"""Since when a version is valid, as the marker that ends it says: stored as microseconds since the epoch."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from dagster_adjunct.resources.errors import ConfigurationError

_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)


def micros_of_marker(version: str | None, valid_from: datetime | None) -> int | None:
    """Return what a marker stores of `valid_from`. Raises ConfigurationError for a time without zone or version."""
    if valid_from is None:
        return None
    if not isinstance(valid_from, datetime) or valid_from.tzinfo is None or version is None:
        what = "no version is ended" if version is None else f"version {version!r}"
        raise ConfigurationError(
            f"{what}, with valid_from={valid_from!r}: expected a version that ends, and a time with its zone.",
            "Give end_of_dataset, and a datetime with tzinfo=UTC.",
            argument="valid_from",
        )
    return (valid_from - _BEGIN) // timedelta(microseconds=1)


def time_of_micros(micros: int) -> datetime:
    """Return the moment that a marker stores."""
    return _BEGIN + timedelta(microseconds=micros)
