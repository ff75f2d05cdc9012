"""Names as Dagster takes them: it knows no `-` and no `.` in the names of jobs, ops, sensors and asset keys."""

from __future__ import annotations


def dagster_name(name: str) -> str:
    """Return the name of an application, a dataset or an operator as Dagster takes it: "_" for "-" and "."."""
    return name.replace("-", "_").replace(".", "_")
