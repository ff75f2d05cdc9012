"""Candidate versions: built and validated before anybody can read them. Reports of their datasets.

A finished build is stored in its attempt's record, so that the next run can reuse it after a crash.
Builds from a query or a function are not reused, because a second build may differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from dagster_adjunct.assets.declaration.dataset import BoundedDataset, FileSource, QuerySource
from dagster_adjunct.assets.declaration.extractors import Projection
from dagster_adjunct.assets.declaration.policies import parse_valid_from
from dagster_adjunct.assets.generation import (
    ARROW,
    MAX_NAMED,
    SPARK,
    Runtime,
    find_null_keys,
    format_first,
    write_generation,
)
from dagster_adjunct.assets.reading.valid_time import give_times
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.sources.version_source import Awaiting, Delivery, VersionSource
from dagster_adjunct.assets.validation.validators import Candidate, evaluate
from dagster_adjunct.assets.versions import leases
from dagster_adjunct.assets.versions import switches as actions
from dagster_adjunct.assets.versions.dataset_log import Attempt, DatasetLog
from dagster_adjunct.assets.versions.manifest import BoundedManifest, KnownColumns, Lost
from dagster_adjunct.assets.versions.reports import Action, AdvanceReport, Stages
from dagster_adjunct.assets.versions.version import (
    SealedVersion,
    VersionRef,
    build_layout,
    build_version,
    mark_sensitive,
    version_id,
)
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.bucketing.files import Generation
from dagster_adjunct.resources.bucketing.writer import WriteOptions
from dagster_adjunct.resources.objects.commit_log import Commit
from dagster_adjunct.resources.reports import sum_counters
from dagster_adjunct.resources.schemas.column_changes import FixedColumns, describe_part
from dagster_adjunct.resources.schemas.schema import StoredNames
from dagster_adjunct.resources.schemas.version_columns import (
    NamedColumns,
    adopt_columns,
    drop_replaced,
    names_in_files,
)
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.spark.tasks import translate_spark_errors
from dagster_adjunct.resources.spark.tuning import interpret_small_plans
from dagster_adjunct.resources.streams.system import PARTITION


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an advance has done for one dataset so far.

    `sealed` and `rejected` are the ids of the versions that it has made; `unchanged` those of
    existing versions whose content was delivered again. `unserved` are the ids in `sealed` that did
    not become current, because a later version stays current. `lost`, `notes` and `counters` are
    those of the source's answers. `last_built` is the version built last.
    """

    sealed: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    unserved: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    lost: tuple[Lost, ...] = ()
    notes: tuple[str, ...] = ()
    counters: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    last_built: SealedVersion | None = None

    def with_answer(self, answer: Delivery | Awaiting) -> Outcome:
        """Return the outcome with the losses, notes and numbers of dropped records of the source's
        answer.
        """
        counters = dict(self.counters)
        for name, count in (("redelivered", answer.redelivered), ("left_out", answer.left_out)):
            if count:
                counters[name] = counters.get(name, 0) + count
        lost = self.lost if answer.lost is None else (*self.lost, answer.lost)
        return replace(self, counters=counters, notes=(*self.notes, *answer.notes), lost=lost)


@dataclass(frozen=True, slots=True)
class Member:
    """One dataset during an advance, and the outcome so far.

    `manifest` is the state that decisions are based on, `committed` the one in the lake, None
    before the first commit. `awaiting` is what its next version waits for, in this or other members
    of the version set.
    """

    spec: BoundedDataset
    context: Runtime
    source: VersionSource
    stages: Stages
    manifest: BoundedManifest
    committed: BoundedManifest | None = None
    awaiting: Awaiting | None = None
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def log(self) -> DatasetLog:
        return self.context.log(self.spec.name)

    def after_commit(self, manifest: BoundedManifest) -> Member:
        """Return the member as it is once this manifest is committed."""
        return replace(self, manifest=manifest, committed=manifest)


@dataclass(frozen=True, slots=True)
class AdvanceGroup:
    """The datasets that advance in one commit: one alone, or all members of a version set.

    `commit` is the current commit, on which the next one is based; None before the first.
    """

    commit: Commit | None
    members: tuple[Member, ...]

    def member(self, name: str) -> Member:
        """Return the member of this name."""
        return next(member for member in self.members if member.name == name)

    def commit_members(self, members: Sequence[Member]) -> AdvanceGroup:
        """Commit these members' manifests in one commit and return the group after it. Raises
        CommitConflictError.
        """
        first = members[0]
        manifests = {member.name: member.manifest for member in members}
        commit = first.log.commit_all(self.commit, manifests, by=first.context.by)
        changed = {member.name: member for member in members}
        after = tuple(changed.get(member.name, member) for member in self.members)
        return replace(self, commit=commit, members=after)


