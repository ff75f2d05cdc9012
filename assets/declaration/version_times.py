"""Since when a version of a bounded dataset is valid: what is declared to tell it, and the time that is told."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime

from dagster_adjunct.resources.errors import ConfigurationError, MarkerConflictError

NAME, MARKER = "name", "marker"
_EXAMPLE = datetime(2026, 11, 30, 12, 30, 15, tzinfo=UTC)


def check_valid_from(dataset: str, valid_from: str) -> None:
    """Refuse what tells no time. Raises ConfigurationError."""
    if valid_from in (NAME, MARKER):
        return
    try:
        if isinstance(valid_from, str) and "%" in valid_from:
            told = datetime.strptime(_EXAMPLE.strftime(valid_from), valid_from)
            # A week without its day is read, and left out.
            if told.year == _EXAMPLE.year and told.strftime(valid_from) == _EXAMPLE.strftime(valid_from):
                return
    except ValueError:
        pass
    raise ConfigurationError(
        f'dataset {dataset!r} has valid_from={valid_from!r}: expected "name", "marker", or a pattern of dates '
        "with their year.",
        'Write a pattern as strptime reads it, such as "%Y-%m-%d", or "date=%Y-%m-%d" for folders.',
        argument="valid_from",
        dataset=dataset,
    )


def told_time(dataset: str, valid_from: str, version: str, marked: Collection[datetime]) -> datetime:
    """Return since when a version is valid, by its name or by what its markers say; a time without a zone is UTC.

    Raises MarkerConflictError where nothing tells it, or markers tell different times: such a version is refused.
    """
    what = f"dataset {dataset!r}, version {version!r}"
    if valid_from == MARKER:
        if len(set(marked)) == 1:
            return next(iter(marked))
        times = ", ".join(f"{time:%Y-%m-%d %H:%M:%S %Z}" for time in sorted(set(marked)))
        raise MarkerConflictError(
            f"{what}: {f'its markers say different times ({times})' if times else 'no marker says'} since when it is "
            'valid, and valid_from is "marker".',
            'Deliver it under a new name, with one time: append_markers(…, valid_from=…), or "valid_from" in the '
            "completion object.",
            dataset=dataset,
            version=version,
        )
    try:
        told = datetime.fromisoformat(version) if valid_from == NAME else datetime.strptime(version, valid_from)
        return told.astimezone(UTC) if told.tzinfo is not None else told.replace(tzinfo=UTC)
    except (ValueError, OverflowError) as error:
        expected = "a day or a time, such as 2026-01-31" if valid_from == NAME else f"a name like {valid_from!r}"
        raise MarkerConflictError(
            f"{what}: its name does not tell since when it is valid: expected {expected}.",
            "Deliver it under a name that does, or declare what tells it: valid_from=….",
            dataset=dataset,
            version=version,
        ) from error
