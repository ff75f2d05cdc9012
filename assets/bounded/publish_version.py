"""The switch: one commit that makes versions current, or keeps them aside; repeated over changes that don't matter.

A pin or a rollback that is committed during a long build does not cost the build: the same decision is made again
on what is current then. Another writer that took in the same delivery does: CommitConflictError.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from dagster_adjunct.assets.bounded.commits_meanwhile import rebased
from dagster_adjunct.assets.bounded.manifest_after_delivery import after_delivery, switches_to
from dagster_adjunct.assets.versions.advance_report import REJECT
from dagster_adjunct.resources.errors import AdjunctError, CommitConflictError
from dagster_adjunct.resources.objects.commit_log import commit_upon

if TYPE_CHECKING:
    from dagster_adjunct.assets.bounded.advancing_members import Unit
    from dagster_adjunct.assets.bounded.built_version import Built

_TRIES = 20


def publish(unit: Unit, judged: Sequence[Built], *, make_current: bool) -> Unit:
    """Commit these versions together, and return what stands then: all published, or all kept aside if one is refused.

    The stages say which: "seal" and "switch", "keep" where what is served stays, "unchanged" or "reject".
    """
    refused = next((candidate for candidate in judged if candidate.problem), None)
    first, version = judged[0].member, judged[0].delivery.version
    built = [_sealed(candidate) for candidate in judged] if refused is None else judged
    with first.stages("switch" if refused is None else REJECT, version) as switching:
        if refused is not None:
            built = [candidate.described() for candidate in judged]
        unit = _committed(unit, built, refused, make_current=make_current)
        done = [candidate.of(unit) for candidate in built]
        for candidate in done:
            candidate.forget_attempt(files=candidate.member.manifest.ref(candidate.id) is None)
        switching.detail = refused.problem if refused is not None else ""
        if refused is None and all(candidate.unchanged for candidate in done):
            switching.name = "unchanged"
        elif refused is None and not any(candidate.is_served for candidate in done):
            switching.name, switching.detail = "keep", "what is served stays"
    return unit


def _sealed(built: Built) -> Built:
    """Return a version with what describes it written; one that is there already is described."""
    if built.version is None or built.unchanged:
        return built
    with built.member.stages("seal", built.delivery.version):
        return built.described()


def _committed(unit: Unit, built: Sequence[Built], refused: Built | None, *, make_current: bool) -> Unit:
    def commit(unit: Unit) -> Unit:
        now = [candidate.of(unit) for candidate in built]
        switches = make_current or all(map(switches_to, now))
        between = all(member.manifest.declaration.by_time for member in unit.members)
        after = (after_delivery(candidate, refused, switches=switches, between=between) for candidate in now)
        return unit.committed(list(after))

    def catch_up(unit: Unit) -> Unit:
        try:
            return rebased(unit, built)
        except CommitConflictError:
            with suppress(AdjunctError):  # what stays is garbage for discarding
                store = unit.members[0].context.lake.store
                store.delete_many([candidate.document for candidate in built if candidate.document is not None])
            raise

    return commit_upon(unit, commit, catch_up, attempts=_TRIES)