@dataclass(frozen=True, slots=True)
class CandidateVersion:
    """A version to be published, with the problem that prevents it ("" if none).

    `version` is None if it was not built, because of its data. `number` is the one that it gets.
    `unchanged` is the id of an existing version with the same content. `revoked` is a revoked
    version of this name with the same content. `document` is the key of this version's document,
    None until it is written.
    """

    member: Member
    delivery: Delivery
    attempt: Attempt
    number: int
    version: SealedVersion | None
    problem: str = ""
    unchanged: str | None = None
    revoked: VersionRef | None = None
    warnings: tuple[str, ...] = ()
    document: str | None = None

    def with_member_of(self, group: AdvanceGroup) -> CandidateVersion:
        """Return the candidate with its member as it is in this group."""
        return replace(self, member=group.member(self.member.name))

    @property
    def id(self) -> str:
        """The id that the version gets if it is published."""
        return version_id(self.number, self.attempt.id)

    @property
    def is_served(self) -> bool:
        """Whether it is the version that the dataset serves."""
        return self.member.manifest.served_id == self.id

    def with_document(self) -> CandidateVersion:
        """Write its document and return the candidate with it; a version that was not built has
        none.
        """
        if self.version is None:
            return self
        return replace(self, document=self.member.log.write_version(self.version))

    def is_stored(self) -> bool:
        """Whether what was written of it still exists: a discard may have deleted it as garbage.

        That is all its files and, once that is written, its document. The version must be built.
        """
        assert self.version is not None
        log = self.member.log
        if self.document is not None:
            is_document_gone = log.lake.store.head(self.document) is None
            if is_document_gone:
                return False
        missing = log.find_missing_files(self.attempt.folder, self.version.generations)
        return not missing

    def delete_attempt(self, *, files: bool) -> None:
        """Delete the attempt's record and, with `files`, the files that it has built."""
        log = self.member.log
        leases.delete_attempt(log.lake, log.name, self.attempt.id)
        if files and self.version is not None:
            log.drop(self.version.generations[0])


_MAX_FOOTER_BYTES = 1024 * 1024
# Errors of the data, which every attempt would repeat: the version is rejected, and the next one
# may follow.
REJECTING_ERRORS = (
    errors.EmptyVersionError,
    errors.KeyOrderError,
    errors.MarkerConflictError,
    errors.NullKeyError,
    errors.SchemaMismatchError,
)


def evolve_known_columns(member: Member) -> KnownColumns:
    """Return all columns that versions of the dataset have had, once one has those of the source,
    with their stored names.

    Raises DatasetError where `renamed` and `drop` of the declaration contradict the columns of the
    source, or earlier ones.
    """
    spec = member.spec
    declared = member.source.schema
    before = member.manifest.known_columns
    if before is None:
        before = KnownColumns(columns=declared, input_names=member.source.declaration.input_names)
    input_names = member.source.declaration.input_names
    stored = drop_replaced(
        before.named_columns,
        before.input_names,
        NamedColumns(declared, input_names),
        spec.evolution,
    )
    after = adopt_columns(
        stored.schema, stored.names, declared, spec.evolution, FixedColumns(spec.key)
    )
    problems = [*after.problems]
    if not problems:
        for path, name in spec.evolution.unfulfilled(stored.schema, declared):
            problems.append(
                f"{path} is renamed to {name}, which the version does not have:"
                f" {describe_part(declared, path)}"
            )
    # Paths of the declaration that no version has had, although the source has them now.
    never_stored = {*spec.evolution.unknown(before.columns, before.names)}
    never_stored -= {*spec.evolution.unknown(declared, before.names)}
    for path in sorted(never_stored & spec.evolution.renamed.keys()):
        name = spec.evolution.renamed[path]
        problems.append(
            f"{path} is renamed to {name}, which is new, and no version has had {path}:"
            f" {describe_part(before.columns, path)}"
        )
    if problems:
        raise errors.DatasetError(
            f"dataset {spec.name!r} can't follow its columns: {'; '.join(problems)}.",
            "Correct renamed= and drop= of the dataset. What is served stays.",
            dataset=spec.name,
        )
    return KnownColumns(columns=after.schema, names=after.names, input_names=input_names)


