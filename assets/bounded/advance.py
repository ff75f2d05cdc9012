"""The advance of bounded datasets: arriving versions are built next to the served one, validated,
and switched to.

snapshot_inputs     -> AdvanceGroup      the datasets, their inputs, and their committed manifests
poll_sources        -> PollResult        the version that all have completely, or what they wait for
build_candidate     -> CandidateVersion  its files next to the served ones, and whether it is unfit
                                         or unchanged
validate_candidate  -> CandidateVersion  the verdicts of the validators
publish_candidates  -> AdvanceGroup      sealed and switched to, or stored as rejected, in one
                                         commit
commit_waiting      -> AdvanceGroup      no version is complete: what is awaited, in one commit

The switch is one commit of a dataset or of all members of a version set. A failure before it leaves
the served version and the offsets unchanged, and the next advance continues from there: a finished
build is reused, unless a query or a function made it. A version rejected because of its data is
stored as rejected and does not block the next one. Behaviour: SAMZA-1278, "Bounded dataset".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from dagster_adjunct.assets.bounded.candidate import (
    AdvanceGroup,
    CandidateVersion,
    Member,
    build_candidate,
    reject_revoked_content,
    validate_candidate,
)
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, FileSource, QuerySource
from dagster_adjunct.assets.sources.open_source import open_source
from dagster_adjunct.assets.sources.version_source import Awaiting, Delivery
from dagster_adjunct.assets.versions import actions
from dagster_adjunct.assets.versions.dataset_log import DatasetLog, Members, join_version_set
from dagster_adjunct.assets.versions.manifest import (
    MAX_DELIVERIES,
    MAX_NAMES,
    Abandoned,
    Awaited,
    BoundedManifest,
    Change,
    Delivered,
    as_bounded,
)
from dagster_adjunct.assets.versions.reports import (
    REJECT,
    Action,
    AdvanceReport,
    OnStage,
    Stages,
    ignore_stage,
)
from dagster_adjunct.assets.versions.version import VersionRef
from dagster_adjunct.assets.writing.generation import Runtime, open_runtime
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.arguments import resolve_user
from dagster_adjunct.resources.objects.commit_log import commit_with_rebase
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.reports import sum_counters
from dagster_adjunct.resources.spark.tasks import translate_spark_errors
from dagster_adjunct.resources.streams.system import StreamSystem
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DROPPED = frozenset({"redelivered", "left_out"})
"""The counters of records that were dropped."""


def build_bounded_report(member: Member) -> AdvanceReport:
    """Return the report of this dataset's advance, with what its next version waits for."""
    manifest = member.manifest
    version = manifest.version
    evaluated = member.last_built or version
    action = _choose_action(member)
    awaiting = member.awaiting
    if awaiting is not None and (_is_idle(member) or not awaiting.missing):
        awaiting = None
    lost = [summary.summary() for summary in member.lost]
    warnings = dict.fromkeys([*member.warnings, *lost, *member.notes])
    report = AdvanceReport(
        dataset=manifest.name,
        kind=manifest.declaration.kind,
        action=action,
        version=None if version is None else version.id,
        sealed=member.sealed,
        rejected=member.rejected,
        lost=tuple(chain.from_iterable(lost.versions for lost in member.lost)),
        warnings=tuple(warnings),
        rows=None if version is None else version.rows,
        counters=member.counters,
        offsets=manifest.offsets,
        seconds=member.stages.seconds,
        schema=member.source.schema if version is None else version.columns,
        note="; ".join(_list_notes(member, action, awaiting)),
    )
    if evaluated is not None:
        report = replace(report, evaluated=evaluated.id, verdicts=evaluated.verdicts)
    if awaiting is not None:
        report = replace(report, waiting=awaiting.missing, waiting_since=awaiting.since)
    return report


def _choose_action(member: Member) -> Action:
    """Return what this advance did, in one word."""
    if member.sealed:
        return "sealed"
    if member.rejected:
        return "rejected"
    if member.unchanged:
        return "unchanged"
    return "up-to-date" if _is_idle(member) else "waiting"


def _is_idle(member: Member) -> bool:
    """Whether nothing has arrived since the served version, and nothing was lost."""
    if member.awaiting is None or member.lost:
        return False
    return member.awaiting.idle and member.manifest.version is not None


