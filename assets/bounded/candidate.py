"""Builds a version beside the one that is served, before anybody can read it.

A finished build is kept in its attempt's record, so that a run that died after it does not cost it: the next run
finds the very same delivery built and goes on with that. Not so what a query or a function has made, which may differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from dagster_adjunct.assets.declaration.extractors import Projection
from dagster_adjunct.assets.declaration.policies import parse_valid_from
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.validation.validators import Candidate, evaluate
from dagster_adjunct.assets.versions.dataset_log import Attempt
from dagster_adjunct.assets.versions.leases import (
    AttemptRecord,
    Lease,
    delete_attempt,
    list_attempts,
    read_finished_build,
)
from dagster_adjunct.assets.versions.version import SealedVersion, build_layout, version_id
from dagster_adjunct.assets.writing.generation import (
    MAX_NAMED,
    choose_writer,
    find_null_keys,
    format_first,
    sum_counters,
    write_generation,
)
from dagster_adjunct.resources.errors import (
    AdjunctError,
    CommitConflictError,
    DatasetError,
    MarkerConflictError,
    NullKeyError,
    SchemaMismatchError,
    VersionDiscardedError,
)
from dagster_adjunct.resources.spark.errors import translate_spark_errors
from dagster_adjunct.resources.spark.tuning import interpret_small_plans

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.sources.version_source import Awaiting, Delivery, VersionSource
    from dagster_adjunct.assets.versions.dataset_log import DatasetLog
    from dagster_adjunct.assets.versions.deliveries import Awaited, Lost
    from dagster_adjunct.assets.versions.manifest import BoundedManifest
    from dagster_adjunct.assets.versions.reports import Stages
    from dagster_adjunct.assets.versions.version import VersionRef
    from dagster_adjunct.assets.writing.generation import Runtime
    from dagster_adjunct.resources.objects.commit_log import Commit


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an advance has done with one dataset so far.

    `sealed`, `rejected` and `unchanged` are ids of versions, `kept` those of the sealed that come before what was
    current and are kept beside it; `taken_in` counts the deliveries that they came of, and
    `looked_at` is the version that was built last.
    """

    sealed: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    lost: tuple[Lost, ...] = ()
    notes: tuple[str, ...] = ()
    counters: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    delivery_count: int = 0
    last_built: SealedVersion | None = None

    def with_source_report(self, source: Delivery | Awaiting) -> Outcome:
        """Return it with what the source told beside its answer, and the records that it dropped."""
        lost = (source.lost,) if source.lost is not None else ()
        dropped = {"redelivered": source.redelivered} if source.redelivered else {}
        return replace(self.with_counters(dropped), notes=(*self.notes, *source.notes), lost=(*self.lost, *lost))

    def with_counters(self, counters: Mapping[str, int]) -> Outcome:
        """Return it with these counters added."""
        return replace(self, counters=sum_counters(dict(self.counters), dict(counters)))


@dataclass(frozen=True, slots=True)
class Member:
    """One dataset while it advances: alone, or with the other members of its version set.

    `context` says where it is written and with what. `manifest` is what is decided on, `committed` what stands in the
    lake, None before the first commit. `others` is what other members of the set lack of the version that this one has.
    """

    spec: AdjunctDataset
    context: Runtime
    source: VersionSource
    stages: Stages
    manifest: BoundedManifest
    committed: BoundedManifest | None = None
    outcome: Outcome = Outcome()
    awaiting: Awaiting | None = None
    others: Awaited | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def log(self) -> DatasetLog:
        return self.context.log(self.spec.name)

    def after_commit(self, manifest: BoundedManifest) -> Member:
        """Return the member as it stands once this manifest is committed."""
        return replace(self, manifest=manifest, committed=manifest)


@dataclass(frozen=True, slots=True)
class AdvanceGroup:
    """What advances in one commit: a dataset alone, or all members of a version set, after `commit`."""

    commit: Commit | None
    members: tuple[Member, ...]

    def member(self, name: str) -> Member:
        """Return the member of this name."""
        return next(member for member in self.members if member.name == name)

    def with_members(self, members: Iterable[Member]) -> AdvanceGroup:
        """Return the unit with these members as they are now."""
        changed = {member.name: member for member in members}
        return replace(self, members=tuple(changed.get(member.name, member) for member in self.members))

    def commit_members(self, members: Sequence[Member]) -> AdvanceGroup:
        """Commit these members' manifests in one commit, and return what stands then. Raises CommitConflictError."""
        log, by = members[0].log, members[0].context.by
        commit = log.commit_all(self.commit, {member.name: member.manifest for member in members}, by=by)
        return replace(self.with_members(members), commit=commit)