def _stored_names(member: Member) -> StoredNames:
    """Return the names that the files of a new version have for its columns."""
    return names_in_files(member.source.schema, evolve_known_columns(member).names)


def build_candidate(member: Member, delivery: Delivery) -> CandidateVersion:
    """Build a delivered version, or reuse a finished build; find out whether it is unfit,
    unchanged or revoked.
    """
    fingerprint = _build_fingerprint(member, delivery)
    with member.stages("build", delivery.version) as building:
        candidate = None
        if fingerprint is not None:
            candidate = _find_finished_build(member, delivery, fingerprint)
        if candidate is None:
            candidate = _build(member, delivery, fingerprint)
        building.detail = candidate.problem
    new = candidate.version
    if new is None:
        return candidate
    with member.stages("unchanged", delivery.version):
        unchanged = _find_equal_version(member, new)
        revoked = None if unchanged else _find_equal_revoked(member, new)
    return replace(candidate, unchanged=unchanged, revoked=revoked)


def _build(member: Member, delivery: Delivery, fingerprint: str | None) -> CandidateVersion:
    """Return a new build, recorded under its fingerprint (None: not recorded); or, for data that
    can't be published, a candidate that only has the problem.
    """
    log = member.log
    member.stages.begin_build(delivery.version)
    attempt = log.attempt()
    candidate = CandidateVersion(member, delivery, attempt, member.manifest.next_number, None)
    with leases.renew_attempt(log.lake, log.name, attempt.id, member.context.by) as finish:
        try:
            version = _build_version(member, delivery, attempt)
        except REJECTING_ERRORS as error:
            return replace(candidate, problem=f"{type(error).__name__}: {error.problem}")
        if fingerprint is not None:
            finish({"fingerprint": fingerprint, "version": version.model_dump(mode="json")})
    return replace(candidate, version=version)


def _find_equal_revoked(member: Member, new: SealedVersion) -> VersionRef | None:
    """Return a revoked version of the same name, valid-from time and content; None if there is
    none.
    """
    wanted = (new.name, "revoked", new.valid_from)
    for ref in member.manifest.versions:
        is_alike = (ref.name, ref.state, ref.valid_from) == wanted
        if is_alike and _has_same_content(member, ref, new):
            return ref
    return None


def reject_revoked_content(candidates: Sequence[CandidateVersion]) -> list[CandidateVersion]:
    """Return the candidates, rejected if all their new content was revoked earlier under the same
    name.

    A producer that delivers twice must not bring back revoked content. In a version set, one
    member's content may be that of the revoked version while another's is corrected: then none is
    rejected.
    """
    has_new_content = any(
        candidate.revoked is None and not candidate.unchanged for candidate in candidates
    )
    after = []
    for candidate in candidates:
        revoked = candidate.revoked
        if revoked is None:
            after.append(candidate)
        elif has_new_content:
            after.append(replace(candidate, revoked=None))
        else:
            problem = (
                f"it has the content of version {revoked.id} of this name, which is revoked:"
                f" {revoked.reason}"
            )
            after.append(replace(candidate, problem=problem))
    return after


def _build_version(member: Member, delivery: Delivery, attempt: Attempt) -> SealedVersion:
    """Write the entries of a delivery, and return them as a version, which nobody can read yet."""
    source = member.source
    spec = member.spec
    valid_from = None
    if spec.valid_from is not None:
        zone = UTC if spec.versions is None else spec.versions.zone
        valid_from = parse_valid_from(
            spec.name, spec.valid_from, delivery.version, delivery.valid_from, zone
        )
    number = member.manifest.next_number
    generation = attempt.generation(member.manifest.next_generation)
    records = source.check(delivery, member.context.spark)
    if records == 0:
        source.reject_empty(delivery)
        counters = {"read": 0}
    else:
        generation, counters = _write_entries(member, delivery, generation, records)
    if generation.footer_size > _MAX_FOOTER_BYTES:
        generation = generation.without_footers()
    return build_version(
        spec,
        source.schema,
        [generation],
        names=_stored_names(member),
        name=delivery.version,
        id=version_id(number, attempt.id),
        number=number,
        sealed_at=member.context.now(),
        rows=generation.rows,
        digest=generation.digest,
        offsets=dict(delivery.ranges),
        counters=counters,
        valid_from=valid_from,
    )


