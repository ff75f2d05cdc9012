"""Where a lake's key-value tables lie when nobody says where: in SQLite beside a local lake, else in the lake itself.

    {"lake": "sqlite"}     FOLDER.key-values.sqlite, beside the lake's FOLDER
    {"lake": "objects"}    objects of the lake; also of a local one that several machines share: SQLite's locks don't

It is stored relative to the lake, so that a lake that is mounted or copied elsewhere never reaches for the tables of
the one that it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.lake import Lake

_LAKE = "lake"
IN_SQLITE = {_LAKE: "sqlite"}
IN_OBJECTS = {_LAKE: "objects"}


def default_backend(lake: Lake) -> dict[str, Any]:
    """Return the description of the lake's own backend, relative to it."""
    is_local = "://" not in lake.store.descriptor.url
    return dict(IN_SQLITE if is_local and not lake.shared else IN_OBJECTS)


def backend_in(lake: Lake, description: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored description as `backend_from` takes it."""
    if _LAKE not in description:
        return dict(description)
    descriptor = lake.store.descriptor
    if description == IN_SQLITE and "://" not in descriptor.url:
        folder = Path(descriptor.url).resolve()
        return {"backend": "sqlite", "path": str(folder.with_name(f"{folder.name}.key-values.sqlite"))}
    if description == IN_OBJECTS:
        s3 = {} if descriptor.s3 is None else {"s3": asdict(descriptor.s3)}
        return {"backend": "objects", "url": descriptor.url, **s3}
    raise ConfigurationError(
        f"a key-value table of {lake.url} lies in {dict(description)!r}, which this lake does not have.",
        "Open the lake where the table was made, or upgrade dagster-adjunct.",
    )
