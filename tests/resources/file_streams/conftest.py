"""Landing places of files, in a local folder and on an S3 server, and streams over them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagster_adjunct.resources.file_streams import log, streams
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from tests.resources.file_streams.landing import Landing, LocalLanding, S3Landing
from tests.servers.s3 import S3Server


@pytest.fixture(autouse=True)
def nothing_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test declares streams of its own, of any name."""
    monkeypatch.setattr(streams, "_declared", {})


@pytest.fixture
def lake() -> Lake:
    return lake_in(InMemoryStore())


@pytest.fixture
def landing(tmp_path: Path) -> LocalLanding:
    return LocalLanding(tmp_path / "landing place")


@pytest.fixture
def s3_landing(versitygw: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Landing:
    versitygw.set_in(monkeypatch)
    return S3Landing(versitygw.client(), versitygw.bucket())


@pytest.fixture(params=["landing", pytest.param("s3_landing", marks=pytest.mark.server)])
def either(request: pytest.FixtureRequest) -> Landing:
    """Each of the landing places in turn."""
    found: Landing = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs whose files are in pages after a few."""
    monkeypatch.setattr(log, "PAGE", 4)
    monkeypatch.setattr(log, "_MOST_IN_TAIL", 2)