def _write_entries(
    member: Member, delivery: Delivery, generation: Generation, records: int | None
) -> tuple[Generation, dict[str, int]]:
    """Write the delivery's entries into files; return the generation with these, and the counters
    of its records.

    `records` is the number that its source counts, None if that is unknown. Raises DatasetError if
    another number was read, and EmptyVersionError if there is none.
    """
    source = member.source
    spec = member.spec
    what = f"dataset {spec.name!r}, version {delivery.version!r}"
    spark = member.context.spark_for(records, source.list_spark_needs())
    schema = mark_sensitive(spec, source.schema)
    layout = build_layout(schema, spec.key, spec.partition_by, spec.partitions, None)
    layout = replace(layout, names=_stored_names(member))
    try:
        with interpret_small_plans(spark, records):
            written, counted = write_generation(
                member.context.lake.store,
                generation,
                layout,
                source.read(delivery, spark),
                ARROW if spark is IN_PROCESS else SPARK,
                WriteOptions(
                    what,
                    drop_tombstones=True,
                    name_conflicting=MAX_NAMED if spec.duplicates == "error" else 0,
                    one_per_key=PARTITION if source.ordered_by_offset else None,
                ),
                order_by=source.ordered_by,
                partitioned=source.copartitioned,
            )
    except errors.NullKeyError as error:
        raise _with_record_places(error, member, delivery) from error
    entries = written.rows + counted["superseded"] + counted["deleted"]
    if records is None:  # `_build_version` rejects what the source counts as empty
        if entries == 0:
            source.reject_empty(delivery)
        records = entries
    if spec.extractor is None and entries != records:
        raise errors.DatasetError(
            f"{what}: the source gave {entries} records where it counts {records}.",
            "Nothing was published. Compare the stream's files with its manifest: adjunct"
            " stream show STREAM.",
            dataset=spec.name,
            version=delivery.version,
        )
    return written, sum_counters({"read": records}, counted)


def _with_record_places(
    error: errors.NullKeyError, member: Member, delivery: Delivery
) -> errors.NullKeyError:
    """Return the error with the places of the first records without a key, for which the version is
    read again; unchanged if records have no places.
    """
    # A query has no places: it would run again for nothing.
    has_places = bool(member.source.place(delivery, 0, 0))
    if not has_places:
        return error
    with translate_spark_errors():
        without_key = find_null_keys(
            member.source.read(delivery, member.context.spark), member.spec.key, MAX_NAMED + 1
        )
    places = [member.source.place(delivery, *record) for record in without_key]
    if not places:  # read again, the records have keys
        return error
    return errors.NullKeyError(
        f"{error.problem.rstrip('.')}: {format_first(places)}.",
        error.next_step,
        dataset=member.spec.name,
    )


def _find_equal_version(member: Member, new: SealedVersion) -> str | None:
    """Return the id of the existing version that a new one would replace, if it has the same
    content and valid-from time; else None.

    That is the head, or where versions are ordered by name, the newest of the same name.
    """
    manifest = member.manifest
    if manifest.declaration.order == "name":
        ref = {other.name: other for other in manifest.sealed}.get(new.name)
    else:
        ref = manifest.head_ref
    if ref is None or ref.valid_from != new.valid_from:
        return None
    if new.valid_from is not None:
        # The same content with another valid-from time is a version of its own, because versions
        # between the two times may be added or revoked later.
        numbers = [other.number for other in manifest.sealed if other.valid_from == ref.valid_from]
        is_corrected = numbers[-1] > ref.number
        if is_corrected:
            return None
    return ref.id if _has_same_content(member, ref, new) else None


def _has_same_content(member: Member, ref: VersionRef, new: SealedVersion) -> bool:
    """Whether a version has the same entries as a new one, in the same layout, by the counts and
    digests of its buckets.
    """
    is_comparable = ref.document is not None and new.digest is not None
    if not is_comparable or ref.rows != new.rows:
        return False
    old = member.manifest.version
    if old is None or old.id != ref.id:
        old = member.log.read_version(ref)
    return (old.layout, _list_digests(old)) == (new.layout, _list_digests(new))


def _list_digests(version: SealedVersion) -> list[tuple[int, int, int | None]]:
    """Return (bucket, rows, digest of the rows) for each file of a version."""
    return [(file.bucket, file.rows, file.digest) for file in version.generations[0].files]


