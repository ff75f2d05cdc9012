"""Delta tables on S3 are asked as a lake is: as often, and as long, as the settings say."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from dagster_adjunct.errors import TransientError
from dagster_adjunct.resources.delta import open_delta


class _Unavailable(BaseHTTPRequestHandler):
    """Answers each request with 503, and counts the requests by what they ask for."""

    asked: ClassVar[dict[str, int]] = {}

    def do_GET(self) -> None:
        what = self.path.partition("?")[0]
        self.asked[what] = self.asked.get(what, 0) + 1
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Yield how often a store that is not available was asked for each object."""
    monkeypatch.setattr(_Unavailable, "asked", {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Unavailable)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("ADJUNCT_S3_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    yield _Unavailable.asked
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_store_is_asked_as_often_as_the_settings_say(
    attempts: int, asked: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADJUNCT_S3_ATTEMPTS", str(attempts))
    with pytest.raises(TransientError):
        open_delta("s3://bucket/orders")
    assert set(asked.values()) == {attempts}
