"""How to reach things: object stores, streams, Spark, tables."""

from __future__ import annotations

from typing import Any

from dagster_adjunct.resources.routed_opener import register_routed_opener


def _open_routed(store: Any, place: str) -> Any:
    from dagster_adjunct.resources.metadata_tables.open_routed import open_routed

    return open_routed(store, place)


register_routed_opener(_open_routed)
