"""Passwords in URLs: refused where they are of no use, and in no error's text."""

from __future__ import annotations

import pickle
import traceback

import pytest
from pydantic import ValidationError

from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    StoreUnavailableError,
    redact_passwords,
)
from dagster_adjunct.resources.objects.lake import LakeSettings, open_lake
from dagster_adjunct.resources.objects.s3_store import S3Request, send_request
from dagster_adjunct.resources.objects.store import S3Options


@pytest.mark.parametrize(
    ("text", "displayed"),
    [
        ("GET http://me:hunter2@store:9000/b?x=1 failed", "GET http://***@store:9000/b?x=1 failed"),
        ('URL: "https://me:p%40/ss@[::1]/"', 'URL: "https://***@[::1]/"'),
        ("postgresql://:hunter2@h/d, http://a:b@c", "postgresql://***@h/d, http://***@c"),
        ("http://store:9000/a@b and ada@example.com", "http://store:9000/a@b and ada@example.com"),
        ("s3://bucket/x:y", "s3://bucket/x:y"),
    ],
)
def test_errors_show_urls_without_their_logins(text: str, displayed: str) -> None:
    assert redact_passwords(text) == displayed
    error = pickle.loads(pickle.dumps(AdjunctError(text, text)))
    assert (error.problem, error.next_step, str(error)) == (
        displayed,
        displayed,
        f"{displayed} {displayed}",
    )


def test_what_botocore_says_of_an_endpoint_out_of_reach_shows_no_login() -> None:
    from botocore.exceptions import EndpointConnectionError

    def request() -> None:
        raise EndpointConnectionError(endpoint_url="http://me:hunter2@127.0.0.1:1/bucket")

    with pytest.raises(StoreUnavailableError, match=r"http://\*\*\*@127\.0\.0\.1:1") as error:
        send_request(S3Request("GET", "s3://b", "a"), request)
    assert "hunter2" not in str(error.value)
    assert error.value.facts == {"url": "s3://b", "key": "a"}


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "variable", ["ADJUNCT_S3_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"]
)
def test_an_endpoint_with_a_login_is_refused_wherever_it_comes_from(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv(variable, "http://me:hunter2@127.0.0.1:1")
    with pytest.raises(ConfigurationError) as error:
        open_lake("s3://bucket/lake").store.get("a")
    assert error.value.argument == "endpoint"
    assert "hunter2" not in "".join(traceback.format_exception(error.value))


@pytest.mark.parametrize("variable", ["ADJUNCT_S3_ENDPOINT", "AWS_ENDPOINT_URL_S3"])
@pytest.mark.parametrize(
    "endpoint", ["me:hunter2@127.0.0.1:1", "127.0.0.1:1", "http://127.0.0.1:1/?token=hunter2"]
)
def test_an_endpoint_that_is_no_url_is_rejected_without_showing_a_login(
    variable: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv(variable, endpoint)
    with pytest.raises(ConfigurationError, match="endpoint") as error:
        open_lake("s3://bucket/lake").store.get("a")
    assert "hunter2" not in "".join(traceback.format_exception(error.value))


@pytest.mark.parametrize(
    "url", ["s3://AKIA:s/cret@bucket/lake", "s3a://AKIA:secret@bucket", "ftp://a:secret@host/x"]
)
def test_a_lake_s_url_with_a_login_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        open_lake(url)
    assert "cret" not in str(error.value)


def test_settings_that_do_not_fit_show_no_other_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADJUNCT_S3_ENDPOINT", "http://me:hunter2@h")
    monkeypatch.setenv("ADJUNCT_S3_SSE_KMS_KEY_ID", "key")
    with pytest.raises((ValidationError, ConfigurationError)) as error:
        LakeSettings()
    assert "hunter2" not in str(error.value)
    with pytest.raises(ConfigurationError):
        S3Options(endpoint="http://me:hunter2@h")
