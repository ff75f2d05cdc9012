"""Bounded datasets: versions that arrive, are built and checked beside the one served, and then switch.

    collect -> build -> unchanged? stop -> validate -> seal -> switch

The switch is one commit: of a dataset, or of all members of a version set. What fails before it leaves the served
version and the offsets where they were, and the next advance takes up from there: a build that was finished is
not repeated. A version that is refused for reasons of its data is kept aside as rejected, and does not block the
next one. Behaviour: SAMZA-1278, "Bounded dataset".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dagster_adjunct.assets.bounded.candidate import Built, build_candidate, validate_candidate
from dagster_adjunct.assets.bounded.publish import declared, heard, leave, publish
from dagster_adjunct.assets.bounded.version_set import join_version_set
from dagster_adjunct.assets.declaration.inputs import FileSource, QuerySource
from dagster_adjunct.assets.sources.delivery import Awaiting, Delivery
from dagster_adjunct.assets.sources.open_source import open_source
from dagster_adjunct.assets.sources.stream_source import StreamSource
from dagster_adjunct.assets.versions.carrying_over import carried_over
from dagster_adjunct.assets.versions.deliveries import Abandoned, Awaited, Lost
from dagster_adjunct.assets.versions.log import DatasetLog, Manifests
from dagster_adjunct.assets.versions.manifest import BoundedManifest, Change, DatasetManifest, as_bounded
from dagster_adjunct.assets.versions.operator_actions import expire_pins, explained
from dagster_adjunct.assets.versions.report import Action, AdvanceReport, OnStage, Stages, ignore
from dagster_adjunct.assets.versions.sealed_version import VersionRef
from dagster_adjunct.assets.writing.generation import add, check_declaration
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    DatasetError,
    MarkerConflictError,
    ValidatorError,
)
from dagster_adjunct.resources.spark.errors import unwrapped
from dagster_adjunct.resources.spark.given_session import starter_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.sources.delivery import VersionSource
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.interface.system import StreamSystem


def advance_bounded(
    lake: Lake,
    systems: Mapping[str, StreamSystem],
    spec: AdjunctDataset,
    spark: SparkSession | Callable[[], SparkSession],
    *,
    by: str,
    partition: str | None = None,
    make_current: bool = False,
    on_stage: OnStage = ignore,
) -> AdvanceReport:
    """Publish every version that is complete, in order, and say what the next one waits for.

    `systems` are the stream systems by name; `by` says in the commits who did it. `spark` is called only if there
    are records to build from. `partition` asks for the version of this name, where the dataset declares version
    partitions; an older one is kept beside what is served unless `make_current`. Raises MarkerConflictError when
    markers contradict each other, DatasetError (a changed declaration), ValidatorError (a mistake in a validator),
    and CommitConflictError when another writer was first; what is served stays served.
    """
    spark = starter_of(spark)
    if spec.version_set is not None:
        raise ConfigurationError(
            f"dataset {spec.name!r} is declared in the version set {spec.version_set!r}: its members advance together.",
            "Advance the set with all its members: advance_version_set(lake, systems, members, …).",
        )
    _check_partition(spec, partition)
    return _Cycle(lake, systems, (spec,), spark, by, on_stage, partition, make_current).run()[0]


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
    spark = starter_of(spark)
    names = {spec.version_set for spec in specs}
    if len(names) != 1 or None in names or len(specs) < 2:
        raise ConfigurationError(
            f"datasets {', '.join(spec.name for spec in specs)} are not declared in one version set.",
            "Declare them with version_set(NAME, …) and pass what it returns.",
        )
    join_version_set(lake, str(names.pop()), [spec.name for spec in specs], by=by)
    return _Cycle(lake, systems, specs, spark, by, on_stage, None, False).run()


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
        if any(each.name == version for each in manifest.abandoned):
            return None
        awaited = None if manifest.awaited and manifest.awaited.version == version else manifest.awaited
        return manifest.after(abandoned=(*manifest.abandoned, ended), awaited=awaited, change=change)

    def abandon_all(manifests: Mapping[str, BoundedManifest]) -> Mapping[str, BoundedManifest] | None:
        return {name: after for name, each in manifests.items() if (after := abandon(each)) is not None} or None

    DatasetLog(lake, dataset).transact_versions(abandon_all, by=by)


@dataclass
class Member:
    """One dataset while it advances: alone, or with the other members of its version set.

    `manifest` is what is decided on, `committed` what stands in the lake. `others` is what other members
    of the set lack of the version that this one has.
    """

    spec: AdjunctDataset
    log: DatasetLog
    source: VersionSource
    manifest: BoundedManifest
    stages: Stages
    sealed: list[str] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    committed: BoundedManifest | None = None
    last: Built | None = None
    awaiting: Awaiting | None = None
    others: Awaited | None = None


class _Cycle:
    def __init__(
        self,
        lake: Lake,
        systems: Mapping[str, StreamSystem],
        specs: Sequence[AdjunctDataset],
        spark: Callable[[], SparkSession],
        by: str,
        on_stage: OnStage,
        partition: str | None,
        make_current: bool,
    ) -> None:
        self._spark, self._by, self._make_current = spark, by, make_current
        # A query, or a partition that is asked for, gives a version each time that it is asked: once is enough.
        self._once = partition is not None or any(isinstance(spec.input, QuerySource) for spec in specs)
        self._members = []
        log = DatasetLog(lake, specs[0].name)
        self._commit, manifests = log.read_all()
        _check_membership(specs, manifests)
        if expire_pins(log, manifests, lake.now(), by=by):
            self._commit, manifests = log.read_all()
        opened = []
        for spec in specs:
            stages = Stages(spec.name, on_stage)
            with stages("collect"):
                opened.append((spec, stages, open_source(systems, spec, lake, partition=partition)))
        carried = _carried(manifests, [source for _, _, source in opened])
        if carried:
            self._commit = log.commit_all(self._commit, carried, by=by)
            manifests |= carried
        for spec, stages, source in opened:
            with stages("collect"):
                log = DatasetLog(lake, spec.name)
                stored = manifests.get(spec.name)
                # Before the declaration, in which a stream made anew with other partitions would differ, too.
                first = stored or source.first_manifest()
                if isinstance(source, StreamSource) and first.declaration.input == source.declaration.input:
                    source.check_not_made_anew(first.stream)
                check_declaration(spec.name, first.declaration, source.declaration)
                committed = None if stored is None else as_bounded(stored)
                manifest = declared(committed or source.first_manifest(), spec)
                self._members.append(Member(spec, log, source, manifest, stages, committed=committed))

    def run(self) -> list[AdvanceReport]:
        while (deliveries := self._next()) is not None:
            built = [
                build_candidate(member, deliveries[member.spec.name], self._spark, by=self._by)
                for member in self._members
                if member.spec.name in deliveries
            ]
            self._validate(built)
            self._commit = publish(self._commit, self._members, built, by=self._by, make_current=self._make_current)
        return [self._report(member) for member in self._members]

    def _validate(self, built: Sequence[Built]) -> None:
        try:
            for candidate in built:
                validate_candidate(candidate, self._spark)
        except ValidatorError:
            self._begin()
            raise

    def _next(self) -> dict[str, Delivery] | None:
        try:
            return self._delivered()
        except MarkerConflictError:
            self._begin()
            raise

    def _begin(self) -> None:
        """Commit every member, for without a commit the version that stands in its way can't be abandoned."""
        for member in self._members:
            if member.committed is None:
                at = Awaiting(None, (), member.manifest.offsets)
                self._commit = leave(self._commit, self._members, member, at, member.manifest.awaited, by=self._by)

    def _delivered(self) -> dict[str, Delivery] | None:
        """Return what every member has delivered whole, None when one still waits; by then that is recorded."""
        if self._once and any(member.last is not None for member in self._members):
            for member in self._members:
                member.awaiting = Awaiting(None, (), member.manifest.offsets, idle=True)
            return None
        found = {member.spec.name: member.source.next(member.manifest) for member in self._members}
        complete = {name: each for name, each in found.items() if isinstance(each, Delivery)}
        for version in {each.version for each in complete.values()}:
            here = {name: each for name, each in complete.items() if each.version == version}
            # A member that had this version before it joined the set is not waited for. One that abandoned it is: the
            # set never has it whole then.
            if all(version in self._member(name).manifest.taken for name in found.keys() - here.keys()):
                return here
        _check_one_version(complete)
        waiting = {name: each for name, each in found.items() if isinstance(each, Awaiting)}
        begun = next((each.version for each in complete.values()), None)
        for name, each in waiting.items():
            member = self._member(name)
            member.awaiting = replace(each, idle=each.idle and not complete)
            member.counters = add(member.counters, {"redelivered": each.redelivered} if each.redelivered else {})
            awaited = _awaited(member, each, begun)
            self._commit = leave(self._commit, self._members, member, each, awaited, by=self._by)
            heard(member, each)
        self._begin()
        missing = tuple(marker for each in waiting.values() for marker in each.missing)
        since = [each.awaited.since for each in (self._member(name).manifest for name in waiting) if each.awaited]
        for name in complete:
            self._member(name).others = Awaited(
                version=begun, missing=missing, since=min(since, default=self._member(name).log.lake.now())
            )
        return None

    def _member(self, name: str) -> Member:
        return next(member for member in self._members if member.spec.name == name)

    def _report(self, member: Member) -> AdvanceReport:
        manifest, version = member.manifest, member.manifest.version
        idle = member.awaiting is not None and member.awaiting.idle and version is not None and not member.lost
        action: Action = "waiting"
        notes = []
        if member.sealed:
            action = "sealed"
        elif member.rejected:
            action = "rejected"
        elif member.unchanged:
            action = "unchanged"
            notes.append("the version delivered equals the current one")
        elif idle:
            action = "up-to-date"
            dropped = member.notes and "redelivered" in member.counters
            notes += [] if dropped else ["nothing new was delivered"]
        for ref in (manifest.ref(rejected) for rejected in member.rejected):
            if ref is not None:
                notes.append(_rejected(member, ref))
        newest = max(manifest.versions, key=lambda ref: ref.number, default=None)
        if newest is not None and newest.state == "rejected" and not member.rejected:
            notes.append(f"version {newest.name!r} ({newest.id}), delivered last, is rejected: {newest.reason}")
        awaited = member.others or manifest.awaited
        waiting = member.others.missing if member.others else member.awaiting.missing if member.awaiting else ()
        if idle:
            waiting = ()
        if waiting:
            begun = awaited.version if awaited else None
            wanted = f"version {begun!r}" if begun else "the first version" if version is None else "the next version"
            notes.append(f"{wanted} waits for the markers of {', '.join(waiting)}")
        if manifest.pin is not None:
            notes.append(f"pinned to {manifest.pin.version} by {manifest.pin.by}: {manifest.pin.reason}")
        looked_at = member.last.version if member.last and member.last.version else version
        return AdvanceReport(
            dataset=manifest.name,
            kind="bounded",
            action=action,
            version=None if version is None else version.id,
            sealed=tuple(member.sealed),
            rejected=tuple(member.rejected),
            lost=tuple(name for lost in member.lost for name in lost.versions),
            evaluated=looked_at.id if looked_at else None,
            verdicts=looked_at.verdicts if looked_at else (),
            warnings=tuple(dict.fromkeys([*member.warnings, *[lost.summary() for lost in member.lost], *member.notes])),
            rows=None if version is None else version.rows,
            counters=member.counters,
            offsets=manifest.offsets,
            waiting=waiting,
            waiting_since=awaited.since if awaited and waiting else None,
            seconds=member.stages.seconds,
            schema=member.source.schema if version is None else version.columns,
            note="; ".join(notes),
        )


