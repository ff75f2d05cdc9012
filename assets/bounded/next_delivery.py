"""Which version a dataset, or all members of a version set, have next and whole; else what they wait for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.assets.bounded.advancing_members import Unit
from dagster_adjunct.assets.bounded.commit_waiting import awaited_by, begin, leave
from dagster_adjunct.assets.sources.version_source import Awaiting, Delivery
from dagster_adjunct.assets.versions.deliveries import Awaited
from dagster_adjunct.resources.errors import MarkerConflictError

if TYPE_CHECKING:
    pass


def next_delivery(unit: Unit, *, once: bool, by: str) -> tuple[Unit, dict[str, Delivery] | None]:
    """Return what every member has delivered whole, None when one still waits; by then that is recorded."""
    if once and any(member.outcome.taken_in for member in unit.members):
        idle = [replace(m, awaiting=Awaiting(None, (), m.manifest.offsets, idle=True)) for m in unit.members]
        return unit.having(idle), None
    try:
        answers = {member.name: member.source.next(member.manifest) for member in unit.members}
        complete = {name: answer for name, answer in answers.items() if isinstance(answer, Delivery)}
        together = _delivered_together(unit, complete)
        if together is not None:
            return unit, together
        _check_one_version(complete)
    except MarkerConflictError:
        begin(unit, by=by)
        raise
    waiting = {name: answer for name, answer in answers.items() if isinstance(answer, Awaiting)}
    return _waiting(unit, waiting, complete, by=by), None


def _delivered_together(unit: Unit, complete: Mapping[str, Delivery]) -> dict[str, Delivery] | None:
    """Return the deliveries of one version that all members have, None where there is none.

    A member that had this version before it joined the set is not waited for. One that abandoned it is: the set never
    has it whole then.
    """
    for version in {delivery.version for delivery in complete.values()}:
        here = {name: delivery for name, delivery in complete.items() if delivery.version == version}
        if all(version in member.manifest.taken for member in unit.members if member.name not in here):
            return here
    return None


def _waiting(unit: Unit, waiting: Mapping[str, Awaiting], complete: Mapping[str, Delivery], *, by: str) -> Unit:
    """Return the unit with what it waits for, which is committed; `complete` is what members have whole."""
    begun = next((delivery.version for delivery in complete.values()), None)
    for name, answer in waiting.items():
        unit = leave(unit, name, answer, awaited_by(unit.member(name), answer, begun), by=by)
        member = unit.member(name)
        outcome = member.outcome.heard(answer).counted(
            {"redelivered": answer.redelivered} if answer.redelivered else {}
        )
        awaiting = replace(answer, idle=answer.idle and not complete)
        unit = unit.having([replace(member, outcome=outcome, awaiting=awaiting)])
    unit = begin(unit, by=by)
    missing = tuple(marker for answer in waiting.values() for marker in answer.missing)
    known = [awaited.since for name in waiting if (awaited := unit.member(name).manifest.awaited) is not None]
    members = []
    for member in (unit.member(name) for name in complete):
        since = min(known, default=member.log.lake.now())
        members.append(replace(member, others=Awaited(version=begun, missing=missing, since=since)))
    return unit.having(members)


def _check_one_version(complete: Mapping[str, Delivery]) -> None:
    versions = {delivery.version for delivery in complete.values()}
    if len(versions) > 1:
        named = "; ".join(f"{name}: {delivery.version!r}" for name, delivery in complete.items())
        raise MarkerConflictError(
            f"the members of one version set have delivered different versions as the next ({named}).",
            "If one of them has no counterpart in the other members, or lost it to retention, abandon it: "
            "adjunct dataset abandon DATASET VERSION --reason ….",
            dataset=next(iter(complete)),
        )
