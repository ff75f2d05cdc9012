"""The page that follows a PostgreSQL table holds: its commands, against a real server, print
what it shows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dagster_adjunct import open_lake
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from tests.doc_blocks import ROOT, Block, PageReader, blocks_of
from tests.servers.postgres import PostgresServer

PAGE = ROOT / "docs" / "postgres-changes.md"


def reason(block: Block) -> str:
    """Why the block is not run with the other pages, "" where it is."""
    return "" if block.run else PAGE.read_text(encoding="utf-8").splitlines()[block.line - 3]


@pytest.mark.server
@pytest.mark.spark
@pytest.mark.long  # without the page: test_postgres_capture.py
def test_the_walk_through_prints_what_it_shows(
    logical_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCOUNTS_DSN", logical_server.dsn())
    monkeypatch.setenv("PATH", str(logical_server.programs), prepend=":")
    folder = tmp_path / "reader"
    folder.mkdir()
    followed = 0
    with PageReader(folder, tmp_path / "session.log") as reader:
        for block in blocks_of(PAGE):
            server = "needs a PostgreSQL server" in reason(block)
            followed += server
            reader.follow(replace(block, run=True) if server else block)
        assert followed == 5
        # The slot is gone, and so is this change: only a new snapshot tells of it.
        logical_server.execute("UPDATE accounts SET balance = 1000 WHERE id = 4")
        for text, language in (
            ("python -m dagster_adjunct.examples.postgres_changes\n", "console"),
            ("captured 0\nbootstrapped 4 0\n…| 4| Cy| 1000|…", "text"),
            ("python -m dagster_adjunct.examples.postgres_changes --drop\n", "console"),
        ):
            reader.follow(Block(PAGE, 0, language, text, True))
    manifest = StoredVersions(open_lake(folder / "lake"), "accounts").require_manifest()
    taken = (folder / "accounts-snapshot" / "position.json").stat().st_mtime
    assert manifest.bootstrap is not None
    assert manifest.bootstrap.started_at.timestamp() > taken, (
        "the next run would build it anew again"
    )
    assert (
        logical_server.execute(
            "SELECT slot_name FROM pg_replication_slots WHERE slot_name ~ 'adjunct_accounts'"
        )
        == []
    )
    logical_server.execute("DROP TABLE accounts")