def _list_notes(member: Member, action: Action, awaiting: Awaiting | None) -> Iterator[str]:
    """Yield what a reader of the report has to know besides its fields."""
    manifest = member.manifest
    if action == "unchanged":
        yield "the version delivered equals the current one"
    dropped = bool(member.notes) and not _DROPPED.isdisjoint(member.counters)
    if action == "up-to-date" and not dropped:
        yield "nothing new was delivered"
    for ref in _refs(manifest, member.rejected):
        yield _describe_rejected(member, ref)
    for ref in _refs(manifest, member.unserved):
        yield actions.describe_unserved(manifest, ref)
    newest = max(manifest.versions, key=lambda ref: ref.number, default=None)
    if newest is not None and newest.state == "rejected" and not member.rejected:
        yield f"version {newest.name!r} ({newest.id}), delivered last, is rejected: {newest.reason}"
    if awaiting is not None:
        yield f"{_name_awaited(awaiting, manifest)} waits for {awaiting.described}"
    if manifest.pin is not None:
        yield f"pinned to {manifest.pin.version} by {manifest.pin.by}: {manifest.pin.reason}"


def _refs(manifest: BoundedManifest, ids: Iterable[str]) -> list[VersionRef]:
    """Return the versions with these ids that are still known."""
    refs = [manifest.ref(id) for id in ids]
    return [ref for ref in refs if ref is not None]


def _name_awaited(awaiting: Awaiting, manifest: BoundedManifest) -> str:
    if awaiting.version:
        return f"version {awaiting.version!r}"
    return "the first version" if manifest.version is None else "the next version"


def _describe_rejected(member: Member, ref: VersionRef) -> str:
    """Return a note on a rejected version: the reason and the next steps."""
    name = member.spec.name
    source = member.spec.input
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
    """The next deliveries of the sources, by dataset: `complete` versions, and what the others are
    `waiting` for.

    `together` are the deliveries of one version that all members have; empty while one still waits.
    """

    complete: Mapping[str, Delivery]
    waiting: Mapping[str, Awaiting]
    together: Mapping[str, Delivery]


def poll_sources(group: AdvanceGroup) -> PollResult:
    """Ask each member's source for its next version. Raises MarkerConflictError if markers or
    members disagree.
    """
    polled = {member.name: member.source.next(member.manifest) for member in group.members}
    complete = {name: answer for name, answer in polled.items() if isinstance(answer, Delivery)}
    waiting = {name: answer for name, answer in polled.items() if isinstance(answer, Awaiting)}
    versions = {delivery.version for delivery in complete.values()}
    for version in versions:
        together = {
            name: delivery for name, delivery in complete.items() if delivery.version == version
        }
        # A member that had this version before it joined the set is not waited for. One that
        # abandoned it is, so the set never completes this version.
        if all(
            version in member.manifest.taken
            for member in group.members
            if member.name not in together
        ):
            return PollResult(complete, waiting, together)
    if len(versions) > 1:
        named = "; ".join(f"{name}: {delivery.version!r}" for name, delivery in complete.items())
        raise errors.MarkerConflictError(
            "the members of one version set have delivered different versions as the next"
            f" ({named}).",
            "If one of them has no counterpart in the other members, or lost it to retention,"
            " abandon it: adjunct dataset abandon DATASET VERSION --reason ….",
            dataset=next(iter(complete)),
        )
    return PollResult(complete, waiting, {})


def snapshot_inputs(
    context: Runtime,
    specs: Sequence[AdjunctDataset],
    on_stage: OnStage,
    partition: str | None = None,
) -> AdvanceGroup:
    """Return the datasets and their inputs as they are now.

    Commits the removal of expired pins, and the positions in inputs that were repartitioned.
    """
    log = context.log(specs[0].name)
    commit, manifests = log.read_all()
    if specs[0].version_set is None and len(manifests) > 1:
        others = ", ".join(sorted(set(manifests) - {specs[0].name}))
        problem = (
            f"dataset {specs[0].name!r} is a member of a version set with {others}, and is declared"
            " alone."
        )
        step = "Declare it with version_set(NAME, …) as before, or under a new name."
        raise errors.DatasetError(problem, step, dataset=specs[0].name)
    if actions.expire_pins(log, manifests, context.now(), by=context.by):
        commit, manifests = log.read_all()
    opened = []
    for spec in specs:
        stages = Stages(spec.name, on_stage)
        with stages("collect"):
            opened.append(
                (
                    spec,
                    stages,
                    open_source(context.systems, spec, context.lake, partition=partition),
                )
            )
    stored_sources = [
        (manifests[spec.name], source) for spec, _, source in opened if spec.name in manifests
    ]
    carried = {
        old.name: new
        for old, source in stored_sources
        if (new := source.follow_repartition(old)) is not None
    }
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


