"""A Dagster instance in a folder, with what running applications needs."""

from __future__ import annotations

from pathlib import Path

from dagster_adjunct.resources.file_errors import telling_file_errors

_CONFIG = """\
# One run of an application, and one of a dataset, at a time, however it is launched: Adjunct's ops are in pools,
# and a run waits in the queue until the pools of all its ops are free. Where that is not so (another instance's
# settings, or two runs that use a pool for the first time in the same second) the lease of an application's run lets
# the second one wait.
concurrency:
  pools:
    granularity: run
    default_limit: 1
# A run whose process never begins, or does not end when it is cancelled, is given up: sensors launch nothing while it
# counts as in progress.
run_monitoring:
  enabled: true
  start_timeout_seconds: 600
  cancel_timeout_seconds: 300
telemetry:
  enabled: false
nux:
  enabled: false
"""


def prepare_dagster_home(folder: Path) -> Path:
    """Create the folder as a DAGSTER_HOME if it is none yet, and return it as an absolute path."""
    home = folder.resolve()
    config = home / "dagster.yaml"
    with telling_file_errors(home, "the home of Dagster"):
        home.mkdir(parents=True, exist_ok=True)
        if not config.exists():
            config.write_text(_CONFIG, encoding="utf-8")
    return home