@dataclass(frozen=True, slots=True)
class CandidateVersion:
    """A version on its way: built or not, and what speaks against it. `problem` "" means nothing does.

    `unchanged` is the id of the version that has the same content already, `withdrawn` the version of this name that
    had it and was withdrawn; `document` is the object that describes this one, None until it is written.
    """

    member: Member
    delivery: Delivery
    attempt: Attempt
    number: int
    version: SealedVersion | None
    problem: str = ""
    unchanged: str | None = None
    withdrawn: VersionRef | None = None
    warnings: tuple[str, ...] = ()
    document: str | None = None

    def with_member_of(self, unit: AdvanceGroup) -> CandidateVersion:
        """Return it for its member as that is now."""
        return replace(self, member=unit.member(self.member.name))

    @property
    def id(self) -> str:
        return version_id(self.number, self.attempt.id)

    @property
    def folder(self) -> str:
        return f"{self.attempt.folder}/{self.attempt.id}"

    @property
    def is_served(self) -> bool:
        """Whether it is what readers get, by the manifest of its member."""
        served = self.member.manifest.version
        return served is not None and served.id == self.id

    def with_document(self) -> CandidateVersion:
        """Return it with its document written; what was not built has none."""
        return self if self.version is None else replace(self, document=self.member.log.write_version(self.version))

    def is_stored(self) -> bool:
        """Whether its document and all its files are still there: a discard may have taken them for garbage."""
        assert self.version is not None
        store = self.member.context.lake.store
        if self.document is not None and store.head(self.document) is None:
            return False
        stored = {item.key: item.size for item in store.list(f"{self.folder}/")}
        return all(
            stored.get(f"{generation.folder}/{file.name}") == file.size
            for generation in self.version.generations
            for file in generation.files
        )

    def is_unreferenced(self, now: BoundedManifest) -> bool:
        """Whether nobody needs its files: by this manifest, its delivery was settled meanwhile by another build.

        Until then another writer may find this one finished, and publish it.
        """
        settled = self.delivery.version in now.taken - self.member.manifest.taken
        return settled and not any(self.folder in ref.folders for ref in now.versions)

    def delete_attempt(self, *, files: bool) -> None:
        """Drop the attempt's record, and its files where nothing can refer to them any more."""
        log = self.member.log
        delete_attempt(log.lake, log.name, self.attempt.id)
        if files and self.version is not None:
            log.drop(self.version.generations[0])

    def conflict_error(self, what: str) -> CommitConflictError:
        """Return the error of a build that is lost by what another writer did."""
        return CommitConflictError(
            f"dataset {self.member.name!r}, version {self.delivery.version!r}: another writer {what} meanwhile.",
            "Nothing of this attempt is served. Advance again: it goes on from what the other one did.",
            dataset=self.member.name,
        )


_MAX_FOOTER_BYTES = 1024 * 1024
# What makes a version unfit whenever it is tried: it is kept aside, and the next one may come.
REJECTING_ERRORS = (MarkerConflictError, NullKeyError, SchemaMismatchError)


def build_candidate(member: Member, delivery: Delivery) -> CandidateVersion:
    """Write a delivered version's files, and say whether it equals the one before it or is unfit."""
    log = member.log
    fingerprint = _build_fingerprint(member, delivery)
    with member.stages("build", delivery.version) as building:
        built = _find_finished_build(member, delivery, fingerprint)
        if built is None:
            member.stages.begin_build(delivery.version)
            attempt = log.attempt()
            built = CandidateVersion(member, delivery, attempt, member.manifest.next_number, None)
            with AttemptRecord(log.lake, log.name, attempt.id, member.context.by) as renewal:
                try:
                    built = replace(built, version=_build_version(member, delivery, attempt))
                except REJECTING_ERRORS as error:
                    building.detail = f"{type(error).__name__}: {error.problem}"
                    built = replace(built, problem=building.detail)
                else:
                    assert built.version is not None
                    if fingerprint is not None:
                        renewal.finish({"fingerprint": fingerprint, "version": built.version.model_dump(mode="json")})
    if built.version is not None:
        with member.stages("unchanged", delivery.version):
            unchanged = _find_equal_version(member, built.version)
            withdrawn = None if unchanged else _find_withdrawn(member, built.version)
            return replace(built, unchanged=unchanged, withdrawn=withdrawn)
    return built