def _build_fingerprint(member: Member, delivery: Delivery) -> str | None:
    """Return a hash of all that a build depends on; None if it depends on a query or a function."""
    extractor = member.spec.extractor
    calls_function = not isinstance(extractor, Projection | None)
    is_query = not delivery.ranges and not delivery.identity
    if calls_function or is_query:
        return None
    depends_on: dict[str, Any] = {
        "version": delivery.version,
        "ranges": dict(delivery.ranges),
        "identity": delivery.identity,
        "declaration": member.source.declaration.model_dump(mode="json"),
        "schema": member.source.schema.to_json(),
        "names": _stored_names(member).to_json(),
        "duplicates": member.spec.duplicates,
        "extractor": repr(member.spec.extractor),
        "valid_from": [member.spec.valid_from, *map(str, delivery.valid_from)],
        "number": member.manifest.next_number,
        "generation": member.manifest.next_generation,
    }
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()


def _find_finished_build(
    member: Member, delivery: Delivery, fingerprint: str
) -> CandidateVersion | None:
    """Return an earlier finished build with this fingerprint, unless it is doomed or deleted;
    None without one.
    """
    log = member.log
    for attempt_id in leases.list_attempts(log.lake, log.name):
        attempt = Attempt(f"{log.prefix}/data/{attempt_id}")
        body = leases.read_finished_build(log.lake, log.name, attempt_id) or {}
        if attempt.folder in member.manifest.doomed or body.get("fingerprint") != fingerprint:
            continue
        try:
            version = SealedVersion.model_validate(body["version"])
        except (ValidationError, errors.AdjunctError, KeyError):
            continue  # an unreadable record only costs a second build
        candidate = CandidateVersion(member, delivery, attempt, version.number, version)
        # An interrupted discard may have left the record of deleted files.
        if candidate.is_stored():
            return candidate
    return None


def validate_candidate(candidate: CandidateVersion) -> CandidateVersion:
    """Run the dataset's validators on a built version and return it with their verdicts; unchanged
    if it was not built, has a problem already or equals an existing version.

    Raises ValidatorError for a mistake in a validator, and CommitConflictError if the served
    version that it is compared with was discarded concurrently. The build is kept, and the next run
    validates it again.
    """
    member = candidate.member
    version = candidate.version
    if version is None or candidate.unchanged or candidate.problem:
        return candidate
    with member.stages("validate", candidate.delivery.version) as validating:
        lake = member.context.lake
        holder = f"validation by {member.context.by}"
        served = None
        if member.spec.validators:
            served = member.manifest.version
        with leases.lease_served(lake, member.name, served, holder=holder) as lease:
            new = VersionReader(lake.store, member.name, version)
            current = None
            if served is not None:
                served = served.named_as(version.named_columns, keep_others=True)
                current = VersionReader(lake.store, member.name, served)
            compared = Candidate(new, current, member.context.spark)
            verdicts = evaluate(member.spec.validators, compared, member.spec.masked)
            if lease is not None:
                lease.check()
        failures: list[str] = []
        warned: list[str] = []
        for verdict in verdicts:
            finding = f"{verdict.name}: {verdict.message}"
            if not verdict.passed and verdict.severity == "error":
                failures.append(finding)
            elif not verdict.passed:
                warned.append(finding)
        validating.detail = "; ".join([*failures, *(f"warning: {each}" for each in warned)])
    return replace(
        candidate,
        version=version.model_copy(update={"verdicts": verdicts}),
        problem="; ".join(failures),
        warnings=tuple(f"version {candidate.delivery.version!r}: {warning}" for warning in warned),
    )


_DROPPED = frozenset({"redelivered", "left_out"})
"""The counters of records that were dropped."""


