"""Credentials that have expired, and clocks that are wrong, are transient; fresh credentials are
picked up.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.objects.s3_store import S3Store
from dagster_adjunct.resources.objects.store import S3Options
from dagster_adjunct.tables import BlockingTable, DynamoDbTable, RemoteTable, RetryPolicy
from tests.servers.s3 import S3Server
from tests.servers.s3_proxy import REFUSALS, TroubledS3

pytestmark = pytest.mark.server
OLD, FRESH = "OLDKEY", "FRESHKEY"
STALE = [
    "ExpiredToken",
    "ExpiredTokenException",
    "TokenRefreshRequired",
    "RequestExpired",
    "RequestTimeTooSkewed",
]


@pytest.fixture
def proxy(moto_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[TroubledS3]:
    """A server that refuses what OLD signs, with credentials from a file that a test may write
    again.
    """
    moto_s3.set_in(monkeypatch)
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ENDPOINT_URL_S3",
        "AWS_PROFILE",
    ):
        monkeypatch.delenv(name, raising=False)
    for proxy in TroubledS3(moto_s3.endpoint).running():
        proxy.refused[OLD] = "ExpiredToken"
        yield proxy


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of credentials, which has expired ones."""
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    write_key(file, OLD)
    return file


def write_key(file: Path, key: str) -> None:
    file.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key=secret\n")


@pytest.fixture
def store(moto_s3: S3Server, proxy: TroubledS3) -> S3Store:
    options = S3Options(endpoint=proxy.endpoint, region="us-east-1", path_style=True, attempts=1)
    return S3Store(moto_s3.url(), options)


REQUESTS = {
    "get": lambda store: store.get("a"),
    "get_range": lambda store: store.get_range("a", 0, 1),
    "head": lambda store: store.head("a"),
    "list": lambda store: list(store.list("")),
    "put": lambda store: store.put("b", b"x"),
    "put_if_absent": lambda store: store.put_if_absent("c", b"x"),
    "put_if_match": lambda store: store.put_if_match("a", b"y", store.get("a").etag),
    "delete": lambda store: store.delete("a"),
    "delete_many": lambda store: store.delete_many(["a"]),
}


@pytest.mark.parametrize("request_name", REQUESTS)
def test_expired_credentials_are_transient_and_the_next_request_asks_for_fresh_ones(
    store: S3Store, credentials: Path, request_name: str
) -> None:
    write_key(credentials, FRESH)
    store.put("a", b"x")
    write_key(credentials, OLD)
    expired = S3Store(store.url, store.descriptor.s3)
    with pytest.raises(errors.StoreUnavailableError, match="ExpiredToken"):
        REQUESTS[request_name](expired)
    write_key(credentials, FRESH)
    REQUESTS[request_name](expired)


@pytest.mark.parametrize("code", STALE)
@pytest.mark.parametrize("request_name", ["get", "head"])
def test_every_code_of_expired_credentials_is_in_the_message(
    store: S3Store, proxy: TroubledS3, credentials: Path, code: str, request_name: str
) -> None:
    proxy.refused[OLD] = code
    with pytest.raises(errors.StoreUnavailableError) as refused:
        REQUESTS[request_name](store)
    assert f"was answered {REFUSALS[code]} {code}: " in str(refused.value)
    assert "403 403" not in str(refused.value)
    assert "400 400" not in str(refused.value)


@pytest.mark.parametrize("request_name", ["get", "head"])
def test_what_credentials_do_not_allow_stays_permanent(
    store: S3Store, proxy: TroubledS3, credentials: Path, request_name: str
) -> None:
    proxy.refused[OLD] = "AccessDenied"
    with pytest.raises(errors.ConfigurationError, match="was answered 403 AccessDenied: "):
        REQUESTS[request_name](store)


@pytest.mark.parametrize(
    ("seconds", "kind"), [(0, "permanent"), (1_000, "clock"), (-1_000, "clock")]
)
def test_a_wrong_signature_is_a_clocks_if_the_answers_date_says_so(
    store: S3Store, proxy: TroubledS3, credentials: Path, seconds: int, kind: str
) -> None:
    proxy.refused[OLD] = "SignatureDoesNotMatch"
    proxy.clock_ahead = seconds
    expected = errors.ConfigurationError if kind == "permanent" else errors.StoreUnavailableError
    with pytest.raises(expected) as refused:
        store.get("a")
    assert ("this machine's clock is wrong" in str(refused.value)) == (kind == "clock")


