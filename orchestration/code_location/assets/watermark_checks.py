"""The asset checks of the watermarks of an application's inputs: how far they are behind the clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dagster import AssetCheckResult, AssetCheckSeverity, AssetCheckSpec

from dagster_adjunct.orchestration.application.dagster_names import dagster_name

if TYPE_CHECKING:
    from dagster import AssetExecutionContext, AssetSpec

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.spec.column_lineage import LineageNode
    from dagster_adjunct.orchestration.step.progress.time_progress import InputTimes


def watermark_check_specs(app: Application, outputs: Mapping[LineageNode, AssetSpec]) -> dict[str, AssetCheckSpec]:
    """Return the check of each input stream that declares `max_watermark_lag`: on the application's first output."""
    first = next(iter(outputs.values()), None)
    checks = {}
    for name, source in app.inputs.items():
        declared = source.event_time
        if first is not None and declared is not None and declared.max_lag is not None:
            checks[name] = AssetCheckSpec(
                dagster_name(f"watermark_lag_{name}"),
                asset=first.key,
                description=f"How far the watermark of {name} is behind the clock: at most {declared.max_lag}.",
                metadata={"adjunct/max_watermark_lag_seconds": declared.max_lag.total_seconds()},
            )
    return checks


def watermark_check_results(
    context: AssetExecutionContext, checks: Mapping[str, AssetCheckSpec], inputs: Sequence[InputTimes]
) -> Iterator[AssetCheckResult]:
    """Yield the result of each selected check whose input has had a record."""
    selected = set(context.selected_asset_check_keys)
    for times in inputs:
        check = checks.get(times.stream)
        if check is None or check.key not in selected or times.newest is None:
            continue
        metadata: dict[str, Any] = {"adjunct/watermark": str(times.watermark), "adjunct/idle": len(times.idle)}
        if times.lag is not None:
            metadata["adjunct/watermark_lag_seconds"] = times.lag.total_seconds()
        if times.held_by is not None:
            metadata["adjunct/held_back_by"] = times.held_by
        yield AssetCheckResult(
            asset_key=check.asset_key,
            check_name=check.name,
            passed=not times.exceeds,
            severity=AssetCheckSeverity.WARN,
            description=f"{times.words()}; {times.max_lag} is allowed",
            metadata=metadata,
        )
