"""Advancing: brings a dataset of either kind up to date with its input."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Unpack

from dagster_adjunct.assets.bounded.advance import advance_bounded, advance_version_set
from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    BoundedDataset,
    LocalTable,
    UnboundedDataset,
)
from dagster_adjunct.assets.generation import Runtime, RuntimeOptions, no_session, open_runtime
from dagster_adjunct.assets.reading.dataset import Dataset, open_dataset
from dagster_adjunct.assets.sources.entries import open_changes, require_changes
from dagster_adjunct.assets.unbounded.advance import advance_unbounded
from dagster_adjunct.assets.unbounded.local_table import advance_local
from dagster_adjunct.assets.unbounded.recovery import decide_recovery, inspect_table
from dagster_adjunct.assets.unbounded.transient_table import TransientTable
from dagster_adjunct.assets.versions.reports import AdvanceReport, OnStage, ignore_stage
from dagster_adjunct.resources.arguments import resolve_user
from dagster_adjunct.resources.errors import ConfigurationError, NoSealedVersionError
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.spark.in_process import session_factory
from dagster_adjunct.resources.spark.tasks import translate_spark_errors
from dagster_adjunct.resources.streams.lake.streams import open_systems
from dagster_adjunct.resources.streams.system import StreamSystem, SystemStreamPartition
from dagster_adjunct.resources.validation import validated, validated_methods

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@validated
@translate_spark_errors()
def advance_dataset(
    spec: AdjunctDataset,
    *,
    by: str | None = None,
    partition: str | None = None,
    make_current: bool = False,
    on_stage: OnStage = ignore_stage,
    **where: Unpack[RuntimeOptions],
) -> AdvanceReport:
    """Publish the complete versions of a bounded dataset, or bootstrap and follow an unbounded one.

    A local table is only compacted if due, because its application's batches write it.

    `spark` is called only when there is something to build. Safe to repeat after any failure;
    several datasets may advance at the same time, in threads of one session. `partition` and
    `make_current` are for bounded datasets with version partitions (see `advance_bounded`);
    `on_stage` receives an event at each stage's end and each build's start.
    """
    with open_runtime([spec], by=resolve_user(by), **where) as runtime:
        return advance_with_runtime(
            runtime, spec, partition=partition, make_current=make_current, on_stage=on_stage
        )


@translate_spark_errors()
def advance_with_runtime(
    runtime: Runtime,
    spec: AdjunctDataset,
    *,
    partition: str | None = None,
    make_current: bool = False,
    on_stage: OnStage = ignore_stage,
) -> AdvanceReport:
    """Advance a dataset of any kind as `advance_dataset` does, with the given runtime."""
    if isinstance(spec, BoundedDataset):
        return advance_bounded(
            runtime, spec, partition=partition, make_current=make_current, on_stage=on_stage
        )
    if isinstance(spec, LocalTable):
        return advance_local(runtime, spec, on_stage=on_stage)
    return advance_unbounded(runtime, require_changes(spec), on_stage=on_stage)


@validated_methods
class AdjunctDatasetManager:
    """Advances the datasets of an application, by the streams that feed them.

    A dataset has one input; one stream may feed several datasets, each with its own progress.
    Datasets with `persistent=False` are kept in the manager until `release`, all others in the
    lake. `run_application` needs no manager: it is for programs with their own loop.
    """

    def __init__(
        self,
        datasets: Iterable[AdjunctDataset],
        *,
        lake: Lake | None = None,
        systems: Mapping[str, StreamSystem] | None = None,
    ) -> None:
        datasets = list(datasets)
        if lake is None:
            lake = open_lake()
        if systems is None:
            systems = open_systems(lake, [each.stream for each in datasets if each.stream])
        self._lake = lake
        self._systems = systems
        self._datasets: dict[str, AdjunctDataset] = {}
        for dataset in datasets:
            if self._datasets.setdefault(dataset.name, dataset) != dataset:
                raise ConfigurationError(
                    f"the dataset {dataset.name!r} is given twice with different declarations.",
                    "Declare it once, or give the two datasets different names.",
                    dataset=dataset.name,
                )
        self._transient: dict[str, TransientTable] = {}
        for name, dataset in self._datasets.items():
            if isinstance(dataset, UnboundedDataset) and not dataset.persistent:
                self._transient[name] = TransientTable(systems, dataset)
        self._read: dict[str, Dataset] = {}

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Return, by stream ("lake.weather"), the names of the datasets that it feeds.

        Datasets made from files or a query have no stream and are left out.
        """
        streams: dict[str, tuple[str, ...]] = {}
        for dataset in self._datasets.values():
            if dataset.stream is not None:
                streams[dataset.stream] = (*streams.get(dataset.stream, ()), dataset.name)
        return streams

    def datasets_of(self, stream: str | SystemStreamPartition) -> tuple[AdjunctDataset, ...]:
        """Return the datasets that a stream, or the stream of a partition, feeds."""
        name = _name_stream(stream)
        return tuple(dataset for dataset in self._datasets.values() if dataset.stream == name)

    def takes(self, stream: str | SystemStreamPartition, app_inputs: Collection[str]) -> bool:
        """Whether records of this stream only feed datasets and are not delivered to the
        application.

        `app_inputs` are the streams that the application reads itself.
        """
        if _name_stream(stream) in app_inputs:
            return False
        return bool(self.datasets_of(stream))

    @translate_spark_errors()
    def process(
        self,
        stream: str | SystemStreamPartition,
        spark: SparkSession | Callable[[], SparkSession],
        by: str,
    ) -> dict[str, AdvanceReport]:
        """Advance all datasets that a stream feeds; return their reports by dataset.

        There are none if the stream feeds no dataset: its records are the application's. A member
        of a version set advances with the members that the manager has. Raises what
        `advance_dataset` raises; datasets that advanced before the error keep their progress.
        """
        spark = session_factory(spark)
        reports: dict[str, AdvanceReport] = {}
        for dataset in self.datasets_of(stream):
            if dataset.name in self._transient:
                reports[dataset.name] = self._transient[dataset.name].advance(spark)
            elif dataset.version_set is None:
                reports[dataset.name] = advance_dataset(
                    dataset, lake=self._lake, systems=self._systems, spark=spark, by=by
                )
            elif dataset.name not in reports:
                members = []
                for member in self._datasets.values():
                    if member.version_set == dataset.version_set:
                        members.append(member)
                member_reports = advance_version_set(
                    members, lake=self._lake, systems=self._systems, spark=spark, by=by
                )
                reports |= {report.dataset: report for report in member_reports}
        return reports

    def frame(self, dataset: str, spark: SparkSession | Callable[[], SparkSession]) -> DataFrame:
        """Return the current entries of a dataset, readable until the next call for this dataset or
        `release`.

        For a dataset with `persistent=False`, until the next `process` of its stream. Raises
        DatasetNotFoundError or NoSealedVersionError before the first version. To read by key, use
        `open_dataset`.
        """
        if dataset not in self._datasets:
            raise ConfigurationError(
                f"the manager has no dataset {dataset!r}: it has"
                f" {', '.join(self._datasets) or 'none'}.",
                "Correct the name, or pass the dataset to the manager.",
                dataset=dataset,
            )
        if dataset in self._transient:
            version = self._transient[dataset].view
            if version is None:
                raise NoSealedVersionError(
                    f"dataset {dataset!r} has no version to read yet: nothing has been read of its"
                    " stream.",
                    f"Process {self._datasets[dataset].stream} first.",
                    dataset=dataset,
                )
            return version.frame(spark)
        before = self._read.get(dataset)
        opened = open_dataset(self._lake, self._datasets[dataset])
        self._read[dataset] = opened
        try:
            return opened.frame(spark)
        finally:
            if before is not None:
                before.close()

    def reset_at_start(self) -> set[SystemStreamPartition]:
        """Return the partitions that a run starting now would read from the beginning.

        These are the inputs of datasets with `persistent=False` and bootstrap, and of stored tables
        whose recovery decision is a bootstrap. Reads no records and changes nothing. Raises
        OffsetOutOfRangeError for a table that lost its offset and is declared to fail, and
        DatasetError for a changed declaration.
        """
        ssps: set[SystemStreamPartition] = set()
        for dataset in self._datasets.values():
            if isinstance(dataset, UnboundedDataset):
                ssps |= self._reset_partitions(dataset)
        return ssps

    def _reset_partitions(self, dataset: UnboundedDataset) -> set[SystemStreamPartition]:
        """Return the partitions of a dataset that a run would read from the beginning."""
        if not dataset.persistent:
            if not dataset.bootstrap:
                return set()
            return set(open_changes(self._systems, dataset).ssps)
        runtime = Runtime(self._lake, self._systems, no_session, "manager")
        seen = inspect_table(runtime, dataset)
        if decide_recovery(seen).action != "bootstrap":
            return set()
        return set(seen.source.ssps)

    def release(self) -> None:
        """Free the memory of datasets with `persistent=False`, and release the versions that
        were read.
        """
        for table in self._transient.values():
            table.release()
        for opened in self._read.values():
            opened.close()
        self._read.clear()


def _name_stream(stream: str | SystemStreamPartition) -> str:
    """Return the name of a stream ("lake.weather"), also for one of its partitions."""
    if isinstance(stream, SystemStreamPartition):
        return stream.qualified_stream
    return stream
