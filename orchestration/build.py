"""Turns an application into Dagster definitions: assets, one job, a sensor and the resources they need."""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dagster import (
    AssetExecutionContext,
    AssetsDefinition,
    AssetSpec,
    DataVersion,
    Definitions,
    Failure,
    MaterializeResult,
    define_asset_job,
    in_process_executor,
    multi_asset,
)

from orchestration.graph import SendToStream, SendToTable
from orchestration.lake_resource import LakeResource
from orchestration.metadata import column_schema, counters_metadata, dataset_metadata, step_metadata
from orchestration.sensors import new_records_sensor
from orchestration.translator import AdjunctTranslator, AssetSubject
from resources.errors import AdjunctError, TransientError
from resources.spark import SparkResource

if TYPE_CHECKING:
    from assets.dataset import AdjunctDataset
    from orchestration.application import Application
    from orchestration.step import StepEvent

# What the step does, for whoever follows it from outside of Dagster; records carry the event itself.
_log = logging.getLogger("adjunct.step")
_CONCURRENCY = "adjunct/application"


def build_definitions(
    app: "Application",
    *,
    translator: AdjunctTranslator | None = None,
    lake: str | None = None,
    spark: SparkResource | None = None,
) -> Definitions:
    """Return Dagster definitions for an application; nothing is opened or planned while loading.

    Each dataset is an asset, the application's outputs are one multi-asset, and the streams that it reads are
    external assets, all in one lineage graph. The job `<application>` runs the whole in one process, on one
    Spark session; the sensor `<application>_new_records` launches it when input waits. `translator` gives keys,
    groups, owners; `lake` is a URL (default: `ADJUNCT_LAKE`, else `.adjunct/lake`).
    """
    names = translator or AdjunctTranslator()
    assets = [_dataset_asset(app, dataset, names) for dataset in app.datasets]
    assets.append(_outputs_asset(app, names))
    sources = [_spec(names, _stream(app, name)) for name in _source_streams(app)]
    job = define_asset_job(
        app.name.replace("-", "_"),
        selection=[key for definition in assets for key in definition.keys],
        description=app.description or None,
        executor_def=in_process_executor,
        tags={_CONCURRENCY: app.name},
    )
    return Definitions(
        assets=[*sources, *assets],
        jobs=[job],
        sensors=[new_records_sensor(app, job)],
        resources={
            "adjunct_lake": LakeResource(url=lake),
            "adjunct_spark": spark or SparkResource(lake=lake),
        },
        executor=in_process_executor,
    )


def _source_streams(app: "Application") -> list[str]:
    """Return what the application reads and does not write."""
    written = {op.spec.stream for op in app.operators if isinstance(op.spec, SendToStream)}
    names = [*app.inputs, *(dataset.input for dataset in app.datasets)]
    return [name for name in dict.fromkeys(names) if name not in written]


def _stream(app: "Application", name: str) -> AssetSubject:
    return AssetSubject("stream", name, app.name, owners=app.owners)


def _dataset(app: "Application", dataset: "AdjunctDataset") -> AssetSubject:
    return AssetSubject(
        "dataset", dataset.name, app.name, dataset.description, dataset.owners or app.owners, dataset.group
    )


def _spec(names: AdjunctTranslator, subject: AssetSubject, deps: Sequence[Any] = (), **more: Any) -> AssetSpec:
    return AssetSpec(
        key=names.get_asset_key(subject),
        deps=list(deps),
        group_name=names.get_group_name(subject),
        owners=list(names.get_owners(subject)),
        description=names.get_description(subject),
        kinds=names.get_kinds(subject),
        tags=dict(names.get_tags(subject)),
        **more,
    )


def _dataset_asset(app: "Application", dataset: "AdjunctDataset", names: AdjunctTranslator) -> AssetsDefinition:
    subject = _dataset(app, dataset)
    spec = _spec(names, subject, [names.get_asset_key(_stream(app, dataset.input))])

    @multi_asset(
        name=f"{app.name}_{dataset.name}".replace("-", "_"),
        specs=[spec],
        op_tags={_CONCURRENCY: app.name},
    )
    def build(
        context: AssetExecutionContext, adjunct_lake: LakeResource, adjunct_spark: SparkResource
    ) -> MaterializeResult[Any]:
        from assets import advance_dataset
        from orchestration.catalog import systems_for

        with _clear_failures():
            report = advance_dataset(
                adjunct_lake.open(),
                systems_for(app, adjunct_lake.open()),
                dataset,
                lambda: adjunct_spark.spark_session,
                by=context.run_id,
            )
            uri = f"{adjunct_lake.open().url}/datasets/{dataset.name}"
        context.log.info(report.summary())
        return MaterializeResult(
            asset_key=spec.key,
            metadata=dataset_metadata(report, uri),
            data_version=DataVersion(report.version) if report.version else None,
        )

    return build


