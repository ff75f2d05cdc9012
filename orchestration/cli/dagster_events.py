"""Which Dagster instance learns what a command does: that of DAGSTER_HOME, else the project's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.cli import output
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.system import StreamSystem

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.code_location.runless import RunlessReporter

# Where `adjunct ui` and `adjunct new` make a home, below the working directory.
_PLACES = (".adjunct/dagster", ".")
_IN_A_RUN = ("DAGSTER_PIPES_CONTEXT", "DAGSTER_PIPES_MESSAGES")
NO_HOME = (
    "Dagster is not told what this command does: DAGSTER_HOME is not set, and there is no"
    " dagster.yaml here or in .adjunct/dagster."
)


def find_dagster_home() -> Path | None:
    """Return the folder of DAGSTER_HOME, else that of the project's dagster.yaml; None without
    one.
    """
    home = os.environ.get("DAGSTER_HOME")
    if home:
        return Path(home).absolute()
    for place in map(Path, _PLACES):
        if (place / "dagster.yaml").is_file():
            return place.resolve()
    return None


@contextmanager
def reporting(
    app: Application, lake: Lake, systems: Mapping[str, StreamSystem], by: str
) -> Iterator[RunlessReporter | None]:
    """Yield what reports a command to Dagster. None without a home, and in a process that a run in
    Dagster started, whose op reports."""
    home = find_dagster_home()
    if home is None or any(name in os.environ for name in _IN_A_RUN):
        yield None
        if home is None:  # at the end, and not after an error
            output.show_remark(NO_HOME)
        return
    # Imported only with a home, because importing Dagster takes seconds.
    from dagster_adjunct.orchestration.code_location.runless import reporting_to

    with reporting_to(home, app, lake, systems, by) as reporter:
        yield reporter
