"""Adjunct's public API: the only package to import.

Streams joined with versioned reference data and written as partial updates, on Dagster and Spark. Names are loaded when
the first of them is asked for: Spark's tasks import parts of this package, on machines that may have no Dagster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dagster_adjunct._api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dagster_adjunct import _api

    if name not in {*_api.__all__, "__all__"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_api, name)


def __dir__() -> list[str]:
    from dagster_adjunct import _api

    return sorted([*globals(), *_api.__all__])
