"""What a process that lives long keeps of the sessions of Spark that it has had."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dagster_adjunct.resources.bucketing import files
from dagster_adjunct.resources.bucketing.files import BucketLayout, bucketed_frame
from dagster_adjunct.resources.objects.local_store import LocalStore
from dagster_adjunct.resources.schemas.schema import Schema


def session(number: int) -> Any:
    """A session without tables."""
    table = SimpleNamespace(inputFiles=list)
    context = SimpleNamespace(applicationId=f"known-tables-{number}")
    return SimpleNamespace(sparkContext=context, sql=lambda text: None, table=lambda name: table)


def test_tables_of_old_sessions_are_forgotten(tmp_path: Path) -> None:
    layout = BucketLayout(Schema.of(k="string"), (), 1)
    for number in range(100):
        bucketed_frame(session(number), LocalStore(str(tmp_path)), "dataset 'd'", layout, [])
    assert len(files._tables) < 50
    assert "known-tables-99" in files._tables