def test_a_request_waits_for_fresh_credentials_for_a_while(
    moto_s3: S3Server, proxy: TroubledS3, credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = S3Options(endpoint=proxy.endpoint, region="us-east-1", path_style=True, attempts=4)
    store = S3Store(moto_s3.url(), options)
    refusal_of, asked = proxy.refusal_of, []

    def refuse(authorization: str) -> str | None:
        asked.append(authorization)
        if len(asked) == 2:
            write_key(credentials, FRESH)  # the provider has new ones after the second request
        return refusal_of(authorization)

    monkeypatch.setattr(proxy, "refusal_of", refuse)
    assert store.put_if_absent("once", b"x")
    assert store.get("once").data == b"x"


def test_a_process_that_provides_credentials_is_asked_again(
    store: S3Store, tmp_path: Path, credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials.unlink()
    answer, asked = tmp_path / "answer.json", tmp_path / "asked"
    script = tmp_path / "provide.py"
    script.write_text(
        f"open({str(asked)!r}, 'a').write('.')\nprint(open({str(answer)!r}).read())\n"
    )
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {sys.executable} {script}\n")

    def provide(key: str) -> None:
        answer.write_text(
            json.dumps(
                {"Version": 1, "AccessKeyId": key, "SecretAccessKey": "s", "SessionToken": "t"}
            )
        )

    provide(OLD)
    with pytest.raises(errors.StoreUnavailableError, match="ExpiredToken"):
        store.put("a", b"x")
    provide(FRESH)
    store.put("a", b"x")
    store.put("b", b"x")
    assert asked.read_text() == "..", "a process is asked once, and again after a refusal"


def test_a_process_that_fails_is_transient_and_named(
    store: S3Store, tmp_path: Path, credentials: Path
) -> None:
    credentials.unlink()
    gone = tmp_path / "gone.py"
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {sys.executable} {gone}\n")
    with pytest.raises(
        errors.StoreUnavailableError, match="the provider of the credentials has none now"
    ):
        store.get("a")
    gone.write_text(
        f"print({json.dumps({'Version': 1, 'AccessKeyId': FRESH, 'SecretAccessKey': 's'})!r})"
    )
    store.put("a", b"x")


def test_no_credentials_at_all_are_permanent_until_there_are_some(
    store: S3Store, credentials: Path
) -> None:
    credentials.unlink()
    with pytest.raises(errors.ConfigurationError, match="NoCredentialsError"):
        store.put("a", b"x")
    write_key(credentials, FRESH)
    store.put("a", b"x")


# -- DynamoDB


def dynamodb_table(
    proxy: TroubledS3, attempts: int = 1, **more: Any
) -> BlockingTable[Any, Any, Any]:
    store = DynamoDbTable(
        table=f"t-{uuid.uuid4().hex[:8]}",
        key="id",
        columns={"id": "string", "n": "bigint"},
        region="us-east-1",
        endpoint_url=proxy.endpoint,
        create=True,
        **more,
    )
    retry = RetryPolicy(attempts=attempts)
    return BlockingTable(
        RemoteTable("t", key="id", read_function=store, write_function=store, retry=retry)
    )


@pytest.mark.parametrize(
    "code", ["ExpiredTokenException", "RequestExpired", "InvalidSignatureException"]
)
def test_a_dynamodb_table_asks_for_fresh_credentials(
    proxy: TroubledS3, credentials: Path, code: str
) -> None:
    write_key(credentials, FRESH)
    table = dynamodb_table(proxy)
    table.put("a", {"id": "a", "n": 1})
    proxy.refused[FRESH] = code
    proxy.clock_ahead = 1_000 if code == "InvalidSignatureException" else 0
    with pytest.raises(errors.TableUnavailableError, match=code):
        table.get("a")
    write_key(credentials, "NEWER")
    assert table.get("a") == {"id": "a", "n": 1}
    table.close()


def test_credentials_in_variables_are_read_again(
    proxy: TroubledS3, credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_ID", FRESH)
    monkeypatch.setenv("MY_SECRET", "s")
    table = dynamodb_table(proxy, attempts=2, credentials_env=("MY_ID", "MY_SECRET"))
    table.put("a", {"id": "a", "n": 1})
    proxy.refused[FRESH] = "ExpiredTokenException"
    monkeypatch.setenv("MY_ID", "NEWER")
    assert table.get("a") == {"id": "a", "n": 1}
    table.close()


def test_a_login_that_may_not_read_the_table_stays_permanent(
    proxy: TroubledS3, credentials: Path
) -> None:
    write_key(credentials, FRESH)
    proxy.refused[FRESH] = "InvalidSignatureException"
    with pytest.raises(errors.TableAccessError, match="InvalidSignatureException"):
        dynamodb_table(proxy).get("a")
