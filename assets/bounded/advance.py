"""The advance of bounded datasets: arriving versions are built next to the served one, validated, and switched to.

snapshot_inputs     -> AdvanceGroup      the datasets, their inputs, and their committed manifests
poll_sources        -> PollResult        the version that all have completely, or what they wait for
build_candidate     -> CandidateVersion  its files next to the served ones, and whether it is unfit or unchanged
validate_candidate  -> CandidateVersion  the verdicts of the validators
publish_candidates  -> AdvanceGroup      sealed and switched to, or stored as rejected, in one commit
commit_waiting      -> AdvanceGroup      no version is complete: what is awaited, in one commit

The switch is one commit of a dataset or of all members of a version set. A failure before it leaves the served version
and the offsets unchanged, and the next advance continues from there: a finished build is reused, unless a query or a
function made it. A version rejected because of its data is stored as rejected and does not block the next one.
Behaviour: SAMZA-1278, "Bounded dataset".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_adjunct.assets.bounded.candidate import (
    AdvanceGroup,
    Member,
    build_candidate,
    reject_revoked_content,
    validate_candidate,
)
from dagster_adjunct.assets.bounded.publish import commit_waiting, commit_waits, publish_candidates
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.sources import FileSource, QuerySource
from dagster_adjunct.assets.sources.deliveries import Awaiting, Delivery
from dagster_adjunct.assets.sources.stream_source import open_source
from dagster_adjunct.assets.versions.actions import expire_pins, require_audit_fields
from dagster_adjunct.assets.versions.dataset_log import DatasetLog, member_bodies, redirect_target, version_set_log
from dagster_adjunct.assets.versions.manifest import Abandoned, BoundedManifest, Change, as_bounded
from dagster_adjunct.assets.versions.reports import Action, AdvanceReport, OnStage, Stages, ignore_stage
from dagster_adjunct.assets.versions.version import VersionRef
from dagster_adjunct.assets.writing.generation import Runtime, open_runtime
from dagster_adjunct.resources.common import resolve_user
from dagster_adjunct.resources.errors import ConfigurationError, DatasetError, MarkerConflictError, ValidatorError
from dagster_adjunct.resources.objects.commit_log import Commit, is_deletion_commit, retry_conflicts
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.spark.errors import translate_spark_errors
from dagster_adjunct.resources.streams.system import StreamSystem
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def build_bounded_report(member: Member) -> AdvanceReport:
    """Return the report of the advance of this dataset, with what its next version waits for."""
    manifest, version = member.manifest, member.manifest.version
    idle = member.awaiting is not None and member.awaiting.idle and version is not None and not member.lost
    outcomes: list[tuple[object, Action]] = [
        (member.sealed, "sealed"), (member.rejected, "rejected"), (member.unchanged, "unchanged"),
        (idle, "up-to-date"), (True, "waiting"),
    ]  # fmt: skip
    action = next(action for happened, action in outcomes if happened)
    dropped = member.notes and "redelivered" in member.counters
    notes = ["the version delivered equals the current one"] if action == "unchanged" else []
    notes += ["nothing new was delivered"] if action == "up-to-date" and not dropped else []
    notes += [_describe_rejected(member, ref) for id in member.rejected if (ref := manifest.ref(id)) is not None]
    notes += [_describe_unserved(member, ref) for id in member.unserved if (ref := manifest.ref(id)) is not None]
    newest = max(manifest.versions, key=lambda ref: ref.number, default=None)
    if newest is not None and newest.state == "rejected" and not member.rejected:
        notes.append(f"version {newest.name!r} ({newest.id}), delivered last, is rejected: {newest.reason}")
    awaiting = None if idle or member.awaiting is None or not member.awaiting.missing else member.awaiting
    if awaiting is not None:
        begun = awaiting.version
        wanted = f"version {begun!r}" if begun else "the first version" if version is None else "the next version"
        notes.append(f"{wanted} waits for the markers of {', '.join(awaiting.missing)}")
    if manifest.pin is not None:
        notes.append(f"pinned to {manifest.pin.version} by {manifest.pin.by}: {manifest.pin.reason}")
    evaluated = member.last_built or version
    return AdvanceReport(
        dataset=manifest.name,
        kind=manifest.declaration.kind,
        action=action,
        version=None if version is None else version.id,
        sealed=member.sealed,
        rejected=member.rejected,
        lost=tuple(name for lost in member.lost for name in lost.versions),
        evaluated=evaluated.id if evaluated else None,
        verdicts=evaluated.verdicts if evaluated else (),
        warnings=tuple(dict.fromkeys([*member.warnings, *[lost.summary() for lost in member.lost], *member.notes])),
        rows=None if version is None else version.rows,
        counters=member.counters,
        offsets=manifest.offsets,
        waiting=() if awaiting is None else awaiting.missing,
        waiting_since=None if awaiting is None else awaiting.since,
        seconds=member.stages.seconds,
        schema=member.source.schema if version is None else version.columns,
        note="; ".join(notes),
    )


def _describe_unserved(member: Member, ref: VersionRef) -> str:
    """Return a note on a version that comes before the current one, with how to serve it."""
    manifest = member.manifest
    head = manifest.ref(manifest.head or "")
    assert head is not None
    names = [
        f"{each.name!r}" + (f" (valid from {each.valid_from:%Y-%m-%d %H:%M:%S} UTC)" if each.valid_from else "")
        for each in (ref, head)
    ]
    return (
        f"version {names[0]} is sealed but not served: {names[1]} comes after it and stays current. "
        f"To serve it: adjunct dataset rollback {manifest.name} {ref.id} --reason …"
    )


def _describe_rejected(member: Member, ref: VersionRef) -> str:
    """Return a note on a rejected version: the reason and the next steps."""
    name, source = member.spec.name, member.spec.input
    again = {FileSource: "complete the folder again", QuerySource: "compute it again"}.get(
        type(source), "deliver it again under the same name"
    )
    show = f"look at it (adjunct dataset show {name} {ref.id})"
    accept = f"accept it with a reason (adjunct dataset accept {name} {ref.id} --reason …)"
    drop = f"remove it (adjunct dataset remove-version {name} {ref.id} --reason …) and {again}"
    # A version rejected before it was built can neither be read nor accepted.
    steps = f"{show}, {accept}, or {drop}" if ref.document else drop
    return f"version {ref.name!r} is rejected: {ref.reason.rstrip('.')}. Next: {steps}"


@dataclass(frozen=True, slots=True)
class PollResult:
    """The next deliveries of the sources, by dataset: `complete` versions, and what the others are `waiting` for.

    `together` are the deliveries of one version that all members have; empty while one still waits.
    """

    complete: Mapping[str, Delivery]
    waiting: Mapping[str, Awaiting]
    together: Mapping[str, Delivery]


def poll_sources(group: AdvanceGroup) -> PollResult:
    """Ask each member's source for its next version. Raises MarkerConflictError if markers or members disagree."""
    polled = {member.name: member.source.next(member.manifest) for member in group.members}
    complete = {name: answer for name, answer in polled.items() if isinstance(answer, Delivery)}
    waiting = {name: answer for name, answer in polled.items() if isinstance(answer, Awaiting)}
    versions = {delivery.version for delivery in complete.values()}
    for version in versions:
        together = {name: delivery for name, delivery in complete.items() if delivery.version == version}
        # A member that had this version before it joined the set is not waited for. One that abandoned it is, so the
        # set never completes this version.
        if all(version in member.manifest.taken for member in group.members if member.name not in together):
            return PollResult(complete, waiting, together)
    if len(versions) > 1:
        named = "; ".join(f"{name}: {delivery.version!r}" for name, delivery in complete.items())
        raise MarkerConflictError(
            f"the members of one version set have delivered different versions as the next ({named}).",
            "If one of them has no counterpart in the other members, or lost it to retention, abandon it: "
            "adjunct dataset abandon DATASET VERSION --reason ….",
            dataset=next(iter(complete)),
        )
    return PollResult(complete, waiting, {})


