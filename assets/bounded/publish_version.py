"""The switch: one commit that makes versions current, or keeps them aside; repeated over changes that don't matter.

A pin or a rollback that is committed during a long build does not cost the build: the same decision is made again
on what is current then. Another writer that took in the same delivery does: CommitConflictError.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.assets.bounded.commits_meanwhile import rebased
from dagster_adjunct.assets.bounded.manifest_after_delivery import after_delivery
from dagster_adjunct.assets.versions.advance_report import REJECT
from dagster_adjunct.assets.writing.write_generation import add
from dagster_adjunct.resources.errors import AdjunctError, CommitConflictError
from dagster_adjunct.resources.objects.commit_log import commit_upon

if TYPE_CHECKING:
    from dagster_adjunct.assets.bounded.advancing_members import Member, Unit
    from dagster_adjunct.assets.bounded.build_candidate import Built
    from dagster_adjunct.assets.versions.manifest import BoundedManifest

_TRIES = 20


def publish(unit: Unit, built: Sequence[Built], *, by: str, make_current: bool) -> Unit:
    """Commit these versions together, and return what stands then: all published, or all kept aside if one is refused.

    The stages say which: "seal" and "switch", "keep" where what is served stays, "unchanged" or "reject".
    """
    refused = next((candidate for candidate in built if candidate.problem), None)
    documents = {} if refused is not None else _sealed(built)
    first = built[0].member

    def commit(unit: Unit) -> Unit:
        now = [candidate.of(unit) for candidate in built]
        after = {c.member.name: after_delivery(c, documents.get(c.id), refused, make_current) for c in now}
        made = first.log.commit_all(unit.commit, after, by=by)
        return unit.having([_published(c, after[c.member.name]) for c in now], made)

    def catch_up(unit: Unit) -> Unit:
        try:
            return rebased(unit, [candidate.of(unit) for candidate in built], documents)
        except CommitConflictError:
            with suppress(AdjunctError):  # what stays is garbage for discarding
                first.log.lake.store.delete_many(documents.values())
            raise

    with first.stages("switch" if refused is None else REJECT, built[0].delivery.version) as switching:
        if refused is not None:
            documents = {c.id: c.member.log.write_version(c.version) for c in built if c.version}
        unit = commit_upon(unit, commit, catch_up, attempts=_TRIES)
        after = {candidate.id: unit.member(candidate.member.name).manifest for candidate in built}
        for candidate in built:
            candidate.forget_attempt(files=after[candidate.id].ref(candidate.id) is None)
        switching.detail = refused.problem if refused is not None else ""
        if refused is None and all(candidate.unchanged for candidate in built):
            switching.name = "unchanged"
        elif refused is None and not any(_is_served(c, after[c.id]) for c in built):
            switching.name, switching.detail = "keep", "what is served stays"
    return unit


def _sealed(built: Sequence[Built]) -> dict[str, str]:
    """Write what describes each version that is not there yet; return the objects by the versions' ids."""
    documents = {}
    for candidate in built:
        if candidate.version is not None and not candidate.unchanged:
            with candidate.member.stages("seal", candidate.delivery.version):
                documents[candidate.id] = candidate.member.log.write_version(candidate.version)
    return documents


def _is_served(built: Built, after: BoundedManifest) -> bool:
    return after.version is not None and after.version.id == built.id


def _published(built: Built, after: BoundedManifest) -> Member:
    """Return the member once its delivery is committed, with what came of it."""
    outcome, delivery, ref = built.member.outcome.heard(built.delivery), built.delivery, after.ref(built.id)
    counters = {"redelivered": delivery.redelivered} if delivery.redelivered else {}
    if ref is None:
        outcome = replace(outcome, unchanged=(*outcome.unchanged, str(built.unchanged)))
    elif ref.state == "rejected":
        outcome = replace(outcome, rejected=(*outcome.rejected, built.id))
    else:
        outcome = replace(outcome, sealed=(*outcome.sealed, built.id))
        counters = add(counters, built.version.counters if built.version else {})
    outcome = replace(
        outcome.counted(counters),
        warnings=(*outcome.warnings, *built.warnings),
        taken_in=outcome.taken_in + 1,
        looked_at=built.version,
    )
    return replace(built.member.at(after), outcome=outcome)
