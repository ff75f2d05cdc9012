"""A proxy before a real S3 server that answers wrongly, or not at all, on plan."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections import deque
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

# "lost-after": forwarded, then the connection is cut. "lost-before": cut at once. Else: this
# answer, not forwarded.
Trouble = Literal["lost-after", "lost-before", "409", "500", "503"]
# Codes of answers to requests that are not forwarded, with their statuses on AWS.
REFUSALS = {
    "ExpiredToken": 400,
    "TokenRefreshRequired": 400,
    "RequestExpired": 400,
    "RequestTimeTooSkewed": 403,
    "ExpiredTokenException": 400,
    "SignatureDoesNotMatch": 403,
    "InvalidSignatureException": 400,
    "AccessDenied": 403,
}
_CODES = {"409": "ConditionalRequestConflict", "500": "InternalError", "503": "SlowDown"}


class TroubledS3:
    """`trouble` maps a method to what befalls its next requests, in order; `seen` lists all methods
    met.

    `refused` maps ids of access keys to the codes with which their requests are refused,
    `clock_ahead` is how many seconds the server's clock, as its answers state it, is ahead of the
    real one.
    """

    def __init__(self, endpoint: str) -> None:
        self.trouble: dict[str, deque[Trouble | None]] = {}
        self.seen: list[str] = []
        self.cuts: list[str] = []
        self.refused: dict[str, str] = {}
        self.clock_ahead = 0.0
        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), _handler(self, urlsplit(endpoint).netloc)
        )
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def running(self) -> Iterator[TroubledS3]:
        thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()

    def next(self, method: str, *trouble: Trouble | None) -> None:
        """Let these befall the next requests of this method; None lets one pass."""
        self.trouble[method] = deque(trouble)

    def cut(self, *paths: str) -> None:
        """Cut the replies to the next GETs of objects whose path holds one of these, in the
        middle of their bodies.
        """
        self.cuts.extend(paths)

    def is_cut(self, method: str, path: str) -> bool:
        path_cut = next((part for part in self.cuts if method == "GET" and part in path), None)
        if path_cut is not None:
            self.cuts.remove(path_cut)
        return path_cut is not None

    def refusal_of(self, authorization: str) -> str | None:
        """Return the code with which a request is refused, by the access key that has signed it."""
        return next(
            (code for key, code in self.refused.items() if f"Credential={key}/" in authorization),
            None,
        )

    def take(self, method: str) -> Trouble | None:
        self.seen.append(method)
        waiting = self.trouble.get(method)
        return waiting.popleft() if waiting else None


def _handler(state: TroubledS3, upstream: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            trouble = state.take(self.command)
            code = state.refusal_of(self.headers.get("Authorization", ""))
            if code is not None:
                dated = {"Date": formatdate(time.time() + state.clock_ahead, usegmt=True)}
                self._answer(REFUSALS[code], dated, self._refusal(code))
                return
            if trouble in _CODES:
                self._answer(
                    int(trouble), {}, f"<Error><Code>{_CODES[trouble]}</Code></Error>".encode()
                )
                return
            if trouble != "lost-before":
                status, headers, data = self._forward(body)
            if trouble is not None:
                self.close_connection = True
                self.connection.close()
                return
            self._answer(
                status, headers, data, cut=status < 300 and state.is_cut(self.command, self.path)
            )

        def _refusal(self, code: str) -> bytes:
            """Return the body of a refusal by S3, or by DynamoDB. As on S3, an answer to a HEAD
            has none.
            """
            if self.command == "HEAD":
                return b""
            if "X-Amz-Target" in self.headers:
                return json.dumps(
                    {"__type": f"com.amazon.coral.service#{code}", "message": "refused"}
                ).encode()
            return f"<Error><Code>{code}</Code></Error>".encode()

        def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            # The Host header goes on unchanged: it is part of what the client signed.
            headers = {
                name: value for name, value in self.headers.items() if name.lower() != "expect"
            }
            connection = http.client.HTTPConnection(upstream, timeout=30)
            connection.request(self.command, self.path, body or None, headers)
            reply = connection.getresponse()
            data = reply.read()
            connection.close()
            return reply.status, dict(reply.getheaders()), data

        def _answer(
            self, status: int, headers: dict[str, str], data: bytes, *, cut: bool = False
        ) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            length = (
                headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(data))
            )
            self.send_header("Content-Length", length)
            self.end_headers()
            if cut:
                self.wfile.write(data[: len(data) // 2])
                self.close_connection = True
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
            elif self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            return

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    return Handler
