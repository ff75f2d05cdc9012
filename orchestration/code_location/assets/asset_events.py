"""What a run tells Dagster of an asset: a materialisation where it has changed, an observation where it has not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dagster import AssetMaterialization, AssetObservation, DataVersion, MaterializeResult, Output
from dagster._core.definitions.source_asset import SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION

from dagster_adjunct.orchestration.code_location.shared.asset_metadata import DATA_VERSION_TAG

if TYPE_CHECKING:
    from dagster import AssetExecutionContext, AssetKey, OpExecutionContext

AssetEvent = MaterializeResult[Any] | AssetMaterialization | Output[None]


def known_version(context: AssetExecutionContext | OpExecutionContext, key: AssetKey) -> str | None:
    """Return the data version of the asset's newest materialisation, None before the first."""
    known = context.instance.get_latest_materialization_event(key)
    tags = known.asset_materialization.tags if known and known.asset_materialization else None
    return (tags or {}).get(DATA_VERSION_TAG)


def told(
    context: AssetExecutionContext,
    key: AssetKey,
    version: str,
    metadata: Mapping[str, Any],
    description: str,
    *,
    always: bool = False,
) -> Iterator[AssetEvent]:
    """Yield what tells Dagster that the asset is at this data version now.

    It is materialised where Dagster knows of another version (or `always`), and observed otherwise: what waits for
    something new is not woken up, and what is downstream in this run goes on all the same.
    """
    selected = key in context.selected_asset_keys
    if not always and known_version(context, key) == version:
        context.log_event(
            AssetObservation(key, description=description, metadata=metadata, tags={DATA_VERSION_TAG: version})
        )
        if selected:
            yield passed_on(context, key)
    elif selected:
        yield MaterializeResult(asset_key=key, metadata=metadata, data_version=DataVersion(version))
    else:
        # Made together with what was selected, as the members of a version set are.
        yield AssetMaterialization(key, metadata=metadata, tags={DATA_VERSION_TAG: version})


def passed_on(context: AssetExecutionContext, key: AssetKey) -> Output[None]:
    """Return an asset's output without a materialisation, so that what is downstream in the run is not skipped.

    Dagster makes an event of each output of an asset, but of those that it marks so: observable source assets have told
    of themselves by then.
    """
    name = context.assets_def.get_output_name_for_asset_key(key)
    return Output(None, output_name=name, metadata={SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION: True})


def check_outputs(
    context: AssetExecutionContext, evaluated: set[tuple[AssetKey | None, str | None]]
) -> Iterator[Output[None]]:
    """Yield the outputs of the selected checks that gave none by a result: Dagster expects one of each, and says so."""
    for check in context.selected_asset_check_keys:
        if (check.asset_key, check.name) not in evaluated:
            yield Output(None, output_name=context.assets_def.get_output_name_for_asset_check_key(check))