def reject_withdrawn_content(built: Sequence[CandidateVersion]) -> list[CandidateVersion]:
    """Return built versions, refused where all that is new in them was withdrawn under their name.

    A producer that delivers twice must not bring back what somebody has taken away. Of a version set the content of one
    member may be what it was, where that of another is corrected.
    """
    again = all(candidate.withdrawn or candidate.unchanged for candidate in built)
    return [
        replace(
            candidate,
            problem=f"it holds what version {candidate.withdrawn.id} of this name held, which is withdrawn: "
            f"{candidate.withdrawn.reason}",
        )
        if again and candidate.withdrawn
        else replace(candidate, withdrawn=None)
        for candidate in built
    ]


def _build_version(member: Member, delivery: Delivery, attempt: Attempt) -> SealedVersion:
    source, spec, manifest = member.source, member.spec, member.manifest
    spark = member.context.spark
    what = f"dataset {spec.name!r}, version {delivery.version!r}"
    valid_from = None
    if spec.valid_from is not None:
        valid_from = parse_valid_from(spec.name, spec.valid_from, delivery.version, delivery.valid_from)
    generation = attempt.generation(manifest.next_generation)
    records = source.check(delivery, spark)
    counters: dict[str, int] = {"read": records or 0}
    if records != 0:
        schema = source.schema.with_sensitive(*(name for name in spec.sensitive if name in source.schema))
        layout = build_layout(schema, spec.key, spec.partition_by, spec.partitions, positioned=False)
        try:
            with interpret_small_plans(spark, records):
                generation, counted = write_generation(
                    member.context.lake,
                    attempt,
                    manifest.next_generation,
                    layout,
                    source.read(delivery, spark),
                    choose_writer(spark),
                    what=what,
                    order_by=(*spec.key, *source.ordered_by),
                    keep_tombstones=False,
                    partitioned=source.copartitioned,
                    refuse_conflicting=spec.duplicates == "error",
                )
        except NullKeyError as error:
            raise _with_record_places(error, member, delivery) from error
        counted.pop("conflicting", None)
        entries = generation.rows + counted["superseded"] + counted["deleted"]
        if records is None:
            counters["read"] = entries
        elif spec.extractor is None and entries != records:
            raise DatasetError(
                f"{what}: the source gave {entries} records where it counts {records}.",
                "Nothing was published. Compare the stream's files with its manifest: adjunct stream show.",
                dataset=member.spec.name,
                version=delivery.version,
            )
        counters = sum_counters(counters, counted)
    if generation.footer_size > _MAX_FOOTER_BYTES:
        generation = generation.without_footers()
    return SealedVersion(
        id=version_id(manifest.next_number, attempt.id),
        number=manifest.next_number,
        name=delivery.version,
        sealed_at=member.context.now(),
        columns=source.schema,
        key=spec.key,
        partition_by=spec.partition_by,
        partitions=spec.partitions,
        positioned=False,
        generations=(generation,),
        rows=generation.rows,
        digest=generation.digest,
        offsets=dict(delivery.ranges),
        counters=counters,
        valid_from=valid_from,
    )


def _with_record_places(error: NullKeyError, member: Member, delivery: Delivery) -> NullKeyError:
    """Return the error with the places of the first records without a key. That costs reading the version again."""
    with translate_spark_errors():
        without_key = find_null_keys(member.source.read(delivery, member.context.spark), member.spec.key, MAX_NAMED + 1)
    places = [place for partition, offset in without_key if (place := member.source.place(delivery, partition, offset))]
    if not places:
        return error
    return NullKeyError(
        f"{error.problem.rstrip('.')}: {format_first(places)}.", error.next_step, dataset=member.spec.name
    )


def _find_equal_version(member: Member, new: SealedVersion) -> str | None:
    """Return the id of the version that has this content already: the head's, or that of the same partition.

    Equal counts and digests, bucket by bucket, in the same layout; and valid from the same time.
    """
    manifest = member.manifest
    if manifest.declaration.order == "name":
        named = [ref for ref in manifest.versions if ref.name == new.name and ref.state == "sealed"]
        ref = named[-1] if named else None
    else:
        ref = manifest.ref(manifest.head) if manifest.head else None
    if ref is None or not _is_current_for_time(manifest, ref, new):
        return None
    return ref.id if _has_same_content(member, ref, new) else None


def _find_withdrawn(member: Member, new: SealedVersion) -> VersionRef | None:
    """Return the withdrawn version of this name with this content and time, None where there is none."""
    named = (ref for ref in member.manifest.versions if ref.name == new.name and ref.state == "withdrawn")
    return next(
        (ref for ref in named if ref.valid_from == new.valid_from and _has_same_content(member, ref, new)), None
    )


def _has_same_content(member: Member, ref: VersionRef, new: SealedVersion) -> bool:
    """Whether a version holds the entries of a new one, in the same layout."""
    if ref.rows != new.rows or ref.document is None or new.digest is None:
        return False
    served = member.manifest.version
    old = served if served is not None and served.id == ref.id else member.log.read_version(ref)
    return old.layout == new.layout and _file_facts(old) == _file_facts(new)