def build_bounded_report(member: Member) -> AdvanceReport:
    """Return the report of this dataset's advance, with what its next version waits for."""
    manifest = member.manifest
    outcome = member.outcome
    version = manifest.version
    action = _choose_action(member)
    awaiting = member.awaiting
    if awaiting is not None and (_is_idle(member) or not awaiting.missing):
        awaiting = None
    lost: list[str] = []
    warnings = dict.fromkeys(outcome.warnings)
    for loss in outcome.lost:
        lost += loss.versions
        warnings[loss.summary()] = None
    warnings |= dict.fromkeys(outcome.notes)
    report = AdvanceReport(
        dataset=manifest.name,
        kind=manifest.declaration.kind,
        action=action,
        version=manifest.served_id,
        sealed=outcome.sealed,
        rejected=outcome.rejected,
        lost=tuple(lost),
        warnings=tuple(warnings),
        counters=outcome.counters,
        offsets=manifest.offsets,
        seconds=member.stages.seconds,
        schema=member.source.schema,
        note="; ".join(_list_notes(member, action, awaiting)),
    )
    if version is not None:
        report = replace(report, rows=version.rows, schema=version.columns)
    evaluated = outcome.last_built or version
    if evaluated is not None:
        report = replace(report, evaluated=evaluated.id, verdicts=evaluated.verdicts)
    if awaiting is not None:
        report = replace(report, waiting=awaiting.missing, waiting_since=awaiting.since)
    return report


def _choose_action(member: Member) -> Action:
    """Return what this advance did, in one word."""
    if member.outcome.sealed:
        return "sealed"
    if member.outcome.rejected:
        return "rejected"
    if member.outcome.unchanged:
        return "unchanged"
    if _is_idle(member):
        return "up-to-date"
    return "waiting"


def _is_idle(member: Member) -> bool:
    """Whether a version is served, nothing has arrived since, and nothing was lost."""
    if member.awaiting is None or member.outcome.lost:
        return False
    return member.awaiting.idle and member.manifest.version is not None


def _list_notes(member: Member, action: Action, awaiting: Awaiting | None) -> Iterator[str]:
    """Yield what a reader of the report has to know besides its fields. `awaiting` is None if the
    report says nothing of what is awaited.
    """
    manifest = member.manifest
    outcome = member.outcome
    if action == "unchanged":
        yield "the version delivered equals the current one"
    notes_say_dropped = bool(outcome.notes) and not _DROPPED.isdisjoint(outcome.counters)
    if action == "up-to-date" and not notes_say_dropped:
        yield "nothing new was delivered"
    yield from _list_version_notes(member)
    sealed = manifest.sealed
    lack_times = sealed and all(ref.valid_from is None for ref in sealed)
    if lack_times and member.spec.valid_from is not None:
        yield (
            "its versions have no times, because they were sealed before valid_from was declared:"
            f" {give_times(manifest.name)}"
        )
    if awaiting is not None:
        yield f"{_name_awaited(awaiting, manifest)} waits for {awaiting.described}"
    if manifest.pin is not None:
        yield f"pinned to {manifest.pin.version} by {manifest.pin.by}: {manifest.pin.reason}"


def _list_version_notes(member: Member) -> Iterator[str]:
    """Yield which versions of this advance are rejected, or sealed and not served, and why; if it
    rejected none, also that the newest version is rejected.
    """
    versions = member.manifest.versions
    outcome = member.outcome
    for ref in versions:
        if ref.id in outcome.rejected:
            yield _describe_rejected(member, ref)
    for ref in versions:
        if ref.id in outcome.unserved:
            yield actions.describe_unserved(member.manifest, ref)
    for ref in versions[-1:]:
        if ref.state == "rejected" and not outcome.rejected:
            yield f"version {ref.name!r} ({ref.id}), delivered last, is rejected: {ref.reason}"


def _name_awaited(awaiting: Awaiting, manifest: BoundedManifest) -> str:
    """Return how a note names the version that is awaited."""
    if awaiting.version:
        return f"version {awaiting.version!r}"
    if manifest.version is None:
        return "the first version"
    return "the next version"


def _describe_rejected(member: Member, ref: VersionRef) -> str:
    """Return a note on a rejected version: the reason and the next steps."""
    name = member.name
    if isinstance(member.spec.input, FileSource):
        again = "complete the folder again"
    elif isinstance(member.spec.input, QuerySource):
        again = "compute it again"
    elif not isinstance(member.spec.input, str):
        again = "correct the table by another commit"
    else:
        again = "deliver it again under the same name"
    show = f"look at it (adjunct dataset show {name} {ref.id})"
    accept = f"accept it with a reason (adjunct dataset accept {name} {ref.id} --reason …)"
    drop = f"remove it (adjunct dataset remove-version {name} {ref.id} --reason …) and {again}"
    # A version rejected before it was built can neither be read nor accepted.
    steps = f"{show}, {accept}, or {drop}" if ref.document else drop
    return f"version {ref.name!r} is rejected: {ref.reason.rstrip('.')}. Next: {steps}"