def snapshot_inputs(
    context: Runtime, specs: Sequence[AdjunctDataset], on_stage: OnStage, partition: str | None = None
) -> AdvanceGroup:
    """Return the datasets and their inputs as they are now. Removes expired pins."""
    log = context.log(specs[0].name)
    commit, manifests = log.read_all()
    if specs[0].version_set is None and len(manifests) > 1:
        others = ", ".join(sorted(set(manifests) - {specs[0].name}))
        problem = f"dataset {specs[0].name!r} is a member of a version set with {others}, and is declared alone."
        step = "Declare it with version_set(NAME, …) as before, or under a new name."
        raise DatasetError(problem, step, dataset=specs[0].name)
    if expire_pins(log, manifests, context.now(), by=context.by):
        commit, manifests = log.read_all()
    opened = []
    for spec in specs:
        stages = Stages(spec.name, on_stage)
        with stages("collect"):
            opened.append((spec, stages, open_source(context.systems, spec, context.lake, partition=partition)))
    stored_sources = [(manifests[spec.name], source) for spec, _, source in opened if spec.name in manifests]
    carried = {old.name: new for old, source in stored_sources if (new := source.follow_repartition(old)) is not None}
    if carried:
        commit = log.commit_all(commit, carried, by=context.by)
        manifests |= carried
    members = []
    for spec, stages, source in opened:
        with stages("collect"):
            stored = manifests.get(spec.name)
            manifest = source.first_manifest() if stored is None else source.resume_manifest(stored)
            committed = None if stored is None else as_bounded(stored)
            members.append(Member(spec, context, source, stages, manifest, committed))
    return AdvanceGroup(commit, tuple(members))


