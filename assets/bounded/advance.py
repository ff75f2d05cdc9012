"""The advance of bounded datasets: arriving versions are built next to the served one, validated,
and switched to.

prepare_inputs      -> AdvanceGroup      the datasets, their inputs, and their committed manifests
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

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Unpack

from dagster_adjunct.assets.bounded.candidate import (
    AdvanceGroup,
    CandidateVersion,
    Member,
    build_bounded_report,
    build_candidate,
    evolve_known_columns,
    reject_revoked_content,
    validate_candidate,
)
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, BoundedDataset, QuerySource
from dagster_adjunct.assets.generation import Runtime, RuntimeOptions, open_runtime
from dagster_adjunct.assets.sources.open_source import open_source
from dagster_adjunct.assets.sources.version_source import Awaiting, Delivery, VersionSource
from dagster_adjunct.assets.versions import switches as actions
from dagster_adjunct.assets.versions.dataset_log import DatasetLog, Members, join_version_set
from dagster_adjunct.assets.versions.manifest import (
    MAX_DELIVERIES,
    MAX_NAMES,
    Abandoned,
    Awaited,
    BoundedManifest,
    Change,
    DatasetManifest,
    Delivered,
    MarkerFacts,
    as_bounded,
)
from dagster_adjunct.assets.versions.reports import (
    REJECT,
    AdvanceReport,
    OnStage,
    Stages,
    ignore_stage,
)
from dagster_adjunct.assets.versions.version import VersionRef
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.arguments import resolve_user
from dagster_adjunct.resources.objects.commit_log import commit_with_rebase
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.reports import sum_counters
from dagster_adjunct.resources.spark.tasks import translate_spark_errors
from dagster_adjunct.resources.validation import validated


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
    """Ask each member's source for its next version, and find one that all members have.

    Raises MarkerConflictError if the markers of a version contradict each other, or if no version
    is common to all members although two of them have delivered different ones.
    """
    complete: dict[str, Delivery] = {}
    waiting: dict[str, Awaiting] = {}
    by_version: dict[str, dict[str, Delivery]] = {}  # then by member
    for member in group.members:
        answer = member.source.next(member.manifest)
        if isinstance(answer, Delivery):
            complete[member.name] = answer
            by_version.setdefault(answer.version, {})[member.name] = answer
        else:
            waiting[member.name] = answer
    for version, together in by_version.items():
        # A member that had this version before it joined the set is not waited for. One that
        # abandoned it is, so the set never completes this version.
        had_it = {member.name for member in group.members if version in member.manifest.taken}
        all_have_it = len(together.keys() | had_it) == len(group.members)
        if all_have_it:
            return PollResult(complete, waiting, together)
    if len(by_version) > 1:
        named = "; ".join(f"{name}: {delivery.version!r}" for name, delivery in complete.items())
        raise errors.MarkerConflictError(
            "the members of one version set have delivered different versions as the next"
            f" ({named}).",
            "If one of them has no counterpart in the other members, or lost it to retention,"
            " abandon it: adjunct dataset abandon DATASET VERSION --reason ….",
            dataset=next(iter(complete)),
        )
    return PollResult(complete, waiting, {})


def prepare_inputs(
    context: Runtime,
    specs: Sequence[BoundedDataset],
    on_stage: OnStage,
    partition: str | None = None,
) -> AdvanceGroup:
    """Open the inputs, commit what has to change before an advance, and return the datasets.

    Commits the removal of expired pins, and the positions in inputs that were repartitioned.
    `partition` is the name of the only version to look for, None for any. Raises DatasetError for
    declarations that contradict what is committed.
    """
    log = context.log(specs[0].name)
    commit, manifests = log.read_all()
    if specs[0].version_set is None and len(manifests) > 1:
        others = ", ".join(sorted(set(manifests) - {specs[0].name}))
        raise errors.DatasetError(
            f"dataset {specs[0].name!r} is a member of a version set with {others}, and is declared"
            " alone.",
            "Declare it with version_set(NAME, …) as before, or under a new name.",
            dataset=specs[0].name,
        )
    if actions.expire_pins(log, manifests, context.now(), by=context.by):
        commit, manifests = log.read_all()
    stages = {spec.name: Stages(spec.name, on_stage) for spec in specs}
    sources: dict[str, VersionSource] = {}
    repartitioned: dict[str, DatasetManifest] = {}
    for spec in specs:
        name = spec.name
        with stages[name]("collect"):
            sources[name] = open_source(context.systems, spec, context.lake, partition=partition)
        stored = manifests.get(name)
        if stored is not None:
            followed = sources[name].follow_repartition(stored)
            if followed is not None:
                repartitioned[name] = followed
    if repartitioned:  # a commit of its own, whose change says why the offsets differ
        commit = log.commit_all(commit, repartitioned, by=context.by)
        manifests |= repartitioned
    members = []
    for spec in specs:
        source = sources[spec.name]
        stored = manifests.get(spec.name)
        with stages[spec.name]("collect"):  # adds to the time of opening the input
            if stored is None:
                manifest = source.first_manifest()
                committed = None
            else:
                manifest = source.resume_manifest(stored)
                committed = as_bounded(stored)
        member = Member(spec, context, source, stages[spec.name], manifest, committed)
        evolve_known_columns(member)  # only for its errors, before anything is read
        members.append(member)
    return AdvanceGroup(commit, tuple(members))


def advance_bounded(
    context: Runtime,
    spec: BoundedDataset,
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
    group = prepare_inputs(context, (spec,), on_stage, partition)
    # A query, or a requested partition, gives a version on each poll: publish one.
    return _advance(
        group, once=partition is not None or _has_query(group), make_current=make_current
    )[0]


@validated
@translate_spark_errors()
def advance_version_set(
    specs: Sequence[AdjunctDataset],
    *,
    by: str | None = None,
    on_stage: OnStage = ignore_stage,
    **where: Unpack[RuntimeOptions],
) -> list[AdvanceReport]:
    """Publish every version that all members of a version set have delivered, each in one commit.

    Returns one report for each member. A version rejected for one member is rejected for all.
    Raises as `advance_bounded` does, and MarkerConflictError if the members' next versions have
    different names.
    """
    with open_runtime(specs, by=resolve_user(by), **where) as runtime:
        return advance_members(runtime, specs, on_stage=on_stage)


@translate_spark_errors()
def advance_members(
    runtime: Runtime, specs: Sequence[AdjunctDataset], *, on_stage: OnStage = ignore_stage
) -> list[AdvanceReport]:
    """Advance a version set as `advance_version_set` does, with the given runtime. Raises
    ConfigurationError for datasets that are not declared in one set.
    """
    name = specs[0].version_set if specs else None
    members = []
    for spec in specs:
        if isinstance(spec, BoundedDataset) and spec.version_set == name:
            members.append(spec)
    are_of_one_set = name is not None and len(members) == len(specs) and len(members) > 1
    if name is None or not are_of_one_set:
        raise errors.ConfigurationError(
            f"datasets {', '.join(spec.name for spec in specs)} are not declared in one version"
            " set.",
            "Declare them with version_set(NAME, …) and pass what it returns.",
            argument="specs",
        )
    join_version_set(runtime.lake, name, [spec.name for spec in specs], by=runtime.by)
    group = prepare_inputs(runtime, members, on_stage)
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

    def abandon(manifests: Members) -> Members:
        after = {}
        for name, manifest in manifests.items():
            if version in manifest.given_up:
                continue
            awaited = manifest.awaited
            if awaited is not None and awaited.version == version:
                awaited = None
            abandoned = (*manifest.abandoned, ended)
            after[name] = manifest.after(abandoned=abandoned, awaited=awaited, change=change)
        return after

    DatasetLog(lake, dataset).transact_versions(abandon, by=by)


def _advance(group: AdvanceGroup, *, once: bool, make_current: bool) -> list[AdvanceReport]:
    """Build, validate and publish one delivery after the other, until none is complete; with
    `once`, at most one. Return a report for each dataset.
    """
    polled = None
    while polled is None or not once:
        try:
            polled = poll_sources(group)
            if not polled.together:
                group = commit_waiting(group, polled)
                return [build_bounded_report(member) for member in group.members]
            candidates = []
            for name, delivery in polled.together.items():
                candidates.append(build_candidate(group.member(name), delivery))
            validated = [*map(validate_candidate, reject_revoked_content(candidates))]
        except (errors.MarkerConflictError, errors.ValidatorError):
            commit_waits(group, {})
            raise
        group = publish_candidates(group, validated, make_current=make_current)
    # One version was wanted and is published: nothing more is awaited.
    nothing = Awaiting(None, (), idle=True)
    return [build_bounded_report(replace(member, awaiting=nothing)) for member in group.members]


def _has_query(group: AdvanceGroup) -> bool:
    """Whether one of the datasets is the result of a query."""
    return any(isinstance(member.spec.input, QuerySource) for member in group.members)


def _check_partition(spec: BoundedDataset, partition: str | None) -> None:
    """Raise ConfigurationError for a requested partition that the dataset does not declare, and for
    a missing request if a query computes the dataset by partition.
    """
    if partition is None:
        versions = spec.versions
        if versions is None or not isinstance(spec.input, QuerySource):
            return
        lists_partitions = versions.start is not None or bool(versions.names)
        if not lists_partitions:
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
    for built in candidates:
        candidate = built.with_member_of(group)
        member = candidate.member
        now = manifests.get(member.name)
        if now is not None:
            deed = _find_conflict(candidate, now)
        elif member.committed is not None:
            deed = "discarded this build"
        else:
            continue  # it has no commit yet, only other members of its version set have
        if not deed:
            continue
        if now is not None:
            _delete_if_settled(candidate, now)
        raise errors.CommitConflictError(
            f"dataset {member.name!r}, version {candidate.delivery.version!r}: another writer"
            f" {deed} meanwhile.",
            "Nothing of this attempt is served. Advance again: it continues from the other"
            " writer's commit.",
            dataset=member.name,
        )
    return rebased


def _delete_if_settled(candidate: CandidateVersion, now: BoundedManifest) -> None:
    """Delete a build whose delivery another writer has published from another build.

    Before that, another writer may still find and publish this one.
    """
    is_settled = candidate.delivery.version in now.taken - candidate.member.manifest.taken
    # By another run, which found it as a finished build.
    is_used = any(candidate.attempt.folder in ref.folders for ref in now.versions)
    if is_settled and not is_used:
        candidate.delete_attempt(files=True)


def _find_conflict(candidate: CandidateVersion, now: BoundedManifest) -> str:
    """Return what other writers have done, up to the manifest `now`, that makes a build unusable;
    "" if nothing.
    """
    before = candidate.member.manifest
    if candidate.attempt.folder in now.doomed:
        return "discarded this build"
    if _has_new_delivery(before, now):
        return "took in the same delivery"
    if candidate.document is not None:
        # A finished discard no longer lists what it deleted as doomed. So whether the objects are
        # still there is asked after `now` was read.
        if candidate.document in now.doomed or not candidate.is_stored():
            return "discarded this build"
        return ""
    if candidate.unchanged:
        is_still_equal = before.head == now.head and now.retains(candidate.unchanged)
        if not is_still_equal:
            return "changed what is current, to which this version was equal"
    return ""


def rebase_waiting(group: AdvanceGroup) -> AdvanceGroup | None:
    """Return the group with the commits that other writers have made meanwhile; None if one took
    in a delivery.
    """
    manifests, rebased = _follow_commits(group)
    for member in group.members:
        before = member.committed
        now = manifests.get(member.name)
        if before is not None and now is not None:
            has_changed = _has_new_delivery(before, now)
        else:
            # Its first commit was made, or undone, meanwhile.
            has_changed = before is not now
        if has_changed:
            return None
    return rebased


def _follow_commits(group: AdvanceGroup) -> tuple[Members, AdvanceGroup]:
    """Return the manifests that are committed now, and the group with them. A commit of that group
    undoes no concurrent change.
    """
    commit, stored = group.members[0].log.read_all()
    manifests = {name: as_bounded(manifest) for name, manifest in stored.items()}
    members = []
    for member in group.members:
        now = manifests.get(member.name)
        if now is not None:
            declared = now.with_declared_policies(member.source.declaration)
            member = replace(member, committed=now, manifest=declared)  # noqa: PLW2901
        members.append(member)
    return manifests, replace(group, commit=commit, members=tuple(members))


def _has_new_delivery(before: BoundedManifest, now: BoundedManifest) -> bool:
    """Whether a version was delivered or abandoned between two manifests. Names that became free
    meanwhile are no deliveries.
    """
    if before.next_number != now.next_number:
        return True
    if before.offsets != now.offsets or before.abandoned != now.abandoned:
        return True
    # What is left are deliveries without a number and offsets: of files that equal a version.
    # Version ids are ignored: an erasure changes them, and is no delivery.
    known = [(done.name, done.markers) for done in before.delivered]
    for done in now.delivered:
        if done.freed:
            continue
        delivered = (done.name, done.markers)
        if delivered not in known:
            return True
        known.remove(delivered)  # each delivery from before accounts for one
    return False


def input_position(
    manifest: BoundedManifest, answer: Delivery | Awaiting, done: Delivered | None = None
) -> dict[str, object]:
    """Return the fields of the manifest that change with the position in the input: offsets, losses
    and deliveries.

    `done` is the manifest's record of the delivery, None if the answer is Awaiting.
    """
    delivered = _with_copies(manifest, answer.copies)
    known = list(manifest.known)
    if done is not None:
        delivered, old_names = _add_delivery(delivered, done)
        known += old_names
    lost = manifest.lost if answer.lost is None else (*manifest.lost, answer.lost)
    return {
        "offsets": dict(answer.offsets),
        "stream": answer.stream or manifest.stream,
        "lost": lost[-MAX_DELIVERIES:],
        "delivered": tuple(delivered),
        "known": tuple(known[-MAX_NAMES:]),
    }


def _with_copies(
    manifest: BoundedManifest, copies: Mapping[str, Mapping[str, MarkerFacts]]
) -> list[Delivered]:
    """Return the deliveries in the manifest, with the new marker facts of `copies` (see
    `_Answer`) in the newest delivery of each name.
    """
    newest = manifest.newest_deliveries
    after = []
    for done in manifest.delivered:
        if done.name in copies and done is newest[done.name]:
            after.append(done.model_copy(update={"markers": dict(copies[done.name])}))
        else:
            after.append(done)
    return after


def _add_delivery(
    delivered: Sequence[Delivered], done: Delivered
) -> tuple[list[Delivered], list[str]]:
    """Return the deliveries to record, with `done` as the last one, and the names of those that
    are too old to be recorded.

    `done` replaces a delivery of its name that was freed. Deliveries whose names are free stay
    recorded, whatever their age.
    """
    recorded = []
    for earlier in delivered:
        is_replaced = earlier.name == done.name and earlier.freed
        if not is_replaced:
            recorded.append(earlier)
    recorded.append(done)
    free = []
    old_names = []
    for earlier in recorded[:-MAX_DELIVERIES]:
        if earlier.freed:
            free.append(earlier)
        else:
            old_names.append(earlier.name)
    return [*free, *recorded[-MAX_DELIVERIES:]], old_names


def commit_reason(answer: Delivery | Awaiting, *more: str) -> str:
    """Return the reason to store with a commit: `more`, then the losses and notes in the
    source's answer; "" if there are none.
    """
    lost = answer.lost.summary() if answer.lost is not None else ""
    return "; ".join(filter(None, (*more, lost, *answer.notes)))


def commit_waiting(group: AdvanceGroup, polled: PollResult) -> AdvanceGroup:
    """Commit what the group waits for, if that has changed; return the group, with `awaiting`
    set in each member.

    Members without a complete version wait for it themselves. The others wait for these members.
    """
    begun = next((delivery.version for delivery in polled.complete.values()), None)
    waits: dict[str, Awaiting] = {}
    missing: list[str] = []
    sinces: list[datetime] = []
    for name, answer in polled.waiting.items():
        waits[name] = _begin_waiting(group.member(name), answer, begun)
        missing += waits[name].missing
        since = waits[name].since
        if since is not None:
            sinces.append(since)
    # For members that have a complete version.
    others = Awaiting(begun, tuple(missing), since=min(sinces, default=None))
    group = commit_waits(group, waits)
    members = []
    for member in group.members:
        outcome = member.outcome
        if member.name in waits:
            outcome = outcome.with_answer(waits[member.name])
        awaiting = waits.get(member.name, others)
        members.append(replace(member, outcome=outcome, awaiting=awaiting))
    return replace(group, members=tuple(members))


def commit_waits(group: AdvanceGroup, waits: Mapping[str, Awaiting]) -> AdvanceGroup:
    """Commit what members wait for (`waits`, by name), and the start offsets of members without a
    commit; return the group after it, which is the same one if nothing has changed.

    Without a first commit, nobody could abandon the version that the dataset waits for.
    """

    def commit(group: AdvanceGroup) -> AdvanceGroup:
        members = []
        for member in group.members:
            wait = waits.get(member.name)
            if wait is None:
                if member.committed is not None:
                    continue
                wait = Awaiting(None, (), offsets=member.manifest.offsets)
            after = _waiting_manifest(member, wait)
            if after is not None:
                members.append(member.after_commit(after))
        if not members:
            return group
        return group.commit_members(members)

    return commit_with_rebase(group, commit, rebase_waiting)


def _waiting_manifest(member: Member, awaiting: Awaiting) -> BoundedManifest | None:
    """Return the manifest with what is awaited; None if nothing changes. Without `since`, nothing
    of a version has arrived: the first commit then only says where the dataset begins to read.
    """
    manifest = member.manifest
    if awaiting.since is None:
        awaited = None
    else:
        awaited = Awaited(version=awaiting.version, missing=awaiting.missing, since=awaiting.since)
    fields = {**input_position(manifest, awaiting), "awaited": awaited}
    if manifest.model_copy(update=fields) == member.committed:
        return None
    version = None if awaited is None else awaited.version
    change = Change(action="wait", version=version, reason=commit_reason(awaiting))
    return manifest.after(**fields, change=change)


def _begin_waiting(member: Member, awaiting: Awaiting, others: str | None) -> Awaiting:
    """Return a source's answer with the awaited version, and since when it is awaited; unchanged if
    nothing has arrived in any member.

    `others` is the version that other members of the version set have completely, None if there is
    none.
    """
    if awaiting.idle and others is None:
        return awaiting
    before = member.manifest.awaited
    version = awaiting.version or others
    if before is not None and before.version == version:
        since = before.since
    else:
        since = member.context.now()
    return replace(awaiting, version=version, idle=False, since=since)


def apply_delivery(
    candidate: CandidateVersion,
    rejected: CandidateVersion | None,
    *,
    switches: bool,
    insert_by_time: bool,
) -> Member:
    """Return the member after the commit of this delivery, with the outcome.

    `rejected` is the candidate, perhaps of another member, for which the delivery is rejected; None
    publishes it. `switches` makes the version current; otherwise `insert_by_time` inserts it by
    time.
    """
    member = candidate.member
    version = candidate.version
    outcome = member.outcome.with_answer(candidate.delivery)
    outcome = replace(
        outcome, warnings=(*outcome.warnings, *candidate.warnings), last_built=version
    )
    if rejected is not None:
        after = _reject(candidate, rejected)
        outcome = replace(outcome, rejected=(*outcome.rejected, candidate.id))
    elif candidate.unchanged:
        after = _publish(candidate, switches=switches, insert_by_time=insert_by_time)
        outcome = replace(outcome, unchanged=(*outcome.unchanged, candidate.unchanged))
    else:
        assert version is not None, "a version that was not built is rejected"
        after = _publish(candidate, switches=switches, insert_by_time=insert_by_time)
        counters = sum_counters(outcome.counters, version.counters)
        outcome = replace(outcome, sealed=(*outcome.sealed, candidate.id), counters=counters)
        if after.head != candidate.id:
            outcome = replace(outcome, unserved=(*outcome.unserved, candidate.id))
    return replace(member.after_commit(after), outcome=outcome)


def _reject(candidate: CandidateVersion, rejected: CandidateVersion) -> BoundedManifest:
    """Return the manifest with this delivery rejected, because of `rejected`."""
    reason = rejected.problem
    if rejected.member.name != candidate.member.name:
        reason = f"member {rejected.member.name} of the version set rejected it: {reason}"
    ref = _new_ref(candidate).model_copy(update={"state": "rejected", "reason": reason})
    if candidate.version is not None:
        ref = ref.model_copy(update={"verdicts": candidate.version.verdicts})
    freed = None
    if rejected.revoked is not None:  # a repeated delivery of revoked content takes no name
        freed = candidate.member.context.now()
    change = Change(
        action="reject", version=ref.id, reason=commit_reason(candidate.delivery, reason)
    )
    draft = _count_version(candidate, _take_delivery(candidate, ref.id, freed))
    return actions.with_ref(draft, ref).after(change=change)


def _publish(
    candidate: CandidateVersion, *, switches: bool, insert_by_time: bool
) -> BoundedManifest:
    """Return the manifest with this delivery published, or recorded as unchanged.

    `switches` makes the version current; otherwise `insert_by_time` inserts it by time.
    """
    ref = _sealed_ref(candidate)
    draft = _take_delivery(candidate, ref.id)
    if candidate.unchanged:
        action = "unchanged"
        note = f"delivered as {candidate.delivery.version}"
    else:
        action = "seal"
        note = "" if switches else "sealed but not served: a later version stays current"
        draft = _count_version(candidate, draft)
    if switches:
        draft = actions.switch_to(draft, ref)
    elif not candidate.unchanged:
        draft = actions.insert_unserved_version(draft, ref, between=insert_by_time)
    change = Change(action=action, version=ref.id, reason=commit_reason(candidate.delivery, note))
    return actions.with_served_version(candidate.member.log, draft, change, candidate.version)


def _take_delivery(
    candidate: CandidateVersion, version: str, freed: datetime | None = None
) -> BoundedManifest:
    """Return a draft of the manifest with this delivery, whose content the version with the id
    `version` holds. `freed` is the time since when its name is free again, None if it is taken.
    """
    manifest = candidate.member.manifest
    delivery = candidate.delivery
    done = Delivered(
        name=delivery.version, version=version, markers=dict(delivery.markers), freed=freed
    )
    fields = {**input_position(manifest, delivery, done), "awaited": None}
    return manifest.model_copy(update=fields)


def _count_version(candidate: CandidateVersion, draft: BoundedManifest) -> BoundedManifest:
    """Return the draft with the numbers after those of a new version. If the version was built,
    also with its counters added and its columns known.
    """
    fields: dict[str, object] = {"next_number": candidate.number + 1}
    version = candidate.version
    if version is not None:
        used = version.generations[-1].id
        fields["next_generation"] = max(draft.next_generation, used + 1)
        fields["counters"] = sum_counters(draft.counters, version.counters)
        fields["known_columns"] = evolve_known_columns(candidate.member)
    return draft.model_copy(update=fields)


def is_at_or_after_head(candidate: CandidateVersion) -> bool:
    """Whether a version comes after the head (the version of the last switch) in the dataset's
    order, or equals it.
    """
    manifest = candidate.member.manifest
    head = manifest.head_ref
    order = actions.version_order(manifest)
    return head is None or bool(order(_sealed_ref(candidate)) >= order(head))


def _sealed_ref(candidate: CandidateVersion) -> VersionRef:
    """Return the manifest's entry for a version; for an unchanged one, that of the version that
    it equals.
    """
    if not candidate.unchanged:
        return _new_ref(candidate)
    same = candidate.member.manifest.ref(candidate.unchanged)
    assert same is not None, "the version that it equals was found in this manifest"
    return same


def _new_ref(candidate: CandidateVersion) -> VersionRef:
    """Return the manifest's entry for a new version: without rows and files if it was not built."""
    facts: dict[str, Any] = {
        "id": candidate.id,
        "number": candidate.number,
        "name": candidate.delivery.version,
        "document": candidate.document,
    }
    version = candidate.version
    if version is None:
        return VersionRef(sealed_at=candidate.member.context.now(), **facts)
    return VersionRef(
        rows=version.rows,
        sealed_at=version.sealed_at,
        folders=tuple(generation.folder for generation in version.generations),
        bytes=sum(generation.size for generation in version.generations),
        valid_from=version.valid_from,
        **facts,
    )


