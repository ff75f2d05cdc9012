"""Refusals of requests for startpoints: they can't be followed, or would replace what is of the other kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.startpoints.previews.request_preview import Preview
    from dagster_adjunct.orchestration.startpoints.requests.held_startpoints import Held
    from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import StartpointRequest


def check_followed(previews: Sequence[Preview]) -> None:
    """Refuse requests that can't be followed as things are, and replays that would read nothing."""
    wrong = [shown for shown in previews if shown.error and not shown.falls_back]
    if wrong:
        more = "" if len(wrong) == 1 else f" So for {len(wrong) - 1} more of the {len(previews)} partitions."
        raise ConfigurationError(
            f"the startpoint can't be followed as things are, and nothing is written. {wrong[0].error}{more}",
            "See what each would do with --dry-run; in Python: preview(…).",
            stream=wrong[0].request.ssp.qualified_stream,
        )
    if all(shown.request.until is not None and shown.offsets == 0 for shown in previews):
        first, others = previews[0], "" if len(previews) == 1 else ", nor in the other partitions"
        raise ConfigurationError(
            f"{first.request.ssp}: nothing lies between the startpoint (offset {first.start}) and the end of the "
            f"replay (offset {first.end}){others}; nothing is written.",
            "Choose an end that lies after the start.",
            stream=first.request.ssp.qualified_stream,
        )


def check_kinds(replaced: Sequence[tuple[Held, StartpointRequest]]) -> None:
    """Refuse a bounded replay that takes the place of a startpoint which moves the position, or the other way round."""
    for held, request in replaced:
        if (held.request.until is None) != (request.until is None):
            what = "a bounded replay" if request.until is not None else "a startpoint that moves the position"
            other = "a startpoint that moves the position" if request.until is not None else "a bounded replay"
            raise ConfigurationError(
                f"{what} would take the place of {other}: {held.summary()}.",
                "Let a run apply that first, take it back (adjunct startpoint clear), or replace it with --replace; "
                "in Python: replace=True.",
                stream=request.ssp.qualified_stream,
            )