def _carried(manifests: Manifests, sources: Sequence[VersionSource]) -> dict[str, DatasetManifest]:
    """Return the manifests of those whose streams were repartitioned just when they had read all of them."""
    streams = [source for source in sources if isinstance(source, StreamSource) and source.spec.name in manifests]
    found = {source.spec.name: carried_over(manifests[source.spec.name], source.info) for source in streams}
    return {name: after for name, after in found.items() if after is not None}


def _rejected(member: Member, ref: VersionRef) -> str:
    """Return why a version was rejected and what can be done about it."""
    name, source = member.spec.name, member.spec.input
    again = "deliver it again under the same name"
    if isinstance(source, FileSource):
        again = "complete the folder again"
    elif isinstance(source, QuerySource):
        again = "compute it again"
    look = f"look at it (adjunct dataset show {name} {ref.id})"
    force = f"force it with a reason (adjunct dataset force {name} {ref.id} --reason …)"
    drop = f"drop it (adjunct dataset drop {name} {ref.id} --reason …) and {again}"
    # What was refused before it was built can neither be read nor forced.
    steps = f"{look}, {force}, or {drop}" if ref.document else drop
    return f"version {ref.name!r} is rejected: {ref.reason.rstrip('.')}. Next: {steps}"


def _check_partition(spec: AdjunctDataset, partition: str | None) -> None:
    if partition is not None and spec.versions is None:
        raise ConfigurationError(
            f"dataset {spec.name!r} declares no version partitions, and version {partition!r} of it is asked for.",
            "Declare them with versions=VersionPartitions(…), or advance it without a partition.",
        )
    if partition is not None and spec.stream is not None:
        raise ConfigurationError(
            f"dataset {spec.name!r} is made from the stream {spec.stream}, whose markers name the versions.",
            "Advance it without a partition: what the stream holds is published in its order.",
        )
    if partition is not None and spec.versions is not None and not spec.versions.has(partition):
        raise ConfigurationError(
            f"dataset {spec.name!r} declares {spec.versions}, and partition {partition!r} is none of these.",
            "Ask for one that is declared, or declare it.",
        )
    known = spec.versions is not None and (spec.versions.start is not None or spec.versions.names)
    if partition is None and known and isinstance(spec.input, QuerySource):
        # A name made of the time would come after all others, and hold them back for ever.
        raise ConfigurationError(
            f"dataset {spec.name!r} is computed by a query for each of its partitions, and none is asked for.",
            "Say which: partition=….",
        )