def publish_candidates(
    group: AdvanceGroup, validated: Sequence[CandidateVersion], *, make_current: bool
) -> AdvanceGroup:
    """Commit these versions together: all published, or all rejected if one has a problem. Return
    the group after it.

    The reported stages are "reject"; or "seal" for each new version, then "switch", "keep" if what
    is served stays, or "unchanged" if all equal existing versions.
    """
    first = validated[0].member
    version = validated[0].delivery.version
    for rejected in validated:
        if rejected.problem:
            with first.stages(REJECT, version) as stage:
                candidates = [candidate.with_document() for candidate in validated]
                stage.detail = rejected.problem
                return _Publication(candidates, rejected, make_current).commit(group)
    candidates = [*map(_seal, validated)]
    with first.stages("switch", version) as stage:
        publication = _Publication(candidates, None, make_current)
        group = publication.commit(group)
        published = publication.candidates_in(group)
        if all(candidate.unchanged for candidate in published):
            stage.name = "unchanged"
        elif not any(candidate.is_served for candidate in published):
            stage.name = "keep"
            stage.detail = "what is served stays"
    return group


def _seal(candidate: CandidateVersion) -> CandidateVersion:
    """Return the candidate with its document stored, if it is a new version."""
    if candidate.version is None or candidate.unchanged:
        return candidate
    with candidate.member.stages("seal", candidate.delivery.version):
        return candidate.with_document()


