"""A real PostgreSQL server on loopback, for the tests that need one.

It needs the server's programs (Debian: `apt-get install postgresql`), in PATH or in Debian's
folder; those of version 18 come from `.ci/install-postgres18.sh`. The server refuses to run as root, so root starts it as the user postgres.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NoReturn

import pytest

from tests.servers.ports import free_port

if TYPE_CHECKING:
    from tests.servers.pgchanges import Bank

USER = "adjunct"
ARCHIVES = Path(__file__).parents[2] / ".cache" / "postgres18"
GUARDED_USER = "guarded"
GUARDED_PASSWORD = "correct-horse"


@dataclass(frozen=True)
class PostgresServer:
    """A running server. `adjunct` logs in without a password; `guarded` needs its own (scram)."""

    port: int
    data: Path
    programs: Path
    as_user: tuple[str, ...]

    def dsn(self, user: str = USER, password: str = "", dbname: str = "adjunct") -> str:
        login = f"{user}:{password}" if password else user
        return f"postgresql://{login}@127.0.0.1:{self.port}/{dbname}"

    def execute(self, statement: str, dbname: str = USER) -> list[tuple[object, ...]]:
        """Run one statement as the owner; the rows that it returns, if any."""
        import psycopg

        with psycopg.connect(self.dsn(dbname=dbname), autocommit=True) as connection:
            cursor = connection.execute(statement)  # type: ignore[call-overload]
            return cursor.fetchall() if cursor.description else []

    def require_password(self, user: str) -> None:
        """Let this user log in only with its password (scram)."""
        access = self.data / "pg_hba.conf"
        access.write_text(f"host all {user} 127.0.0.1/32 scram-sha-256\n" + access.read_text())
        self.execute("SELECT pg_reload_conf()")

    def restart(self) -> None:
        """Stop the server the fast way, ending all connections, and start it again."""
        self._control("restart", "-m", "fast")

    def start(self) -> None:
        self._control("start")

    def stop(self) -> None:
        self._control("stop", "-m", "immediate")

    def _control(self, *command: str) -> None:
        log = str(self.data / "server.log")
        control = [*self.as_user, str(self.programs / "pg_ctl"), "-D", str(self.data), "-l", log]
        run([*control, "-w", "-t", "30", *command])


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    with running_server() as server:
        yield server


@pytest.fixture(scope="session")
def logical_server() -> Iterator[PostgresServer]:
    """A server whose write-ahead log tells of the rows that change."""
    with running_server("wal_level = logical") as server:
        yield server


@pytest.fixture(scope="session")
def logical_server_18() -> Iterator[PostgresServer]:
    """A server of version 18 whose write-ahead log has the rows that change."""
    with TemporaryDirectory(prefix="adjunct-postgres-18-") as folder:
        programs = Path(folder)
        unpack_version_18(programs)
        with running_server("wal_level = logical", programs=programs / "bin") as server:
            yield server


@pytest.fixture
def bank(logical_server: PostgresServer) -> Iterator[Bank]:
    """Accounts in a table of their own, whose changes are told."""
    from tests.servers.pgchanges import Bank

    bank = Bank(logical_server)
    bank.open()
    yield bank
    bank.close()


@contextmanager
def running_server(*settings: str, programs: Path | None = None) -> Iterator[PostgresServer]:
    """A server of its own with these lines in its postgresql.conf; skips where its programs are
    missing.
    """
    programs = programs or _programs()
    as_user = ("runuser", "-u", "postgres", "--") if os.geteuid() == 0 else ()
    folder = Path(tempfile.mkdtemp(prefix="adjunct-postgres-"))
    if as_user:
        shutil.chown(folder, "postgres")
    server = PostgresServer(free_port(), folder / "data", programs, as_user)
    try:
        _initialise(server, settings)
        server.start()
        server.execute(f"CREATE DATABASE {USER}", dbname="postgres")
        server.execute(f"CREATE ROLE {GUARDED_USER} LOGIN PASSWORD '{GUARDED_PASSWORD}'")
        yield server
    finally:
        if (server.data / "postmaster.pid").exists():
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _initialise(server: PostgresServer, lines: tuple[str, ...]) -> None:
    initdb = [*server.as_user, str(server.programs / "initdb"), "-D", str(server.data)]
    run([*initdb, "-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"])
    access = server.data / "pg_hba.conf"
    access.write_text(f"host all {GUARDED_USER} 127.0.0.1/32 scram-sha-256\n" + access.read_text())
    with (server.data / "postgresql.conf").open("a") as settings:
        settings.write(
            f"port = {server.port}\nlisten_addresses = '127.0.0.1'\nunix_socket_directories = ''\n"
            "fsync = off\nmax_connections = 50\ndeadlock_timeout = 100ms\n"
        )
        settings.writelines(f"{line}\n" for line in lines)


def _programs() -> Path:
    found = shutil.which("pg_ctl")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for folder in folders:
        if all((folder / program).exists() for program in ("initdb", "pg_ctl", "psql")):
            return folder
    _skip("no PostgreSQL server programs (initdb, pg_ctl) in PATH or /usr/lib/postgresql/*/bin")


def unpack_version_18(folder: Path) -> None:
    """Unpack the programs of version 18, for everybody: the server does not run as root."""
    archives = [*ARCHIVES.glob("*.jar")]
    if not archives:
        _skip("no programs of PostgreSQL 18: run .ci/install-postgres18.sh (fetches 15 MB)")
    with zipfile.ZipFile(archives[0]) as jar:
        (packed,) = (name for name in jar.namelist() if name.endswith(".txz"))
        with tarfile.open(fileobj=io.BytesIO(jar.read(packed)), mode="r:xz") as files:
            files.extractall(folder, filter="fully_trusted")
    folder.chmod(0o755)


def _skip(reason: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(f"{reason}; CI must install them")
    pytest.skip(reason)


def run(command: list[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, cwd="/", stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{command} failed: {done.stdout[-2000:]} {done.stderr[-2000:]}")
