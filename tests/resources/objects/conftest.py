"""One suite for all stores: in memory, in a folder, on versitygw and on moto's server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_adjunct.resources.objects.local_store import LocalStore
from dagster_adjunct.resources.objects.store import InMemoryStore

if TYPE_CHECKING:
    from pathlib import Path

    from dagster_adjunct.resources.objects.store import ObjectStore
    from tests.servers.s3 import S3Server


@pytest.fixture(
    params=["memory", "local", "versitygw", pytest.param("moto_s3", marks=pytest.mark.long)]
)
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ObjectStore:
    if request.param == "memory":
        return InMemoryStore()
    if request.param == "local":
        return LocalStore(tmp_path / "a lake of ünits")
    from dagster_adjunct.resources.objects.s3_store import S3Store

    server: S3Server = request.getfixturevalue(request.param)
    server.set_in(monkeypatch)
    return S3Store(server.url(), server.settings.s3_options())


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagster_adjunct.resources.objects.commit_log._FIRST_PAUSE", 0.001)
    monkeypatch.setattr("dagster_adjunct.resources.objects.s3_store._FIRST_PAUSE", 0.001)