def advance_bounded(
    context: Runtime,
    spec: AdjunctDataset,
    *,
    partition: str | None = None,
    make_current: bool = False,
    on_stage: OnStage = ignore_stage,
) -> AdvanceReport:
    """Publish every complete version, in order, and report what the next one waits for.

    `partition` requests the version of this name, if the dataset declares version partitions; an
    older one is retained without being served, unless `make_current`. Raises MarkerConflictError
    for contradictory markers, DatasetError for a changed declaration, ValidatorError for a mistake
    in a validator, and CommitConflictError if another writer was first. After an error the served
    version is unchanged.
    """
    if spec.version_set is not None:
        raise errors.ConfigurationError(
            f"dataset {spec.name!r} is declared in the version set {spec.version_set!r}: its"
            " members advance together.",
            "Advance the set with all its members: advance_version_set(members).",
            dataset=spec.name,
        )
    _check_partition(spec, partition)
    group = snapshot_inputs(context, (spec,), on_stage, partition)
    # A query, or a requested partition, gives a version on each poll: publish one.
    return _advance(
        group, once=partition is not None or _has_query(group), make_current=make_current
    )[0]


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

    Returns one report for each member. A version rejected for one member is rejected for all.
    Raises as `advance_bounded` does, and MarkerConflictError if the members' next versions have
    different names.
    """
    with open_runtime(
        specs, lake=lake, systems=systems, spark=spark, by=resolve_user(by)
    ) as runtime:
        return advance_members(runtime, specs, on_stage=on_stage)


@translate_spark_errors()
def advance_members(
    runtime: Runtime, specs: Sequence[AdjunctDataset], *, on_stage: OnStage = ignore_stage
) -> list[AdvanceReport]:
    """Do what `advance_version_set` does, with the given runtime."""
    names = {spec.version_set for spec in specs}
    if len(names) != 1 or None in names or len(specs) < 2:
        problem = (
            f"datasets {', '.join(spec.name for spec in specs)} are not declared in one version"
            " set."
        )
        step = "Declare them with version_set(NAME, …) and pass what it returns."
        raise errors.ConfigurationError(problem, step, argument="specs")
    join_version_set(runtime.lake, str(names.pop()), [spec.name for spec in specs], by=runtime.by)
    group = snapshot_inputs(runtime, specs, on_stage)
    return _advance(group, once=_has_query(group), make_current=False)


@validated
def abandon_version(lake: Lake, dataset: str, version: str, *, reason: str, by: str) -> None:
    """Give up a version that can't be completed, by its delivered name, so that the next one can be
    published.

    Records before its markers are dropped from now on. A version that is already sealed stays as it
    is, and later deliveries under its name are dropped unread. In a version set this holds for all
    members. Safe to repeat.
    """
    actions.require_audit_fields("abandon", version, reason, by)
    ended = Abandoned(name=version, reason=reason, by=by, at=lake.now())
    change = Change(action="abandon", version=version, reason=reason)

    def abandon(manifest: BoundedManifest) -> BoundedManifest | None:
        if any(abandoned.name == version for abandoned in manifest.abandoned):
            return None
        awaited = (
            None if manifest.awaited and manifest.awaited.version == version else manifest.awaited
        )
        return manifest.after(
            abandoned=(*manifest.abandoned, ended), awaited=awaited, change=change
        )

    DatasetLog(lake, dataset).transact_versions(
        lambda manifests: (
            {name: after for name, m in manifests.items() if (after := abandon(m)) is not None}
            or None
        ),
        by=by,
    )


def _advance(group: AdvanceGroup, *, once: bool, make_current: bool) -> list[AdvanceReport]:
    """Build, validate and publish until no delivery is complete, or one if `once`. Return a
    report for each dataset.
    """
    while True:
        try:
            polled = poll_sources(group)
            if not polled.together:
                return [
                    build_bounded_report(member) for member in commit_waiting(group, polled).members
                ]
            candidates = [
                build_candidate(group.member(name), delivery)
                for name, delivery in polled.together.items()
            ]
            validated = [
                validate_candidate(candidate) for candidate in reject_revoked_content(candidates)
            ]
        except (errors.MarkerConflictError, errors.ValidatorError):
            commit_waits(group, {})
            raise
        group = publish_candidates(group, validated, make_current=make_current)
        if once:
            asked = Awaiting(None, (), idle=True)
            return [
                build_bounded_report(replace(member, awaiting=asked)) for member in group.members
            ]


def _has_query(group: AdvanceGroup) -> bool:
    return any(isinstance(member.spec.input, QuerySource) for member in group.members)


def _check_partition(spec: AdjunctDataset, partition: str | None) -> None:
    if partition is None:
        known = spec.versions is not None and (
            spec.versions.start is not None or spec.versions.names
        )
        if not known or not isinstance(spec.input, QuerySource):
            return
        # A name made of the time would sort after all others, which could then never become
        # current.
        problem = (
            "is computed by a query for each of its partitions, but no partition was requested."
        )
        step = "Pass the partition to compute: partition=…."
    elif spec.versions is None:
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
    raise errors.ConfigurationError(
        f"dataset {spec.name!r} {problem}", step, argument="partition", dataset=spec.name
    )


def rebase_candidates(group: AdvanceGroup, candidates: Sequence[CandidateVersion]) -> AdvanceGroup:
    """Return the group with the commits that other writers have made meanwhile.

    Raises CommitConflictError if they make one of the candidates' builds unusable.
    """
    manifests, rebased = _follow_commits(group)
    for candidate in (candidate.with_member_of(group) for candidate in candidates):
        now = manifests.get(candidate.member.name)
        if now is None and candidate.member.committed is None:
            continue  # it has no commit yet, only other members of its version set have
        what = "discarded this build" if now is None else _find_conflict(candidate, now)
        if what:
            # Before another build of this delivery is published, another writer may still find and
            # publish this one.
            settled = (
                now is not None
                and candidate.delivery.version in now.taken - candidate.member.manifest.taken
            )
            if (
                now is not None
                and settled
                and not any(candidate.attempt.folder in ref.folders for ref in now.versions)
            ):
                candidate.delete_attempt(files=True)
            name = candidate.member.name
            problem = (
                f"dataset {name!r}, version {candidate.delivery.version!r}: another writer"
                f" {what} meanwhile."
            )
            step = (
                "Nothing of this attempt is served. Advance again: it continues from the other"
                " writer's commit."
            )
            raise errors.CommitConflictError(problem, step, dataset=name)
    return rebased


def _find_conflict(candidate: CandidateVersion, now: BoundedManifest) -> str:
    """Return what other writers did to make a build unusable, "" if nothing."""
    before = candidate.member.manifest
    if candidate.attempt.folder in now.doomed:
        return "discarded this build"
    if _has_new_delivery(before, now):
        return "took in the same delivery"
    if candidate.document is None and candidate.unchanged:
        ref = now.ref(candidate.unchanged)
        same = before.head == now.head and ref is not None and ref.state == "sealed"
        return "" if same else "changed what is current, to which this version was equal"
    # Checked after this manifest was read: a finished discard no longer lists the objects as
    # doomed.
    if candidate.document is not None and (
        candidate.document in now.doomed or not candidate.is_stored()
    ):
        return "discarded this build"
    return ""


def rebase_waiting(group: AdvanceGroup) -> AdvanceGroup | None:
    """Return the group with the commits that other writers have made meanwhile; None if one took
    in a delivery.
    """
    manifests, rebased = _follow_commits(group)
    for member in group.members:
        before = member.committed
        now = manifests.get(member.name)
        if (before is None) != (now is None) or (before and now and _has_new_delivery(before, now)):
            return None
    return rebased


def _follow_commits(group: AdvanceGroup) -> tuple[Members, AdvanceGroup]:
    """Return the committed manifests, and the group with them, so that its commits undo no
    concurrent change.
    """
    commit, stored = group.members[0].log.read_all()
    manifests = {name: as_bounded(manifest) for name, manifest in stored.items()}
    members = tuple(
        (
            replace(
                member,
                committed=now,
                manifest=now.with_declared_policies(member.source.declaration),
            )
            if (now := manifests.get(member.name)) is not None
            else member
        )
        for member in group.members
    )
    return manifests, replace(group, commit=commit, members=members)


def _has_new_delivery(before: BoundedManifest, now: BoundedManifest) -> bool:
    """Whether a version was delivered or abandoned between two manifests; dropping one does not
    count.
    """
    if (before.offsets, before.abandoned, before.next_number) != (
        now.offsets,
        now.abandoned,
        now.next_number,
    ):
        return True
    # Version ids are ignored: an erasure changes them, and is no delivery.
    known = [(done.name, done.markers) for done in before.delivered]
    for delivered in [(done.name, done.markers) for done in now.delivered if not done.freed]:
        if delivered not in known:
            return True
        known.remove(delivered)
    return False


def input_position(
    manifest: BoundedManifest, answer: Delivery | Awaiting, done: Delivered | None = None
) -> dict[str, object]:
    """Return the fields of the manifest that change with the position in the input: offsets, losses
    and deliveries.

    `done` is the manifest's record of the delivery, None if the answer is Awaiting.
    """
    newest = {done.name: done for done in manifest.delivered}
    delivered: tuple[Delivered, ...] = (
        tuple(  # with new markers for those whose files were copied without a change
            (
                earlier.model_copy(update={"markers": dict(answer.copies[earlier.name])})
                if earlier.name in answer.copies and earlier is newest[earlier.name]
                else earlier
            )
            for earlier in manifest.delivered
        )
    )
    known = manifest.known
    if done is not None:
        # A freed name is taken again. Names that are still free are kept, whatever their age.
        delivered = (
            *(
                earlier
                for earlier in delivered
                if not (earlier.freed and earlier.name == done.name)
            ),
            done,
        )
        older = delivered[:-MAX_DELIVERIES]
        recent = delivered[-MAX_DELIVERIES:]
        delivered = (*(earlier for earlier in older if earlier.freed), *recent)
        known = (*known, *(earlier.name for earlier in older if not earlier.freed))[-MAX_NAMES:]
    return {
        "offsets": dict(answer.offsets),
        "stream": answer.stream or manifest.stream,
        "lost": (*manifest.lost, *([answer.lost] if answer.lost is not None else []))[
            -MAX_DELIVERIES:
        ],
        "delivered": delivered,
        "known": known,
    }


def commit_reason(answer: Delivery | Awaiting, *more: str) -> str:
    """Return the reason to store with a commit: `more`, then the losses and notes in the
    source's answer.
    """
    lost = answer.lost.summary() if answer.lost is not None else ""
    return "; ".join(filter(None, (*more, lost, *answer.notes)))


def commit_waiting(group: AdvanceGroup, polled: PollResult) -> AdvanceGroup:
    """Commit what the group waits for, if that has changed; return the group, with `awaiting`
    set in each member.
    """
    begun = next((delivery.version for delivery in polled.complete.values()), None)
    waits = {
        name: _begin_waiting(group.member(name), answer, begun)
        for name, answer in polled.waiting.items()
    }
    missing = tuple(marker for answer in waits.values() for marker in answer.missing)
    since = min(
        (answer.since for answer in waits.values() if answer.since is not None), default=None
    )
    others = Awaiting(begun, missing, since=since)  # for members that have a complete version
    group = commit_waits(group, waits)
    members = [
        (
            replace(
                member.with_source_report(polled.waiting[member.name]), awaiting=waits[member.name]
            )
            if member.name in waits
            else replace(member, awaiting=others)
        )
        for member in group.members
    ]
    return replace(group, members=tuple(members))


def commit_waits(group: AdvanceGroup, waits: Mapping[str, Awaiting]) -> AdvanceGroup:
    """Commit these waits, and the start offsets of members without a commit; return the group after
    it.

    Without a first commit, nobody could abandon the version that the dataset waits for.
    """

    def commit(group: AdvanceGroup) -> AdvanceGroup:
        members = []
        for member in group.members:
            start = (
                Awaiting(None, (), offsets=member.manifest.offsets)
                if member.committed is None
                else None
            )
            answer = waits.get(member.name, start)
            if answer is not None and (after := _waiting_manifest(member, answer)) is not None:
                members.append(member.after_commit(after))
        return group.commit_members(members) if members else group

    return commit_with_rebase(group, commit, rebase_waiting)


def _waiting_manifest(member: Member, awaiting: Awaiting) -> BoundedManifest | None:
    """Return the manifest with what is awaited, None if nothing changes."""
    manifest = member.manifest
    awaited = None
    if awaiting.since is not None:
        awaited = Awaited(version=awaiting.version, missing=awaiting.missing, since=awaiting.since)
    now, before = (each and (each.version, each.missing) for each in (awaited, manifest.awaited))
    same = now == before
    if (
        dict(awaiting.offsets) == manifest.offsets
        and same
        and not awaiting.copies
        and member.committed == manifest
    ):
        return None
    change = Change(
        action="wait", version=awaited.version if awaited else None, reason=commit_reason(awaiting)
    )
    return manifest.after(awaited=awaited, **input_position(manifest, awaiting), change=change)


def _begin_waiting(member: Member, awaiting: Awaiting, others: str | None) -> Awaiting:
    """Return a source's answer with the awaited version, and since when it is awaited.

    `others` is the version that other members of the version set have completely, None if there is
    none.
    """
    if awaiting.idle and others is None:
        return awaiting
    before = member.manifest.awaited
    version = awaiting.version or others
    since = (
        before.since if before is not None and before.version == version else member.context.now()
    )
    return replace(awaiting, version=version, idle=False, since=since)


def apply_delivery(
    candidate: CandidateVersion, rejected: CandidateVersion | None, *, switches: bool, between: bool
) -> Member:
    """Return the member after the commit of this delivery, with the outcome.

    `rejected` is the candidate, perhaps of another member, for which the delivery is rejected; None
    publishes it. `switches` makes the version current; otherwise `between` inserts it by time.
    """
    after = _apply_to_manifest(candidate, rejected, switches, between)
    member = candidate.member.with_source_report(candidate.delivery).after_commit(after)
    ref = after.ref(candidate.id)
    if ref is None:
        member = replace(member, unchanged=(*member.unchanged, str(candidate.unchanged)))
    elif ref.state == "rejected":
        member = replace(member, rejected=(*member.rejected, candidate.id))
    else:
        built = dict(candidate.version.counters) if candidate.version else {}
        member = replace(
            member,
            sealed=(*member.sealed, candidate.id),
            unserved=(*member.unserved, *(() if after.head == candidate.id else (candidate.id,))),
            counters=sum_counters(dict(member.counters), built),
        )
    return replace(
        member, warnings=(*member.warnings, *candidate.warnings), last_built=candidate.version
    )


def _apply_to_manifest(
    candidate: CandidateVersion, rejected: CandidateVersion | None, switches: bool, between: bool
) -> BoundedManifest:
    """Return the manifest with this delivery: published, rejected because of `rejected`, or
    unchanged.
    """
    manifest = candidate.member.manifest
    delivery = candidate.delivery
    version = candidate.version
    unchanged = candidate.unchanged if rejected is None else None
    ref = _version_ref(candidate, rejected)
    head = {"head": ref.id} if rejected is None and switches else {}
    # A repeated delivery of revoked content takes no name.
    freed = candidate.member.context.now() if rejected is not None and rejected.revoked else None
    done = Delivered(
        name=delivery.version, version=ref.id, markers=dict(delivery.markers), freed=freed
    )
    fields = {**input_position(manifest, delivery, done), **head, "awaited": None}
    if unchanged is None:
        used = [generation.id for generation in version.generations] if version is not None else []
        fields |= {
            "versions": (
                (*manifest.versions, ref)
                if head or rejected
                else actions.insert_unserved_version(manifest, ref, between=between)
            ),
            "next_number": candidate.number + 1,
            "next_generation": max([manifest.next_generation, *(number + 1 for number in used)]),
            "counters": sum_counters(
                manifest.counters, version.counters if version is not None else {}
            ),
        }
    if rejected is not None:
        change = Change(action="reject", version=ref.id, reason=commit_reason(delivery, ref.reason))
        return manifest.after(**fields, change=change)
    action = "seal"
    note = "" if head else "sealed but not served: a later version stays current"
    if unchanged is not None:
        action = "unchanged"
        note = f"delivered as {delivery.version}"
    change = Change(action=action, version=ref.id, reason=commit_reason(delivery, note))
    return actions.with_served_version(
        candidate.member.log, manifest, **fields, built=version, change=change
    )


def is_at_or_after_head(candidate: CandidateVersion) -> bool:
    """Whether a version comes after the head (the version of the last switch) in the dataset's
    order, or equals it.
    """
    manifest = candidate.member.manifest
    head = manifest.ref(manifest.head) if manifest.head else None
    order = actions.version_order(manifest)
    return head is None or bool(order(_version_ref(candidate, None)) >= order(head))


def _version_ref(candidate: CandidateVersion, rejected: CandidateVersion | None) -> VersionRef:
    """Return the manifest's entry for a version; for an unchanged one, that of the version that
    it equals.
    """
    if rejected is None and candidate.unchanged:
        same = candidate.member.manifest.ref(candidate.unchanged)
        assert same is not None, "the version that it equals was found in this manifest"
        return same
    version = candidate.version
    reason = ""
    if rejected is not None:
        reason = rejected.problem
        if rejected.member.name != candidate.member.name:
            reason = f"member {rejected.member.name} of the version set rejected it: {reason}"
    return VersionRef(
        id=candidate.id,
        number=candidate.number,
        name=candidate.delivery.version,
        rows=None if version is None else version.rows,
        sealed_at=candidate.member.context.now() if version is None else version.sealed_at,
        state="sealed" if rejected is None else "rejected",
        document=candidate.document,
        folders=(
            ()
            if version is None
            else tuple(generation.folder for generation in version.generations)
        ),
        bytes=0 if version is None else sum(generation.size for generation in version.generations),
        reason=reason,
        verdicts=version.verdicts if rejected is not None and version is not None else (),
        valid_from=None if version is None else version.valid_from,
    )


def publish_candidates(
    group: AdvanceGroup, validated: Sequence[CandidateVersion], *, make_current: bool
) -> AdvanceGroup:
    """Commit these versions together: all published, or all rejected if one is. Return the group
    after it.

    The reported stages are "seal" and "switch", "keep" if the served version stays, "unchanged", or
    "reject".
    """
    rejected = next((candidate for candidate in validated if candidate.problem), None)
    first = validated[0].member
    version = validated[0].delivery.version
    candidates = list(validated)
    if rejected is None:
        for at, candidate in enumerate(validated):
            if candidate.version is not None and not candidate.unchanged:
                with candidate.member.stages("seal", version):
                    candidates[at] = candidate.with_document()
    with first.stages("switch" if rejected is None else REJECT, version) as switching:
        if rejected is not None:
            candidates = [candidate.with_document() for candidate in validated]
        group = _commit_candidates(group, candidates, rejected, make_current=make_current)
        done = [candidate.with_member_of(group) for candidate in candidates]
        for candidate in done:
            candidate.delete_attempt(files=candidate.member.manifest.ref(candidate.id) is None)
        switching.detail = rejected.problem if rejected is not None else ""
        served = {
            now.id for candidate in done if (now := candidate.member.manifest.version) is not None
        }
        if rejected is None and all(candidate.unchanged for candidate in done):
            switching.name = "unchanged"
        elif rejected is None and served.isdisjoint(candidate.id for candidate in done):
            switching.name = "keep"
            switching.detail = "what is served stays"
    return group


def _commit_candidates(
    group: AdvanceGroup,
    candidates: Sequence[CandidateVersion],
    rejected: CandidateVersion | None,
    *,
    make_current: bool,
) -> AdvanceGroup:
    def commit(group: AdvanceGroup) -> AdvanceGroup:
        now = [candidate.with_member_of(group) for candidate in candidates]
        switches = make_current or all(map(is_at_or_after_head, now))
        between = all(member.manifest.declaration.by_time for member in group.members)
        after = (
            apply_delivery(candidate, rejected, switches=switches, between=between)
            for candidate in now
        )
        return group.commit_members(list(after))

    def catch_up(group: AdvanceGroup) -> AdvanceGroup:
        try:
            return rebase_candidates(group, candidates)
        except errors.CommitConflictError:
            with suppress(errors.AdjunctError):  # documents that remain are left to a discard
                store = group.members[0].context.lake.store
                store.delete_many(
                    [
                        candidate.document
                        for candidate in candidates
                        if candidate.document is not None
                    ]
                )
            raise

    return commit_with_rebase(group, commit, catch_up)
