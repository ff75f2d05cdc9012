"""Which applications a lake knows, and what is said of names that it does not."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.batchlog.batch_log import NAMES
from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState
    from dagster_adjunct.resources.objects.lake import Lake

_SHOWN = 5


def list_applications(lake: Lake) -> list[str]:
    """Return the applications that have a batch log in the lake, sorted; also one whose first commit failed."""
    return sorted(item.key.rsplit("/", 1)[1] for item in lake.store.list(f"{NAMES}/"))


def check_known(lake: Lake, name: str) -> None:
    """Raise ConfigurationError for a name that no application of the lake has, where any has run."""
    known = list_applications(lake)
    if known and name not in known:
        raise ConfigurationError(
            f"application {name!r} has never run in {lake.url}; {nearest(name, known)}.",
            "Correct the name; for an application that has not run yet, pass the Application itself.",
            application=name,
        )


def check_not_renamed(name: str, state: ApplicationState) -> None:
    """Raise ConfigurationError for the name of before of an application that was renamed."""
    if state.renamed_to is not None:
        raise ConfigurationError(
            f"application {name!r} was renamed {state.renamed_to!r}.",
            f"Say {state.renamed_to!r} here and in the code; give another application another name.",
            application=name,
        )


def nearest(name: str, known: Sequence[str]) -> str:
    """Return in words which of the known applications are called like `name`, else which there are."""
    near = get_close_matches(name, known, n=3)
    if near:
        return f"called like it: {', '.join(near)}"
    more = ", …" if len(known) > _SHOWN else ""
    return f"there are: {', '.join(known[:_SHOWN]) or 'none'}{more}"
