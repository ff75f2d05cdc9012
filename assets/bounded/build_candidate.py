"""Builds a version beside the one that is served, before anybody can read it.

A finished build is kept in its attempt's record, so that a run that died after it does not cost it: the next run
finds the very same delivery built and goes on with that. Not so what a query or a function has made, which may differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from dagster_adjunct.assets.bounded.built_version import Built
from dagster_adjunct.assets.declaration.extractors.extractor import Projection
from dagster_adjunct.assets.declaration.version_times import told_time
from dagster_adjunct.assets.versions.build_attempts import AttemptRenewal, attempts, read_attempt
from dagster_adjunct.assets.versions.dataset_log import Attempt
from dagster_adjunct.assets.versions.sealed_version import SealedVersion, layout_of, version_id
from dagster_adjunct.assets.writing.generation_writer import writer_of
from dagster_adjunct.assets.writing.rows_without_key import places_without_key
from dagster_adjunct.assets.writing.write_generation import NAMED, add, listed, write_generation
from dagster_adjunct.resources.errors import (
    AdjunctError,
    DatasetError,
    MarkerConflictError,
    NullKeyError,
    SchemaMismatchError,
)
from dagster_adjunct.resources.spark.interpreted_plans import interpreted_if_few
from dagster_adjunct.resources.spark.spark_errors import unwrapped

if TYPE_CHECKING:
    from dagster_adjunct.assets.bounded.advancing_members import Member
    from dagster_adjunct.assets.sources.version_source import Delivery
    from dagster_adjunct.assets.versions.bounded_manifest import BoundedManifest
    from dagster_adjunct.assets.versions.sealed_version import VersionRef

_FOOTERS = 1024 * 1024
# What makes a version unfit whenever it is tried: it is kept aside, and the next one may come.
REFUSED = (MarkerConflictError, NullKeyError, SchemaMismatchError)


def build_candidate(member: Member, delivery: Delivery) -> Built:
    """Write a delivered version's files, and say whether it equals the one before it or is unfit."""
    log = member.log
    fingerprint = _fingerprint(member, delivery)
    with member.stages("build", delivery.version) as building:
        built = _finished(member, delivery, fingerprint)
        if built is None:
            member.stages.begin_build(delivery.version)
            attempt = log.attempt()
            built = Built(member, delivery, attempt, member.manifest.next_number, None)
            with AttemptRenewal(log.lake, log.name, attempt.id, member.context.by) as renewal:
                try:
                    built = replace(built, version=_build(member, delivery, attempt))
                except REFUSED as error:
                    building.detail = f"{type(error).__name__}: {error.problem}"
                    built = replace(built, problem=building.detail)
                else:
                    assert built.version is not None
                    if fingerprint is not None:
                        renewal.finish({"fingerprint": fingerprint, "version": built.version.model_dump(mode="json")})
    if built.version is not None:
        with member.stages("unchanged", delivery.version):
            unchanged = _equal_to(member, built.version)
            withdrawn = None if unchanged else _withdrawn_of(member, built.version)
            return replace(built, unchanged=unchanged, withdrawn=withdrawn)
    return built


def refuse_withdrawn(built: Sequence[Built]) -> list[Built]:
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


def _build(member: Member, delivery: Delivery, attempt: Attempt) -> SealedVersion:
    source, spec, manifest = member.source, member.spec, member.manifest
    spark = member.context.spark
    what = f"dataset {spec.name!r}, version {delivery.version!r}"
    valid_from = None
    if spec.valid_from is not None:
        valid_from = told_time(spec.name, spec.valid_from, delivery.version, delivery.valid_from)
    generation = attempt.generation(manifest.next_generation)
    records = source.check(delivery, spark)
    counters: dict[str, int] = {"read": records or 0}
    if records != 0:
        schema = source.schema.with_sensitive(*(name for name in spec.sensitive if name in source.schema))
        layout = layout_of(schema, spec.key, spec.partition_by, spec.partitions, positioned=False)
        try:
            with interpreted_if_few(spark, records):
                generation, counted = write_generation(
                    member.context.lake,
                    attempt,
                    manifest.next_generation,
                    layout,
                    source.read(delivery, spark),
                    writer_of(spark),
                    what=what,
                    order_by=(*spec.key, *source.ordered_by),
                    keep_tombstones=False,
                    partitioned=source.copartitioned,
                    refuse_conflicting=spec.duplicates == "error",
                )
        except NullKeyError as error:
            raise _located(error, member, delivery) from error
        counted.pop("conflicting", None)
        entries = generation.rows + counted["superseded"] + counted["deleted"]
        if records is None:
            counters["read"] = entries
        elif spec.extractor is None and entries != records:
            raise DatasetError(
                f"{what}: the source gave {entries} records where it counts {records}.",
                "Nothing was published. Compare the stream's files with its manifest: adjunct stream describe.",
                dataset=member.spec.name,
                version=delivery.version,
            )
        counters = add(counters, counted)
    if generation.footer_size > _FOOTERS:
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


