"""Bounded datasets: versions that arrive, are built and checked beside the one served, and then switch.

look               -> Unit     the datasets, their inputs, and what is committed of them           look_at_inputs.py
delivered_together -> Answers  the version that all have whole, or what they wait for             delivered_together.py
build_candidate    -> Built    its files beside the served ones; unfit, or what is there already? build_candidate.py
judge              -> Built    what the validators say of it                                      judge_candidate.py
publish            -> Unit     sealed and switched to, or kept aside, in one commit               publish_version.py
wait               -> Unit     nothing is whole: what is waited for, in one commit                commit_waiting.py

The switch is one commit: of a dataset, or of all members of a version set. What fails before it leaves the served
version and the offsets where they were, and the next advance takes up from there: a build that was finished is
not repeated, unless a query or a function made it. A version that is refused for reasons of its data is kept aside as
rejected, and does not block the next one. Behaviour: SAMZA-1278, "Bounded dataset".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.assets.bounded.bounded_report import report_of
from dagster_adjunct.assets.bounded.build_candidate import build_candidate, refuse_withdrawn
from dagster_adjunct.assets.bounded.commit_waiting import begin, wait
from dagster_adjunct.assets.bounded.delivered_together import delivered_together
from dagster_adjunct.assets.bounded.judge_candidate import judge
from dagster_adjunct.assets.bounded.look_at_inputs import look
from dagster_adjunct.assets.bounded.publish_version import publish
from dagster_adjunct.assets.bounded.version_set import join_version_set
from dagster_adjunct.assets.declaration.inputs_besides_streams import QuerySource
from dagster_adjunct.assets.sources.version_source import Awaiting
from dagster_adjunct.assets.versions.advance_report import AdvanceReport, OnStage, ignore
from dagster_adjunct.assets.versions.bounded_manifest import BoundedManifest
from dagster_adjunct.assets.versions.common_manifest import Change
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.deliveries import Abandoned
from dagster_adjunct.assets.versions.operator_actions import explained
from dagster_adjunct.assets.writing.runtime import Runtime
from dagster_adjunct.resources.errors import ConfigurationError, MarkerConflictError, ValidatorError
from dagster_adjunct.resources.spark.given_session import starter_of
from dagster_adjunct.resources.spark.spark_errors import unwrapped

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.assets.bounded.advancing_members import Unit
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem


def advance_bounded(
    context: Runtime,
    spec: AdjunctDataset,
    *,
    partition: str | None = None,
    make_current: bool = False,
    on_stage: OnStage = ignore,
) -> AdvanceReport:
    """Publish every version that is complete, in order, and say what the next one waits for.

    `partition` asks for the version of this name, where the dataset declares version partitions; an older one is kept
    beside what is served unless `make_current`. Raises MarkerConflictError when markers contradict each other,
    DatasetError (a changed declaration), ValidatorError (a mistake in a validator), and CommitConflictError when
    another writer was first; what is served stays served.
    """
    if spec.version_set is not None:
        raise ConfigurationError(
            f"dataset {spec.name!r} is declared in the version set {spec.version_set!r}: its members advance together.",
            "Advance the set with all its members: advance_version_set(lake, systems, members, …).",
            dataset=spec.name,
        )
    _check_partition(spec, partition)
    unit = look(context, (spec,), on_stage, partition)
    # A query, or a partition that is asked for, gives a version each time that it is asked: once is enough.
    return _advance(unit, once=partition is not None or _has_query(unit), make_current=make_current)[0]


@unwrapped()
def advance_version_set(
    lake: Lake,
    systems: Mapping[str, StreamSystem],
    specs: Sequence[AdjunctDataset],
    spark: SparkSession | Callable[[], SparkSession],
    *,
    by: str,
    on_stage: OnStage = ignore,
) -> list[AdvanceReport]:
    """Publish every version that all members of a version set have delivered, each in one commit; a report a member.

    A version that one member refuses is refused for all. Raises what `advance_bounded` raises, and
    MarkerConflictError when the members' next versions have different names.
    """
    return advance_members(Runtime(lake, systems, starter_of(spark), by), specs, on_stage=on_stage)


@unwrapped()
def advance_members(
    runtime: Runtime, specs: Sequence[AdjunctDataset], *, on_stage: OnStage = ignore
) -> list[AdvanceReport]:
    """Publish what the members of a version set have delivered, as `advance_version_set` does."""
    names = {spec.version_set for spec in specs}
    if len(names) != 1 or None in names or len(specs) < 2:
        raise ConfigurationError(
            f"datasets {', '.join(spec.name for spec in specs)} are not declared in one version set.",
            "Declare them with version_set(NAME, …) and pass what it returns.",
            argument="specs",
        )
    join_version_set(runtime.lake, str(names.pop()), [spec.name for spec in specs], by=runtime.by)
    unit = look(runtime, specs, on_stage)
    return _advance(unit, once=_has_query(unit), make_current=False)


def abandon_version(lake: Lake, dataset: str, version: str, *, reason: str, by: str) -> None:
    """End a version, by the name that it is delivered under, that can't be completed: the next one can seal then.

    Its markers close nothing from now on, and records that end with one of them are dropped. A version that is sealed
    stays as it is, and what is delivered under its name again is dropped unread, whatever its markers say. In a
    version set it ends for all members: none of them is published without the others. Safe to repeat.
    """
    explained("abandon", version, reason, by)
    ended = Abandoned(name=version, reason=reason, by=by, at=lake.now())
    change = Change(action="abandon", version=version, reason=reason)

    def abandon(manifest: BoundedManifest) -> BoundedManifest | None:
        if any(abandoned.name == version for abandoned in manifest.abandoned):
            return None
        awaited = None if manifest.awaited and manifest.awaited.version == version else manifest.awaited
        return manifest.after(abandoned=(*manifest.abandoned, ended), awaited=awaited, change=change)

    def abandon_all(manifests: Mapping[str, BoundedManifest]) -> Mapping[str, BoundedManifest] | None:
        return {name: after for name, manifest in manifests.items() if (after := abandon(manifest)) is not None} or None

    DatasetLog(lake, dataset).transact_versions(abandon_all, by=by)


def _advance(unit: Unit, *, once: bool, make_current: bool) -> list[AdvanceReport]:
    """As long as a delivery is whole: build, judge, publish. Return a report for each dataset."""
    while True:
        try:
            answers = delivered_together(unit)
            if not answers.together:
                return [report_of(member) for member in wait(unit, answers).members]
            built = [build_candidate(unit.member(name), delivery) for name, delivery in answers.together.items()]
            judged = [judge(candidate) for candidate in refuse_withdrawn(built)]
        except (MarkerConflictError, ValidatorError):
            begin(unit)
            raise
        unit = publish(unit, judged, make_current=make_current)
        if once:
            asked = Awaiting(None, (), idle=True)
            return [report_of(replace(member, awaiting=asked)) for member in unit.members]


def _has_query(unit: Unit) -> bool:
    return any(isinstance(member.spec.input, QuerySource) for member in unit.members)


def _check_partition(spec: AdjunctDataset, partition: str | None) -> None:
    if partition is not None and spec.versions is None:
        raise ConfigurationError(
            f"dataset {spec.name!r} declares no version partitions, and version {partition!r} of it is asked for.",
            "Declare them with versions=VersionPartitions(…), or advance it without a partition.",
            argument="partition",
            dataset=spec.name,
        )
    if partition is not None and spec.stream is not None:
        raise ConfigurationError(
            f"dataset {spec.name!r} is made from the stream {spec.stream}, whose markers name the versions.",
            "Advance it without a partition: what the stream holds is published in its order.",
            dataset=spec.name,
        )
    if partition is not None and spec.versions is not None and not spec.versions.has(partition):
        raise ConfigurationError(
            f"dataset {spec.name!r} declares {spec.versions}, and partition {partition!r} is none of these.",
            "Ask for one that is declared, or declare it.",
            argument="partition",
            dataset=spec.name,
        )
    known = spec.versions is not None and (spec.versions.start is not None or spec.versions.names)
    if partition is None and known and isinstance(spec.input, QuerySource):
        # A name made of the time would come after all others, and hold them back for ever.
        raise ConfigurationError(
            f"dataset {spec.name!r} is computed by a query for each of its partitions, and none is asked for.",
            "Say which: partition=….",
            argument="partition",
            dataset=spec.name,
        )