def _check_membership(specs: Sequence[AdjunctDataset], manifests: Manifests) -> None:
    if specs[0].version_set is None and len(manifests) > 1:
        others = ", ".join(sorted(set(manifests) - {specs[0].name}))
        raise DatasetError(
            f"dataset {specs[0].name!r} is a member of a version set with {others}, and is declared alone.",
            "Declare it with version_set(NAME, …) as before, or under a new name.",
        )


def _check_one_version(complete: Mapping[str, Delivery]) -> None:
    versions = {each.version for each in complete.values()}
    if len(versions) > 1:
        said = "; ".join(f"{name}: {each.version!r}" for name, each in complete.items())
        raise MarkerConflictError(
            f"the members of one version set have delivered different versions as the next ({said}).",
            "If one of them has no counterpart in the other members, or lost it to retention, abandon it: "
            "adjunct dataset abandon DATASET VERSION --reason ….",
        )


def _awaited(member: Member, awaiting: Awaiting, others: str | None) -> Awaited | None:
    """Return what to remember of a wait: for which version, and since when. `others` have it whole in the set."""
    if awaiting.idle and others is None:
        return None
    before, version = member.manifest.awaited, awaiting.version or others
    since = before.since if before is not None and before.version == version else member.log.lake.now()
    return Awaited(version=version, missing=awaiting.missing, since=since)
