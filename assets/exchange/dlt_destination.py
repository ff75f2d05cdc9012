"""A dlt destination whose tables are lake streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt

from dagster_adjunct.assets.exchange.dlt_target import LONGEST_NAME, LoadTarget
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.optional_packages import import_package
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from dlt.common.destination import Destination


@validated
def lake_destination(
    lake: Lake,
    prefix: str,
    *,
    partitions: PositiveInt | Mapping[str, PositiveInt] = 1,
    schemas: Mapping[str, Schema] | None = None,
) -> Destination[Any, Any]:
    """Return a dlt destination that appends each table of a load to the stream `prefix-TABLE` of
    the lake, once.

    A stream is created by the first load of its table, with the columns that dlt found, the primary
    key as key, and so many `partitions` (also by table). `schemas` declare types of columns by
    table, which are otherwise dlt's, and for nested values what they have. Pass the result to
    `dlt.pipeline(destination=…)`. Raises ConfigurationError without the extra `dlt`.
    """
    check_name("prefix", prefix)
    import_package("lake_destination", "dlt", "dlt")
    target = LoadTarget(lake, prefix, partitions, schemas or {})
    if target.longest_table < 40:
        problem = f"prefix= is {prefix!r}, which leaves {target.longest_table} characters for names"
        raise ConfigurationError(
            f"{problem} of tables: expected at least 40, as names of streams have at most"
            f" {LONGEST_NAME}.",
            "Shorten the prefix.",
            argument="prefix",
        )
    from dagster_adjunct.assets.exchange.dlt_client import LakeDestination

    return LakeDestination(target=target)
