"""A real Redis server on loopback, for the tests that need one: Debian's `redis-server`, or one in
PATH.

It writes every change to its append-only file before it answers, so what was answered is there
after a restart.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.servers.ports import free_port


@dataclass
class RedisServerProcess:
    """A server that can be stopped, killed and started again on the same port, with what it has
    stored.
    """

    program: str
    port: int
    folder: Path
    settings: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def url(self, database: int = 0) -> str:
        return f"redis://127.0.0.1:{self.port}/{database}"

    def client(self, **settings: Any) -> Any:
        """redis-py's own client, for looking at what is stored."""
        import redis

        return redis.Redis("127.0.0.1", self.port, **settings)

    def start(self) -> None:
        if self.process is not None:
            return
        command = [
            self.program,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(self.folder),
        ]
        command += [
            "--appendonly",
            "yes",
            "--appendfsync",
            "always",
            "--save",
            "",
            "--logfile",
            "server.log",
        ]
        self.process = subprocess.Popen(
            [*command, *self.settings], stdin=subprocess.DEVNULL, cwd=self.folder
        )
        deadline = time.monotonic() + 240
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                log = (self.folder / "server.log").read_text(errors="replace")
                raise RuntimeError(f"{command} did not start: {log[-2000:]}")
            time.sleep(0.01)

    def stop(self, *, kill: bool = False) -> None:
        """End the server, so that nobody gets an answer any more; `kill` gives it no time to
        tell anybody.
        """
        process, self.process = self.process, None
        if process is not None:
            process.kill() if kill else process.terminate()
            process.wait(30)

    def pause(self) -> None:
        """Let the server do nothing until `go_on`; connections stay."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def restart(self, *, kill: bool = False) -> None:
        self.stop(kill=kill)
        self.start()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64)[:5] in (b"+PONG", b"-NOAU")
        except OSError:
            return False


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServerProcess]:
    with running_redis() as server:
        yield server


@contextmanager
def running_redis(*settings: str) -> Iterator[RedisServerProcess]:
    """A server of its own with these settings ("--requirepass", "secret"); skips where there is
    no program.
    """
    program = shutil.which("redis-server")
    if program is None:
        reason = "no redis-server in PATH (Debian: apt-get install redis-server)"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}; CI must install it")
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="adjunct-redis-"))
    server = RedisServerProcess(program, free_port(), folder, settings)
    try:
        server.start()
        yield server
    finally:
        server.stop(kill=True)
        shutil.rmtree(folder, ignore_errors=True)