def _located(error: NullKeyError, member: Member, delivery: Delivery) -> NullKeyError:
    """Return the error with the places of the first records without a key. That costs reading the version again."""
    with unwrapped():
        without_key = places_without_key(member.source.read(delivery, member.context.spark), member.spec.key, NAMED + 1)
    places = [place for partition, offset in without_key if (place := member.source.place(delivery, partition, offset))]
    if not places:
        return error
    return NullKeyError(f"{error.problem.rstrip('.')}: {listed(places)}.", error.next_step, dataset=member.spec.name)


def _equal_to(member: Member, new: SealedVersion) -> str | None:
    """Return the id of the version that has this content already: the head's, or that of the same partition.

    Equal counts and digests, bucket by bucket, in the same layout; and valid from the same time.
    """
    manifest = member.manifest
    if manifest.declaration.order == "name":
        named = [ref for ref in manifest.versions if ref.name == new.name and ref.state == "sealed"]
        ref = named[-1] if named else None
    else:
        ref = manifest.ref(manifest.head) if manifest.head else None
    if ref is None or not _says_so_of_time(manifest, ref, new):
        return None
    return ref.id if _holds(member, ref, new) else None


def _withdrawn_of(member: Member, new: SealedVersion) -> VersionRef | None:
    """Return the withdrawn version of this name with this content and time, None where there is none."""
    named = (ref for ref in member.manifest.versions if ref.name == new.name and ref.state == "withdrawn")
    return next((ref for ref in named if ref.valid_from == new.valid_from and _holds(member, ref, new)), None)


def _holds(member: Member, ref: VersionRef, new: SealedVersion) -> bool:
    """Whether a version holds the entries of a new one, in the same layout."""
    if ref.rows != new.rows or ref.document is None or new.digest is None:
        return False
    served = member.manifest.version
    old = served if served is not None and served.id == ref.id else member.log.read_version(ref)
    return old.layout == new.layout and _facts(old) == _facts(new)


def _says_so_of_time(manifest: BoundedManifest, before: VersionRef, new: SealedVersion) -> bool:
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


def _facts(version: SealedVersion) -> list[tuple[int, int, int | None]]:
    return [(file.bucket, file.rows, file.digest) for file in version.generations[0].files]


def _fingerprint(member: Member, delivery: Delivery) -> str | None:
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


def _finished(member: Member, delivery: Delivery, fingerprint: str | None) -> Built | None:
    """Return an earlier attempt that built exactly this, unless it is being discarded or has been."""
    log = member.log
    if fingerprint is None:
        return None
    for known in attempts(log.lake, log.name):
        attempt = Attempt(f"{log.prefix}/data", known.id)
        body = read_attempt(log.lake, log.name, known.id)
        if body is None or body.get("fingerprint") != fingerprint:
            continue
        if f"{attempt.folder}/{attempt.id}" in member.manifest.doomed:
            continue
        try:
            version = SealedVersion.model_validate(body["version"])
        except (ValidationError, AdjunctError, KeyError):
            continue  # a record that can't be read costs a second build and nothing else
        built = Built(member, delivery, attempt, version.number, version)
        if built.is_stored():  # a discard that died may have left the record of what it has deleted
            return built
    return None
