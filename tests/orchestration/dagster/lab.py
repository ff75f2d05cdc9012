"""A lake, a Dagster instance and streams to deliver versions on, built without Spark; runs and
what they said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
from dagster import (
    AssetCheckKey,
    AssetKey,
    DagsterInstance,
    Definitions,
    ExecuteInProcessResult,
    asset,
)

from dagster_adjunct import (
    AdjunctDataset,
    Application,
    Lake,
    LakeStreams,
    Schema,
    SparkResource,
    build_definitions,
    open_lake,
)
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.orchestration.step.context import StepContext
from dagster_adjunct.orchestration.step.progress import StepReport

SCHEMA = Schema.of(item="string", label="string", price="int")
Row = tuple[str, str, int]
APPLES: list[Row] = [("a", "Apple", 1), ("b", "Bread", 2)]

NO_SPARK = SparkResource(master="none")


@dataclass
class Lab:
    """Streams with the columns of SCHEMA, keyed by item, in two partitions."""

    lake: Lake
    instance: DagsterInstance
    sequences: dict[str, int] = field(default_factory=dict)

    @property
    def streams(self) -> LakeStreams:
        return LakeStreams(self.lake)

    def deliver(self, stream: str, rows: Sequence[Row], version: str | None) -> None:
        """Append rows to a stream, and the version's marker in both partitions."""
        self.streams.create(stream, schema=SCHEMA, key=["item"], partitions=2)
        number = self.sequences[stream] = self.sequences.get(stream, 0) + 1
        table = pa.Table.from_pylist(
            [dict(zip(SCHEMA.names, row, strict=True)) for row in rows], SCHEMA.to_arrow()
        )
        self.streams.append(stream, table, producer="lab", sequence=number, end_of_dataset=version)

    def mark(self, stream: str, version: str, rows: Mapping[int, int]) -> None:
        """Append markers that expect so many records in each partition."""
        number = self.sequences[stream] = self.sequences.get(stream, 0) + 1
        self.streams.append_markers(stream, version, producer="lab", sequence=number, rows=rows)

    def store(self, name: str) -> StoredVersions:
        return StoredVersions(self.lake, name)

    def definitions(self, *datasets: AdjunctDataset, names: str = "shop") -> Definitions:
        """Return the definitions of an application with these datasets, and an asset downstream
        of the first.
        """
        app = Application(names)
        app.input_stream("lake.orders").send_to(app.output_stream("lake.copy", partitions=1))
        for dataset in datasets:
            app.table(dataset)

        @asset(deps=[key_of(datasets[0])])
        def report() -> None:
            """Something of the user's own, made from the dataset."""

        return Definitions.merge(
            build_definitions(app, lake=self.lake.url, spark=NO_SPARK), Definitions(assets=[report])
        )

    def run(self, defs: Definitions, *keys: AssetKey, **options: Any) -> FinishedRun:
        """Materialise assets as the UI does, with their checks."""
        job = defs.resolve_implicit_global_asset_job_def()
        result = job.execute_in_process(
            instance=self.instance, asset_selection=list(keys), raise_on_error=False, **options
        )
        return FinishedRun(result, self.instance)

    def advance(self, *datasets: AdjunctDataset, **options: Any) -> FinishedRun:
        return self.run(
            self.definitions(*datasets), *map(key_of, datasets), AssetKey("report"), **options
        )


@contextmanager
def steps_run_by(run_step: Callable[[StepContext], StepReport]) -> Iterator[None]:
    """Have `run_step` run the steps of applications, instead of Spark."""
    with patch("dagster_adjunct.orchestration.step.run.run_step", run_step):
        yield


@dataclass
class FinishedRun:
    """A run that is over, and what it said."""

    result: ExecuteInProcessResult
    instance: DagsterInstance

    @property
    def success(self) -> bool:
        return self.result.success

    @property
    def events(self) -> list[Any]:
        """All events as they are stored: also those of a step that failed."""
        records = self.instance.all_logs(self.result.run_id)
        return [record.dagster_event for record in records if record.dagster_event]

    @property
    def log(self) -> str:
        return "\n".join(
            f"{record.level} {record.user_message}"
            for record in self.instance.all_logs(self.result.run_id)
        )

    @property
    def made(self) -> dict[str, dict[str, Any]]:
        """The metadata of what was materialised, by asset, and by "asset/partition"."""
        materializations = [
            event.step_materialization_data.materialization
            for event in self.events
            if event.is_step_materialization
        ]
        return {
            named(materialization): (
                plain(materialization.metadata) | {"data version": version_of(materialization)}
            )
            for materialization in materializations
        }

    @property
    def observed(self) -> dict[str, dict[str, Any]]:
        observations = [
            event.asset_observation_data.asset_observation
            for event in self.events
            if event.event_type_value == "ASSET_OBSERVATION"
        ]
        return {named(observation): plain(observation.metadata) for observation in observations}

    @property
    def rejections(self) -> list[tuple[str | None, dict[str, Any]]]:
        """The events of versions that were rejected: what they say, and their metadata."""
        observations = [
            event.asset_observation_data.asset_observation
            for event in self.events
            if event.event_type_value == "ASSET_OBSERVATION"
        ]
        return [
            (observation.description, plain(observation.metadata))
            for observation in observations
            if "adjunct/rejected_version" in observation.metadata
        ]

    @property
    def checks(self) -> dict[str, Any]:
        """The evaluations of this run by "dataset check"."""
        evaluations = [
            event.asset_check_evaluation_data
            for event in self.events
            if event.event_type_value == "ASSET_CHECK_EVALUATION"
        ]
        return {
            f"{named(evaluation)} {evaluation.check_name}": evaluation for evaluation in evaluations
        }

    @property
    def passed(self) -> dict[str, bool]:
        return {name: evaluation.passed for name, evaluation in self.checks.items()}

    @property
    def failure(self) -> Any:
        (event,) = self.result.get_step_failure_events()
        return event.step_failure_data.user_failure_data


def key_of(dataset: AdjunctDataset) -> AssetKey:
    return AssetKey(["datasets", dataset.name.replace("-", "_") + "_dataset"])


def check_of(dataset: AdjunctDataset, name: str) -> AssetCheckKey:
    return AssetCheckKey(key_of(dataset), name)


def named(event: Any) -> str:
    """Return a dataset's name, or the last part of another asset's key, and the partition."""
    partition = getattr(event, "partition", None)
    return "/".join(
        [event.asset_key.path[-1].removesuffix("_dataset"), *([partition] if partition else [])]
    )


def plain(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.value for name, value in metadata.items()}


def version_of(materialization: Any) -> str | None:
    version: str | None = (materialization.tags or {}).get("dagster/data_version")
    return version


@contextmanager
def running_lab(folder: Path) -> Iterator[Lab]:
    with DagsterInstance.ephemeral() as instance:
        yield Lab(open_lake(folder / "lake"), instance)
