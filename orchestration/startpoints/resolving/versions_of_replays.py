"""What a request may say of the versions that its replay meets, for an application. Pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.spec.versions_met import AS_OF, CURRENT, VersionsMet
from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import StartpointRequest


def joins_as_of(app: Application) -> tuple[str, ...]:
    """Return the joins in which each record meets the entry that was valid at its own time."""
    return tuple(operator.id for operator in app.operators if getattr(operator.spec, "as_of", None) is not None)


def default_versions(app: Application) -> VersionsMet:
    """Return what a bounded replay meets where its request does not say."""
    return AS_OF if joins_as_of(app) else CURRENT


def check_versions(app: Application, request: StartpointRequest) -> None:
    """Raise ConfigurationError where what a request says of versions can't be."""
    asked, default = request.versions, default_versions(app)
    if asked is None:
        return
    if request.until is None and asked != default:
        raise ConfigurationError(
            f"{request.ssp}: versions={asked} is for a bounded replay, and this request has no end: it moves the main "
            "position, whose batches meet "
            + ("the entries that were valid at each record's time." if default == AS_OF else "what is served then."),
            "Give it an end (--until-timestamp, --until-offset, --until-upcoming; in Python until=…), or leave it out.",
            argument="versions",
            application=app.name,
        )
    if asked == AS_OF and default != AS_OF:
        raise ConfigurationError(
            f"{request.ssp}: versions=as-of, and no join of application {app.name!r} is as-of: none of them asks for "
            "the time of a record.",
            "Declare one (join(…, as_of=…)), or say versions=current, or recorded.",
            argument="versions",
            application=app.name,
        )


def tables_met_after_sends(app: Application) -> frozenset[str]:
    """Return the local tables that a join meets with what the same batch has sent to them before it."""
    sent: set[str] = set()
    met: set[str] = set()
    for operator in app.operators:
        match, feeds = operator.spec.match, operator.spec.feeds
        if match is not None and match.dataset in sent:
            met.add(match.dataset)
        if feeds is not None and app.dataset(feeds).is_owned_by(app.name):
            sent.add(feeds)
    return frozenset(met)


def what_keeps_state(app: Application) -> tuple[str, ...]:
    """Return in words what the application's stateful operators do with records that are read again, a line each."""
    return tuple(
        f"{operator.id} keeps state: records that the application has read before are left out there, and counted "
        "(again)"
        for operator in app.operators
        if operator.spec.states
    )


def versions_in_words(app: Application, requests: Sequence[StartpointRequest]) -> tuple[str, ...]:
    """Return in words what bounded replays meet in datasets, where joins are as-of or a request says it, a line each.

    What was recorded is told by its plan.
    """
    bounded = [request for request in requests if request.until is not None]
    by_time = joins_as_of(app)
    asked = {request.versions or default_versions(app) for request in bounded if by_time or request.versions}
    return tuple(
        line
        for versions, line in (
            (AS_OF, f"versions as-of: {', '.join(by_time)}: what was valid at each record's time; else what is served"),
            (CURRENT, "versions current: every join meets what is served when the replay runs"),
        )
        if versions in asked
    )
