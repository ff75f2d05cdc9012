"""The code location that workspace.yaml loads: the applications in ADJUNCT_APP, by default those of
the demo.

ADJUNCT_APP is a list of MODULE:APP, separated by commas.
"""

from __future__ import annotations

import os

from dagster_adjunct.orchestration.application.application import load_application
from dagster_adjunct.orchestration.code_location.definitions import build_definitions

_EXAMPLES = ("pipeline", "disruptions", "over_time")
DEFAULT_APP = ",".join(f"dagster_adjunct.examples.flights.{name}:app" for name in _EXAMPLES)

defs = build_definitions(
    *[
        load_application(reference.strip())
        for reference in (os.environ.get("ADJUNCT_APP") or DEFAULT_APP).split(",")
    ]
)
