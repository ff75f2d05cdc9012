"""Opens an application's stream systems and reads the facts of its streams, the only I/O of planning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.stream_facts import Catalog, StreamCatalog, StreamFacts
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.common import split_stream_name
from dagster_adjunct.resources.errors import ConfigurationError, StreamNotFoundError
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.streams.registry import open_systems
from dagster_adjunct.resources.streams.system import StreamSystem


def systems_for(app: Application, *, lake: Lake | None = None) -> dict[str, StreamSystem]:
    """Return the stream systems of an application's streams, by name; `lake` defaults to `open_lake()`."""
    return open_systems(open_lake() if lake is None else lake, _stream_names(app))


def open_dataset_systems(datasets: Iterable[AdjunctDataset], lake: Lake) -> dict[str, StreamSystem]:
    """Return the stream systems of the datasets' source streams, by name."""
    return open_systems(lake, (dataset.stream for dataset in datasets if dataset.stream))


def read_catalog(app: Application, systems: Mapping[str, StreamSystem]) -> Catalog:
    """Return the facts of the application's streams that exist."""
    facts: dict[str, StreamFacts] = {}
    missing: dict[str, str] = {}
    for name in sorted(_stream_names(app)):
        system, stream = split_stream_name(name)
        if system not in systems:
            raise ConfigurationError(
                f"application {app.name!r} reads {name}, and no stream system {system!r} is given: there are "
                f"{', '.join(systems) or 'none'}.",
                "Pass what systems_for(app) returns.",
                application=app.name,
            )
        try:
            info = systems[system].info(stream)
        except StreamNotFoundError as error:
            missing[name] = error.problem
            continue
        facts[name] = StreamFacts(
            name,
            info.partitions,
            info.key,
            info.partitioner,
            info.schema,
            systems[system].evolves,
            systems[system].numbered_offsets,
        )

    def size_of(stream: str) -> int | None:
        system, name = split_stream_name(stream)
        return systems[system].stored_bytes(name)

    return StreamCatalog(facts, missing, size_of, {name: system.new_streams for name, system in systems.items()})


def plan_application(
    app: Application, *, lake: Lake | None = None, systems: Mapping[str, StreamSystem] | None = None
) -> ExecutionPlan:
    """Return the application's plan over the current streams; raises PlanningError if there is none.

    `systems` defaults to those of the application in `lake`, and `lake` to `open_lake()`.
    """
    return build_plan(app, read_catalog(app, systems_for(app, lake=lake) if systems is None else systems))


def _stream_names(app: Application) -> set[str]:
    return {*app.inputs, *app.outputs, *(dataset.stream for dataset in app.datasets if dataset.stream)}