def _outputs_asset(app: "Application", names: AdjunctTranslator) -> AssetsDefinition:
    upstream = [names.get_asset_key(_stream(app, name)) for name in app.inputs]
    upstream += [names.get_asset_key(_dataset(app, dataset)) for dataset in app.datasets]
    outputs = dict(_outputs(app, names, upstream))

    @multi_asset(
        name=f"{app.name}_step".replace("-", "_"),
        specs=list(outputs.values()),
        op_tags={_CONCURRENCY: app.name},
        description=app.description or None,
    )
    def step(
        context: AssetExecutionContext, adjunct_lake: LakeResource, adjunct_spark: SparkResource
    ) -> Iterator[MaterializeResult[Any]]:
        from orchestration.catalog import systems_for
        from orchestration.run import plan_application
        from orchestration.step import StepContext, run_step
        from orchestration.tables import remember_tables

        def log(event: "StepEvent") -> None:
            context.log.info(event.summary())
            _log.info(event.summary(), extra={"adjunct_event": event})

        lake = adjunct_lake.open()
        systems = systems_for(app, lake)
        with _clear_failures():
            planned = plan_application(app, systems)
            remember_tables(lake, app, by=context.run_id)
            report = run_step(
                StepContext(lake, systems, app, planned, lambda: adjunct_spark.spark_session, context.run_id, log)
            )
        for name, spec in outputs.items():
            metadata = step_metadata(report) | counters_metadata(report.counters.get(name, {}))
            if "." in name:
                system, _, stream = name.partition(".")
                metadata |= _stream_metadata(systems[system], stream, f"{lake.url}/streams/{stream}")
            state = f"{app.name}:{report.state.batch}"
            version = hashlib.sha256(state.encode()).hexdigest()[:16]
            yield MaterializeResult(asset_key=spec.key, metadata=metadata, data_version=DataVersion(version))

    return step


def _outputs(app: "Application", names: AdjunctTranslator, upstream: Sequence[Any]) -> Iterator[tuple[str, AssetSpec]]:
    """Yield (name, spec) of every output; one that is written from another output depends on that."""
    sent: dict[str, str] = {}
    for operator in app.operators:
        source = sent.get(operator.inputs[0]) if operator.inputs else None
        if isinstance(operator.spec, SendToStream):
            subject, name = _stream(app, operator.spec.stream), operator.spec.stream
        elif isinstance(operator.spec, SendToTable):
            name = operator.spec.table
            function = getattr(app.tables[name], "write_function", None)
            storage = type(function).__name__.removesuffix("Table").lower() if function else ""
            subject = AssetSubject("table", name, app.name, owners=app.owners, storage=storage)
        else:
            if source:
                sent[operator.id] = source
            continue
        deps = [names.get_asset_key(_stream(app, source))] if source else upstream
        yield name, _spec(names, subject, deps)
        sent[operator.id] = name if isinstance(operator.spec, SendToStream) else (source or "")


def _stream_metadata(system: Any, stream: str, uri: str) -> dict[str, Any]:
    info = system.info(stream)
    upcoming = system.upcoming(system.partitions(stream))
    metadata: dict[str, Any] = {
        "dagster/uri": uri,
        "adjunct/upcoming": {str(ssp): offset for ssp, offset in upcoming.items()},
        "dagster/row_count": sum(system.distance(ssp, system.oldest([ssp])[ssp], end) for ssp, end in upcoming.items()),
    }
    if info.schema is not None:
        metadata["dagster/column_schema"] = column_schema(info.schema)
    return metadata


@contextmanager
def _clear_failures() -> Iterator[None]:
    """Turn our own errors into Dagster failures that say what to do; permanent ones are not retried."""
    try:
        yield
    except AdjunctError as error:
        raise Failure(
            description=str(error),
            metadata={"error": type(error).__name__, "next step": error.next_step or "See the message."},
            allow_retries=isinstance(error, TransientError),
        ) from error
