"""Brings a dataset of either kind up to date with its input."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NoReturn

from dagster_adjunct.assets.bounded.advance import advance_version_set
from dagster_adjunct.assets.reading.dataset import Dataset, open_dataset
from dagster_adjunct.assets.sources.opened_stream import OpenedStream
from dagster_adjunct.assets.unbounded.commit import inspect_table
from dagster_adjunct.assets.unbounded.recovery import decide_recovery
from dagster_adjunct.assets.unbounded.transient import TransientTable
from dagster_adjunct.assets.versions.reports import AdvanceReport, OnStage, ignore_stage
from dagster_adjunct.assets.writing.generation import Runtime
from dagster_adjunct.resources.errors import ConfigurationError, NoSealedVersionError
from dagster_adjunct.resources.spark.errors import translate_spark_errors
from dagster_adjunct.resources.spark.in_process import session_factory
from dagster_adjunct.resources.streams.system import SystemStreamPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.system import StreamSystem


@translate_spark_errors()
def advance_dataset(
    lake: Lake,
    systems: Mapping[str, StreamSystem],
    spec: AdjunctDataset,
    spark: SparkSession | Callable[[], SparkSession],
    *,
    by: str,
    partition: str | None = None,
    make_current: bool = False,
    on_stage: OnStage = ignore_stage,
) -> AdvanceReport:
    """Publish the complete versions of a bounded dataset, or bootstrap and follow an unbounded one.

    A local table is only compacted, where that is due: its application's batches write it.

    `spark` is called only when there is something to build. Safe to call again after any failure; several
    datasets may advance at the same time, in threads of one session. `partition` and `make_current` are for
    bounded datasets with version partitions (see `advance_bounded`); `on_stage` hears of each stage's end, and of
    each build's begin.
    """
    runtime = Runtime(lake, systems, session_factory(spark), by)
    return advance_with_runtime(runtime, spec, partition=partition, make_current=make_current, on_stage=on_stage)


@translate_spark_errors()
def advance_with_runtime(
    runtime: Runtime,
    spec: AdjunctDataset,
    *,
    partition: str | None = None,
    make_current: bool = False,
    on_stage: OnStage = ignore_stage,
) -> AdvanceReport:
    """Bring a dataset up to date as `advance_dataset` does."""
    if not spec.follows_changes:
        from dagster_adjunct.assets.bounded.advance import advance_bounded

        return advance_bounded(runtime, spec, partition=partition, make_current=make_current, on_stage=on_stage)
    if spec.is_local:
        from dagster_adjunct.assets.unbounded.local_table import advance_local

        return advance_local(runtime, spec, on_stage=on_stage)
    from dagster_adjunct.assets.unbounded.advance import advance_unbounded

    return advance_unbounded(runtime, spec, on_stage=on_stage)


class AdjunctDatasetManager:
    """The datasets of an application by the streams that feed them.

    A dataset has one input; one stream may feed several datasets, each with progress of its own. Datasets with
    `persistent=False` live in the manager until `release`, all others in the lake. `run_application` needs none: a
    manager is for programs that have a loop of their own.
    """

    def __init__(self, lake: Lake, systems: Mapping[str, StreamSystem], datasets: Iterable[AdjunctDataset]) -> None:
        self._lake, self._systems = lake, systems
        self._datasets: dict[str, AdjunctDataset] = {}
        for dataset in datasets:
            if self._datasets.setdefault(dataset.name, dataset) != dataset:
                raise ConfigurationError(
                    f"the dataset {dataset.name!r} is given twice, and declared differently.",
                    "Declare it once; two different datasets need different names.",
                    dataset=dataset.name,
                )
        self._transient = {
            name: TransientTable(systems, dataset)
            for name, dataset in self._datasets.items()
            if not dataset.following.persistent
        }
        self._read: dict[str, Dataset] = {}

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Return, by stream ("lake.weather"), the names of the datasets that it feeds.

        Datasets that are made from files or a query have no stream, and are not there.
        """
        streams: dict[str, tuple[str, ...]] = {}
        for dataset in self._datasets.values():
            if dataset.stream is not None:
                streams[dataset.stream] = (*streams.get(dataset.stream, ()), dataset.name)
        return streams

    def datasets_of(self, stream: str | SystemStreamPartition) -> tuple[AdjunctDataset, ...]:
        """Return the datasets that a stream, or the stream of a partition, feeds."""
        name = stream.qualified_stream if isinstance(stream, SystemStreamPartition) else stream
        return tuple(dataset for dataset in self._datasets.values() if dataset.stream == name)

    def takes(self, stream: str | SystemStreamPartition, app_inputs: Collection[str]) -> bool:
        """Whether records of this stream are for datasets alone, and not delivered to the application.

        `app_inputs` are the streams that the application reads itself.
        """
        name = stream.qualified_stream if isinstance(stream, SystemStreamPartition) else stream
        return name not in app_inputs and bool(self.datasets_of(name))

    @translate_spark_errors()
    def process(
        self, stream: str | SystemStreamPartition, spark: SparkSession | Callable[[], SparkSession], by: str
    ) -> dict[str, AdvanceReport]:
        """Take what is new on a stream into all datasets that it feeds; return what was done, by dataset.

        Empty where no dataset takes the stream: its records are the application's. A member of a version set advances
        with the members that the manager knows. Raises what `advance_dataset` raises; a dataset that has advanced
        before the error stays so.
        """
        spark = session_factory(spark)
        reports: dict[str, AdvanceReport] = {}
        for dataset in self.datasets_of(stream):
            if dataset.name in self._transient:
                reports[dataset.name] = self._transient[dataset.name].advance(spark)
            elif dataset.version_set is None:
                reports[dataset.name] = advance_dataset(self._lake, self._systems, dataset, spark, by=by)
            elif dataset.name not in reports:
                members = [member for member in self._datasets.values() if member.version_set == dataset.version_set]
                done = advance_version_set(self._lake, self._systems, members, spark, by=by)
                reports |= {report.dataset: report for report in done}
        return reports

    def frame(self, dataset: str, spark: SparkSession | Callable[[], SparkSession]) -> DataFrame:
        """Return what a dataset holds now; it can be read until this is asked for again, or `release`.

        That of a dataset that lives for one run can be read until the next `process` of its stream. Raises
        DatasetNotFoundError and NoSealedVersionError before there is anything. `open_dataset` reads by key.
        """
        if dataset not in self._datasets:
            raise ConfigurationError(
                f"there is no dataset {dataset!r} here: there are {', '.join(self._datasets) or 'none'}.",
                "Correct the name, or give the dataset to the manager.",
                dataset=dataset,
            )
        if dataset in self._transient:
            version = self._transient[dataset].view
            if version is None:
                raise NoSealedVersionError(
                    f"dataset {dataset!r} has no version to read yet: nothing has been read of its stream.",
                    f"Process {self._datasets[dataset].stream} first.",
                    dataset=dataset,
                )
            return version.frame(spark)
        before = self._read.get(dataset)
        self._read[dataset] = opened = open_dataset(self._lake, self._datasets[dataset])
        try:
            return opened.frame(spark)
        finally:
            if before is not None:
                before.close()

    def reset_at_start(self) -> set[SystemStreamPartition]:
        """Return the partitions that are read again from their beginning when a run starts now.

        Those of datasets that live for one run and are marked for bootstrap, and those of stored tables for which a
        bootstrap is decided. Reads no record and changes nothing. Raises OffsetOutOfRangeError for a table that has
        lost its place and is declared to fail, and DatasetError for one that was declared otherwise.
        """
        ssps: set[SystemStreamPartition] = set()
        for dataset in self._datasets.values():
            if dataset.follows_changes and not dataset.is_local:
                if dataset.following.persistent:
                    seen = inspect_table(Runtime(self._lake, self._systems, _no_session, "manager"), dataset)
                    if decide_recovery(seen).action == "bootstrap":
                        ssps |= set(seen.source.ssps)
                elif dataset.bootstrap:
                    ssps |= set(OpenedStream.of(self._systems, dataset).ssps)
        return ssps

    def release(self) -> None:
        """Give back the memory of the datasets that live for one run, and let go of versions that were read."""
        for table in self._transient.values():
            table.release()
        for opened in self._read.values():
            opened.close()
        self._read.clear()


def _no_session() -> NoReturn:
    raise AssertionError("what would be decided is told without reading records")