@dataclass(frozen=True, slots=True)
class _Publication:
    """The candidates of one commit, which are published, or rejected because of `rejected`.

    `make_current` serves them even if they come before the head.
    """

    candidates: Sequence[CandidateVersion]
    rejected: CandidateVersion | None
    make_current: bool

    def candidates_in(self, group: AdvanceGroup) -> list[CandidateVersion]:
        """Return the candidates with their members as they are in this group."""
        return [candidate.with_member_of(group) for candidate in self.candidates]

    def commit(self, group: AdvanceGroup) -> AdvanceGroup:
        """Commit the candidates, delete what their attempts no longer need, and return the group
        after it.
        """
        group = commit_with_rebase(group, self._commit_once, self._catch_up)
        for candidate in self.candidates_in(group):
            # The files of an unchanged one are not needed: the manifest has the version it equals.
            is_recorded = candidate.member.manifest.ref(candidate.id) is not None
            candidate.delete_attempt(files=not is_recorded)
        return group

    def _commit_once(self, group: AdvanceGroup) -> AdvanceGroup:
        """Publish or reject the candidates in one commit on top of the group, and return the group
        after it.
        """
        candidates = self.candidates_in(group)
        switches = self.make_current or all(map(is_at_or_after_head, candidates))
        # If one member does not order its versions by time, no member inserts by time.
        insert_by_time = all(member.manifest.declaration.by_time for member in group.members)
        members = []
        for candidate in candidates:
            members.append(
                apply_delivery(
                    candidate, self.rejected, switches=switches, insert_by_time=insert_by_time
                )
            )
        return group.commit_members(members)

    def _catch_up(self, group: AdvanceGroup) -> AdvanceGroup:
        """Return the group with what other writers committed, for another try. If they made a build
        unusable, delete the documents and raise CommitConflictError.
        """
        try:
            return rebase_candidates(group, self.candidates)
        except errors.CommitConflictError:
            documents = filter(None, (candidate.document for candidate in self.candidates))
            with suppress(errors.AdjunctError):  # documents that remain are left to a discard
                group.members[0].context.lake.store.delete_many([*documents])
            raise