def _is_current_for_time(manifest: BoundedManifest, before: VersionRef, new: SealedVersion) -> bool:
    """Whether the version before is what is valid from the time of the new one, or neither says a time.

    The same content of another time is a version of its own, whatever lies between the two now: another may come
    there later, or one that lies there be withdrawn.
    """
    if new.valid_from is None or before.valid_from != new.valid_from:
        return before.valid_from == new.valid_from
    return not any(
        ref.state == "sealed" and ref.valid_from == new.valid_from and ref.number > before.number
        for ref in manifest.versions
    )


def _file_facts(version: SealedVersion) -> list[tuple[int, int, int | None]]:
    return [(file.bucket, file.rows, file.digest) for file in version.generations[0].files]


def _build_fingerprint(member: Member, delivery: Delivery) -> str | None:
    """Return what a build depends on, None where that can't be said: what a query answers, or a function does."""
    extractor = member.spec.extractor
    told = delivery.ranges or delivery.identity
    if not told or not (extractor is None or isinstance(extractor, Projection)):
        return None
    depends_on: dict[str, Any] = {
        "version": delivery.version,
        "ranges": {ssp: list(span) for ssp, span in delivery.ranges.items()},
        "identity": delivery.identity,
        "declaration": member.source.declaration.model_dump(mode="json"),
        "schema": member.source.schema.to_json(),
        "duplicates": member.spec.duplicates,
        "extractor": repr(member.spec.extractor),
        "valid_from": [member.spec.valid_from, *map(str, delivery.valid_from)],
        "number": member.manifest.next_number,
        "generation": member.manifest.next_generation,
    }
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()


def _find_finished_build(member: Member, delivery: Delivery, fingerprint: str | None) -> CandidateVersion | None:
    """Return an earlier attempt that built exactly this, unless it is being discarded or has been."""
    log = member.log
    if fingerprint is None:
        return None
    for known in list_attempts(log.lake, log.name):
        attempt = Attempt(f"{log.prefix}/data", known.id)
        body = read_finished_build(log.lake, log.name, known.id)
        if body is None or body.get("fingerprint") != fingerprint:
            continue
        if f"{attempt.folder}/{attempt.id}" in member.manifest.doomed:
            continue
        try:
            version = SealedVersion.model_validate(body["version"])
        except (ValidationError, AdjunctError, KeyError):
            continue  # a record that can't be read costs a second build and nothing else
        built = CandidateVersion(member, delivery, attempt, version.number, version)
        if built.is_stored():  # a discard that died may have left the record of what it has deleted
            return built
    return None


def validate_candidate(built: CandidateVersion) -> CandidateVersion:
    """Return a built version with what the dataset's validators say of it; nobody reads it meanwhile.

    Raises ValidatorError for a mistake in one of them, and CommitConflictError where the version that it is compared
    with was discarded meanwhile; the build is kept, and the next run has it judged again.
    """
    member, version = built.member, built.version
    if version is None or built.unchanged or built.problem:
        return built
    with member.stages("validate", built.delivery.version) as validating:
        with _lease_served_version(built) as current:
            new = VersionReader(member.context.lake.store, member.name, version)
            candidate = Candidate(new, current, member.context.spark)
            verdicts = evaluate(member.spec.validators, candidate, member.spec.sensitive)
        failed = [verdict for verdict in verdicts if not verdict.passed]
        wrong = [f"{verdict.name}: {verdict.message}" for verdict in failed if verdict.severity == "error"]
        odd = [f"{verdict.name}: {verdict.message}" for verdict in failed if verdict.severity == "warn"]
        validating.detail = "; ".join([*wrong, *(f"warning: {warning}" for warning in odd)])
    return replace(
        built,
        version=version.model_copy(update={"verdicts": verdicts}),
        problem="; ".join(wrong),
        warnings=tuple(f"version {built.delivery.version!r}: {warning}" for warning in odd),
    )


@contextmanager
def _lease_served_version(built: CandidateVersion) -> Iterator[VersionReader | None]:
    """Yield the version that is served, leased, so that no discard takes it while validators compare with it."""
    member, version = built.member, built.member.manifest.version
    if version is None or not member.spec.validators:
        yield None
        return
    lake, holder = member.context.lake, f"validation by {member.context.by}"
    try:
        lease = Lease.acquire(lake, member.name, [version.id], holder=holder)
    except VersionDiscardedError as gone:
        raise built.conflict_error("discarded the version that it is compared with") from gone
    with lease:
        yield VersionReader(lake.store, member.name, version)
        lease.check()
