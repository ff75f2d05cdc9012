"""Where in the user's code an asset is declared, as Dagster shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dagster import CodeReferencesMetadataValue, LocalFileCodeReference

if TYPE_CHECKING:
    from dagster_adjunct.resources.declared_place import Place


def code_references(place: Place | None) -> dict[str, Any]:
    """Return the metadata that leads to a line of a file of this machine; nothing for an unknown one."""
    if place is None:
        return {}
    reference = LocalFileCodeReference(file_path=place.file, line_number=place.line, label="declared here")
    return {"dagster/code_references": CodeReferencesMetadataValue(code_references=[reference])}
