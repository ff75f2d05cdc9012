"""Which version a dataset, or all members of a version set, have next and whole; else what they wait for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.assets.sources.version_source import Awaiting, Delivery
from dagster_adjunct.resources.errors import MarkerConflictError

if TYPE_CHECKING:
    from dagster_adjunct.assets.bounded.advancing_members import Unit


@dataclass(frozen=True, slots=True)
class Answers:
    """What the sources have next, by dataset: `complete` versions, and what the others are `waiting` for.

    `together` are the deliveries of one version that all members have; nothing where one still waits.
    """

    complete: Mapping[str, Delivery]
    waiting: Mapping[str, Awaiting]
    together: Mapping[str, Delivery]


def delivered_together(unit: Unit) -> Answers:
    """Ask every member's source. Raises MarkerConflictError where markers, or the members, contradict each other."""
    answers = {member.name: member.source.next(member.manifest) for member in unit.members}
    complete = {name: answer for name, answer in answers.items() if isinstance(answer, Delivery)}
    together = _of_one_version(unit, complete)
    if not together:
        _check_one_version(complete)
    waiting = {name: answer for name, answer in answers.items() if isinstance(answer, Awaiting)}
    return Answers(complete, waiting, together)


def _of_one_version(unit: Unit, complete: Mapping[str, Delivery]) -> Mapping[str, Delivery]:
    """Return the deliveries of one version that all members have; none where there is none.

    A member that had this version before it joined the set is not waited for. One that abandoned it is: the set never
    has it whole then.
    """
    for version in {delivery.version for delivery in complete.values()}:
        here = {name: delivery for name, delivery in complete.items() if delivery.version == version}
        if all(version in member.manifest.taken for member in unit.members if member.name not in here):
            return here
    return {}


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