# A version set publishes, pins and rolls back the versions of several datasets in one commit.
#
#     version-sets/{set}/CURRENT      the one pointer: the manifests of all members
#     datasets/{member}/CURRENT       a redirect to it, and the manifest that the member joined with
#
# Joining fences a member's own pointer first, so that a writer that read it before can no longer commit there.

_FORMAT = 1


def join_version_set(lake: Lake, name: str, datasets: Sequence[str], *, by: str) -> None:
    """Make these datasets the members of the set. Safe to repeat; writes nothing if all are members already.

    Raises DatasetError if a dataset is in another set, or the set has members that are not named.
    """
    current = version_set_log(lake, name).current()
    known = set(member_bodies(current)) if current else set()
    missing = sorted(known - set(datasets))
    if missing:
        raise DatasetError(
            f"version set {name!r} has the members {', '.join(sorted(known))}, and {', '.join(missing)} is not "
            "declared in it any more.",
            "Declare it in the set again; to take a dataset out, declare it under a new name.",
            dataset=missing[0],
        )
    joined = {dataset: _fence(lake, name, dataset, by) for dataset in datasets if dataset not in known}
    if not joined:
        return

    def add(commit: Commit | None) -> dict[str, object] | None:
        members = member_bodies(commit) if commit else {}
        new = {dataset: body for dataset, body in joined.items() if dataset not in members}
        return {"format": _FORMAT, "members": members | new} if new else None

    version_set_log(lake, name).transact(add, by=by)


def _fence(lake: Lake, name: str, dataset: str, by: str) -> dict[str, object] | None:
    """Turn a dataset's own pointer into a redirect; return its previous manifest, None without one."""
    log = DatasetLog(lake, dataset)

    def fence() -> dict[str, object] | None:
        own = log.log.current()
        there = redirect_target(own) if own else None
        if there not in (None, name):
            problem = f"dataset {dataset!r} is a member of the version set {there!r} and can't join {name!r} as well."
            step = "A dataset is in one version set; declare it under a new name for the other."
            raise DatasetError(problem, step, dataset=dataset)
        if own is not None and there == name:
            kept: dict[str, object] | None = own.body["manifest"]
            return kept
        manifest = own.body if own and not is_deletion_commit(own) else None
        log.redirect(own, name, manifest, by=by)
        return manifest

    return retry_conflicts(lambda: fence)


def advance_bounded(
    context: Runtime,
    spec: AdjunctDataset,
    *,
    partition: str | None = None,
    make_current: bool = False,
    on_stage: OnStage = ignore_stage,
) -> AdvanceReport:
    """Publish every complete version, in order, and report what the next one waits for.

    `partition` requests the version of this name, if the dataset declares version partitions; an older one is retained
    without being served, unless `make_current`. Raises MarkerConflictError for contradictory markers, DatasetError for
    a changed declaration, ValidatorError for a mistake in a validator, and CommitConflictError if another writer was
    first. After an error the served version is unchanged.
    """
    if spec.version_set is not None:
        raise ConfigurationError(
            f"dataset {spec.name!r} is declared in the version set {spec.version_set!r}: its members advance together.",
            "Advance the set with all its members: advance_version_set(lake, systems, members, …).",
            dataset=spec.name,
        )
    _check_partition(spec, partition)
    group = snapshot_inputs(context, (spec,), on_stage, partition)
    # A query, or a requested partition, gives a version on each poll: publish one.
    return _advance(group, once=partition is not None or _has_query(group), make_current=make_current)[0]


