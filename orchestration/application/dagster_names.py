"""Names as Dagster takes them: it knows no `-` and no `.` in the names of jobs, ops, sensors and asset keys."""

from __future__ import annotations

import re


def dagster_name(name: str) -> str:
    """Return a name as Dagster takes it: "_" for whatever is no letter, digit or "_", such as "-" and "."."""
    return re.sub(r"\W", "_", name)
