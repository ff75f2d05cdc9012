"""Where a lake's key-value tables lie when nobody says where: in SQLite beside a local lake, else in the lake itself.

    {"lake": "sqlite"}     FOLDER.key-values.sqlite, beside the lake's FOLDER
    {"lake": "objects"}    objects of the lake; also of a local one that several machines share: SQLite's locks don't

It is stored relative to the lake, so that a lake that is mounted or copied elsewhere never reaches for the tables of
the one that it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.lake import Lake

_LAKE = "lake"
IN_SQLITE = {_LAKE: "sqlite"}
IN_OBJECTS = {_LAKE: "objects"}


def own_backends(lake: Lake) -> tuple[dict[str, str], ...]:
    """Return the lake's own backends, relative to it; the first is what tables are made in unless somebody says."""
    is_local = "://" not in lake.store.descriptor.url
    return (IN_SQLITE, IN_OBJECTS) if is_local and not lake.shared else (IN_OBJECTS,)


def backend_in(lake: Lake, description: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `backend_from` takes for a stored description; objects of the lake are reached as the lake is."""
    if description.keys() != {_LAKE}:
        return dict(description)
    root = lake.store.descriptor.url
    if description == IN_SQLITE and "://" not in root:
        folder = Path(root).resolve()
        return {"backend": "sqlite", "path": str(folder.with_name(f"{folder.name}.key-values.sqlite"))}
    if description == IN_OBJECTS:
        return {"backend": "objects", "url": lake}
    raise ConfigurationError(
        f"a key-value table of {lake.url} lies in {dict(description)!r}, which this lake does not have.",
        "Open the lake where the table was made, or upgrade dagster-adjunct.",
        url=lake.url,
    )