@validated
@translate_spark_errors()
def advance_version_set(
    specs: Sequence[AdjunctDataset],
    *,
    lake: Lake | None = None,
    systems: Mapping[str, StreamSystem] | None = None,
    spark: SparkSession | Callable[[], SparkSession] | None = None,
    by: str | None = None,
    on_stage: OnStage = ignore_stage,
) -> list[AdvanceReport]:
    """Publish every version that all members of a version set have delivered, each in one commit.

    Returns one report for each member. A version rejected for one member is rejected for all. Raises as
    `advance_bounded` does, and MarkerConflictError if the members' next versions have different names.
    """
    with open_runtime(specs, lake=lake, systems=systems, spark=spark, by=resolve_user(by)) as runtime:
        return advance_members(runtime, specs, on_stage=on_stage)


@translate_spark_errors()
def advance_members(
    runtime: Runtime, specs: Sequence[AdjunctDataset], *, on_stage: OnStage = ignore_stage
) -> list[AdvanceReport]:
    """Publish what the members of a version set have delivered, with the given runtime."""
    names = {spec.version_set for spec in specs}
    if len(names) != 1 or None in names or len(specs) < 2:
        problem = f"datasets {', '.join(spec.name for spec in specs)} are not declared in one version set."
        step = "Declare them with version_set(NAME, …) and pass what it returns."
        raise ConfigurationError(problem, step, argument="specs")
    join_version_set(runtime.lake, str(names.pop()), [spec.name for spec in specs], by=runtime.by)
    group = snapshot_inputs(runtime, specs, on_stage)
    return _advance(group, once=_has_query(group), make_current=False)


@validated
def abandon_version(lake: Lake, dataset: str, version: str, *, reason: str, by: str) -> None:
    """Give up a version that can't be completed, by its delivered name, so that the next one can be published.

    Records before its markers are dropped from now on. A version that is already sealed stays as it is, and later
    deliveries under its name are dropped unread. In a version set this holds for all members. Safe to repeat.
    """
    require_audit_fields("abandon", version, reason, by)
    ended = Abandoned(name=version, reason=reason, by=by, at=lake.now())
    change = Change(action="abandon", version=version, reason=reason)

    def abandon(manifest: BoundedManifest) -> BoundedManifest | None:
        if any(abandoned.name == version for abandoned in manifest.abandoned):
            return None
        awaited = None if manifest.awaited and manifest.awaited.version == version else manifest.awaited
        return manifest.after(abandoned=(*manifest.abandoned, ended), awaited=awaited, change=change)

    DatasetLog(lake, dataset).transact_versions(
        lambda manifests: {name: after for name, m in manifests.items() if (after := abandon(m)) is not None} or None,
        by=by,
    )


def _advance(group: AdvanceGroup, *, once: bool, make_current: bool) -> list[AdvanceReport]:
    """Build, validate and publish until no delivery is complete. Return a report for each dataset."""
    while True:
        try:
            polled = poll_sources(group)
            if not polled.together:
                return [build_bounded_report(member) for member in commit_waiting(group, polled).members]
            candidates = [build_candidate(group.member(name), delivery) for name, delivery in polled.together.items()]
            validated = [validate_candidate(candidate) for candidate in reject_revoked_content(candidates)]
        except (MarkerConflictError, ValidatorError):
            commit_waits(group, {})
            raise
        group = publish_candidates(group, validated, make_current=make_current)
        if once:
            asked = Awaiting(None, (), idle=True)
            return [build_bounded_report(replace(member, awaiting=asked)) for member in group.members]


def _has_query(group: AdvanceGroup) -> bool:
    return any(isinstance(member.spec.input, QuerySource) for member in group.members)


def _check_partition(spec: AdjunctDataset, partition: str | None) -> None:
    if partition is None:
        known = spec.versions is not None and (spec.versions.start is not None or spec.versions.names)
        if known and isinstance(spec.input, QuerySource):
            # A name made of the time would sort after all others, which could then never become current.
            raise ConfigurationError(
                f"dataset {spec.name!r} is computed by a query for each of its partitions, but no partition was "
                "requested.",
                "Pass the partition to compute: partition=….",
                argument="partition",
                dataset=spec.name,
            )
        return
    if spec.versions is None:
        problem = f"declares no version partitions, but version {partition!r} was requested."
        step = "Declare them with versions=VersionPartitions(…), or advance it without a partition."
    elif spec.stream is not None:
        problem = f"is made from the stream {spec.stream}, whose markers name the versions."
        step = "Advance it without a partition: what the stream holds is published in its order."
    elif not spec.versions.has(partition):
        problem = f"declares {spec.versions}, which has no partition {partition!r}."
        step = "Request a declared partition, or declare this one."
    else:
        return
    raise ConfigurationError(f"dataset {spec.name!r} {problem}", step, argument="partition", dataset=spec.name)
