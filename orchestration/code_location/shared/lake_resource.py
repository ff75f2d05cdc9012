"""The lake as a Dagster resource: an address, opened when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dagster import ConfigurableResource
from pydantic import Field, PrivateAttr

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects import Lake


class LakeResource(ConfigurableResource):  # type: ignore[type-arg]
    """Where streams, datasets and batch logs are. Without a URL: `ADJUNCT_LAKE`, else `.adjunct/lake`.

    Nothing is opened, and no network touched, before `open` is called: loading a code location stays offline.
    """

    url: str | None = Field(default=None, description="s3://bucket/prefix or a folder.")

    _lake: Any = PrivateAttr(default=None)

    def open(self) -> Lake:
        """Return the lake; its first opening ever probes the store."""
        if self._lake is None:
            from dagster_adjunct.resources.objects.lake import open_lake

            self._lake = open_lake(self.url)
        lake: Lake = self._lake
        return lake
