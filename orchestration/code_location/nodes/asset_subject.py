"""`AssetSubject`: one asset to be, as a translator sees it."""

from __future__ import annotations

from dataclasses import dataclass

from dagster_adjunct.orchestration.operators.spec.column_lineage import Kind


@dataclass(frozen=True, slots=True)
class AssetSubject:
    """One asset to be: a stream ("lake.flights"), files (their URL), a dataset ("planes"), a remote table, or what
    an application hands records to ("alerts/notify")."""

    kind: Kind
    name: str
    application: str
    description: str = ""
    owners: tuple[str, ...] = ()
    group: str | None = None
    storage: str = ""
    external: bool = False
    """Read here, and written by no application here: it is nobody's own, so that several may read it."""
