"""Clients of AWS share what botocore has read of a service."""

from __future__ import annotations

from collections import Counter

import pytest

from dagster_adjunct.resources.aws import new_session
from dagster_adjunct.resources.objects.s3_store import S3Request, create_s3_client
from dagster_adjunct.resources.objects.store import S3Options
from dagster_adjunct.resources.table_backends.dynamodb_connection import Connection


def test_descriptions_of_services_are_read_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.loaders import JSONFileLoader

    read: Counter[str] = Counter()
    load = JSONFileLoader.load_file

    def counted(self: JSONFileLoader, path: str) -> object:
        content = load(self, path)
        read[path] += content is not None
        return content

    monkeypatch.setattr(JSONFileLoader, "load_file", counted)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    for _ in range(3):
        create_s3_client(S3Options(), S3Request("a test", "s3://bucket"))
        Connection(region="eu-west-1").with_session("a test").client("a test", 1)
        Connection(region="eu-west-1").client("a test", 1)
    assert not [path for path, times in read.items() if times > 1]


def test_sessions_share_no_credentials() -> None:
    first, second = new_session(), new_session()
    first.set_credentials("one", "secret")
    second.set_credentials("two", "secret")
    assert [session.get_credentials().access_key for session in (first, second)] == ["one", "two"]  # type: ignore[union-attr]
