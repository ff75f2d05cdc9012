"""The asset checks of an application's joins: how many of the records met an entry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dagster import AssetCheckResult, AssetCheckSeverity, AssetCheckSpec

from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.orchestration.application.output_lineage import joins_of

if TYPE_CHECKING:
    from dagster import AssetExecutionContext, AssetSpec

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.spec.column_lineage import LineageNode


_BY_TIME = {"before_history": "were of times before its history", "null_times": "had no time"}


def join_check_specs(app: Application, outputs: Mapping[LineageNode, AssetSpec]) -> dict[str, AssetCheckSpec]:
    """Return the check of each join, by the join's id: on the first output that its records reach."""
    checks = {}
    joins = joins_of(app)
    for operator, node in joins.items():
        match = app.operator(operator).spec.match
        assert match is not None
        least = match.min_rate
        demanded = "no rate is demanded" if least is None else f"at least {least:.1%} must"
        named = operator.split("-", 2)[2]
        twice = [join for join in joins if join.split("-", 2)[2] == named][1:]
        checks[operator] = AssetCheckSpec(
            dagster_name(f"match_rate_{operator if operator in twice else named}"),
            asset=outputs[node].key,
            description=f"How many of a run's records meet an entry of {match.node.name} ({operator}): {demanded}.",
            metadata={} if least is None else {"adjunct/min_match_rate": float(least)},
        )
    return checks


def join_check_results(
    context: AssetExecutionContext,
    app: Application,
    checks: Mapping[str, AssetCheckSpec],
    counters: Mapping[str, Mapping[str, int]],
) -> Iterator[AssetCheckResult]:
    """Yield the result of each selected check whose join has seen records in this run."""
    selected = set(context.selected_asset_check_keys)
    for operator, check in checks.items():
        rows, unmatched = (counters.get(operator, {}).get(name, 0) for name in ("rows", "unmatched"))
        match = app.operator(operator).spec.match
        if not rows or check.key not in selected or match is None:
            continue
        rate = (rows - unmatched) / rows
        metadata: dict[str, Any] = {
            "adjunct/match_rate": rate,
            "adjunct/unmatched": unmatched,
            "adjunct/rows": rows,
            f"adjunct/{match.node.kind}": match.node.name,
        }
        by_time = {name: counters[operator][name] for name in _BY_TIME if name in counters[operator]}
        metadata |= {f"adjunct/{name}": count for name, count in by_time.items()}
        least = match.min_rate
        if least is not None:
            metadata["adjunct/min_match_rate"] = float(least)
        demanded = "" if least is None else f"; at least {least:.1%} is demanded"
        demanded += "".join(f"; {count:,} {_BY_TIME[name]}" for name, count in by_time.items() if count)
        yield AssetCheckResult(
            asset_key=check.asset_key,
            check_name=check.name,
            passed=least is None or rate >= least,
            severity=AssetCheckSeverity.ERROR,
            description=f"{rate:.2%} of {rows:,} records met an entry of {match.node.name}{demanded}",
            metadata=metadata,
        )
