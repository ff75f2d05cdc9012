"""One suite for all stores: in memory, in a folder, in a key-value table, on versitygw and on moto's server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_adjunct.resources.objects import InMemoryStore, LocalStore
from tests.resources.objects.routed import routed_descriptor, routed_store

if TYPE_CHECKING:
    from pathlib import Path

    from dagster_adjunct.resources.key_value.table_segment import SegmentBackend
    from dagster_adjunct.resources.objects import ObjectStore
    from tests.servers.s3 import S3Server


IN_TABLES = [pytest.param(fixture, marks=pytest.mark.long) for fixture in ("postgres_server", "dynamodb", "objects")]


@pytest.fixture(params=["memory", "local", "key_values", "versitygw", "moto_s3", *IN_TABLES])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    if request.param == "memory":
        return InMemoryStore()
    if request.param == "local":
        return LocalStore(tmp_path / "a lake of ünits")
    if request.param == "key_values":
        return routed_store(LocalStore(tmp_path / "lake"), tmp_path / "tables" / "metadata.sqlite")
    if request.param in ("postgres_server", "dynamodb", "objects"):
        base = LocalStore(tmp_path / "lake")
        return routed_descriptor(base, _backend(request, tmp_path, monkeypatch)).open()
    from dagster_adjunct.resources.objects.s3_store import S3Store

    server: S3Server = request.getfixturevalue(request.param)
    server.set_in(monkeypatch)
    return S3Store(server.url(), server.settings.s3_options())


def _backend(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> SegmentBackend:
    from dagster_adjunct.resources.key_value_backends import DynamoDbSegments, ObjectSegments, PostgresSegments

    if request.param == "objects":
        return ObjectSegments(str(folder / "lake"))
    server = request.getfixturevalue(request.param)
    if request.param == "dynamodb":
        return DynamoDbSegments()
    monkeypatch.setenv("METADATA_DSN", server.dsn())
    return PostgresSegments(dsn_env="METADATA_DSN")


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagster_adjunct.resources.objects.commit_log._FIRST_PAUSE", 0.001)
    monkeypatch.setattr("dagster_adjunct.resources.objects.s3_errors._FIRST_PAUSE", 0.001)
