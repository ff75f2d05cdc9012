"""A Dagster instance in a folder, with what running applications needs."""

from __future__ import annotations

from pathlib import Path

_CONFIG = """\
# One run of an application at a time: a second one would be fenced off by the batch log anyway.
concurrency:
  runs:
    tag_concurrency_limits:
      - key: adjunct/application
        value:
          applyLimitPerUniqueValue: true
        limit: 1
telemetry:
  enabled: false
"""


def prepare_dagster_home(folder: Path) -> Path:
    """Create the folder as a DAGSTER_HOME if it is none yet, and return it as an absolute path."""
    home = folder.resolve()
    home.mkdir(parents=True, exist_ok=True)
    config = home / "dagster.yaml"
    if not config.exists():
        config.write_text(_CONFIG, encoding="utf-8")
    return home
