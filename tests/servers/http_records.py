"""A real HTTP service of JSON records, whose answers a test can bend."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, dict[str, str], bytes]


@dataclass
class RecordService:
    """Records by path, and what was asked. `bend` may answer a request otherwise: (status,
    headers, body) or None.
    """

    port: int = 0
    records: dict[str, Any] = field(default_factory=dict)
    # method, path and query, headers
    seen: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    most_at_once: int = 0
    delay: float = 0.0
    bend: Callable[[str, str], Answer | None] = lambda method, path: None
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        with self._lock:
            self.seen.append((method, path, headers))
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            time.sleep(self.delay)
            return self.bend(method, path) or self._records(
                method, path.partition("?")[0], headers, body
            )
        finally:
            with self._lock:
                self._now -= 1

    def _records(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        with self._lock:
            known = path in self.records
            if method == "PUT":
                if known and headers.get("if-none-match") == "*":
                    return 412, {}, b"there is one"
                self.records[path] = json.loads(body)
                return (204 if known else 201), {}, b""
            if not known:
                return 404, {}, b'{"detail": "not found"}'
            if method == "PATCH":
                self.records[path] |= json.loads(body)
            if method == "DELETE":
                del self.records[path]
                return 204, {}, b""
            return 200, {}, json.dumps(self.records[path]).encode()


@contextmanager
def running_service() -> Iterator[RecordService]:
    service = RecordService()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, more, answer = service.answer(self.command, self.path, headers, body)
            if status == 0:  # no answer at all
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in more.items():
                self.send_header(name, value)
            if status != 204:
                self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            if status != 204:
                self.wfile.write(answer)

        do_GET = do_PUT = do_PATCH = do_DELETE = do_POST = _do

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """A client that has not waited for its answer is nothing to tell of."""

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    service.port = server.server_address[1]
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
