"""Slots of Dagster's pools that runs keep after their process was killed.

With the granularity "op", Dagster's default, an op claims a slot of its pool and gives it back at
its end. An op whose process is killed gives nothing back, also when its run is terminated: the next
run waits until somebody frees the slot.
"""

from collections.abc import Collection

import dagster as dg

from dagster_adjunct.orchestration.code_location.dagster_internals import PoolGranularity
from dagster_adjunct.orchestration.code_location.metadata import has_ended

FREE_SLOTS = (
    "Set run_monitoring: {enabled: true, free_slots_after_run_end_seconds: 60} in dagster.yaml, or"
    " concurrency: {pools: {granularity: run}}, which needs no slots"
)
"""What lets the slots of killed runs be freed."""


def keeps_slots(instance: dg.DagsterInstance) -> bool:
    """Whether a killed run keeps its slot in a pool for good, by the settings of this instance."""
    pools = instance.get_concurrency_config().pool_config
    has_slots = instance.event_log_storage.supports_global_concurrency_limits
    if pools.pool_granularity is PoolGranularity.RUN or not has_slots:
        return False
    frees = instance.run_monitoring_settings.get("free_slots_after_run_end_seconds")
    if instance.run_monitoring_enabled and frees:
        return False
    limits = (limit.limit for limit in instance.event_log_storage.get_pool_limits())
    return pools.default_pool_limit is not None or any(limit is not None for limit in limits)


def describe_held_slots(instance: dg.DagsterInstance, pools: Collection[str]) -> str:
    """Return which of these pools have a slot of a run that has ended, and what frees it; "" if
    none has one.
    """
    storage = instance.event_log_storage
    if not pools or not storage.supports_global_concurrency_limits:
        return ""
    for pool in sorted(pools):
        for run in sorted(storage.get_concurrency_info(pool).active_run_ids):
            if has_ended(instance, run):
                held = (
                    f"It waits for the slot that run {run[:8]} keeps in the pool {pool}, though"
                    " that run has ended."
                )
                if keeps_slots(instance):
                    return f"{held} Free it in the UI (Deployment, Concurrency). {FREE_SLOTS}."
                return f"{held} The daemon frees it soon."
    return ""
