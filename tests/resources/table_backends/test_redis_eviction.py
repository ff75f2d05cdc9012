"""A Redis server that may evict records is rejected where marks must stay, and noted where they
need not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.errors import ConfigurationError
from dagster_adjunct.orchestration.application.table_registry import read_table_notes
from dagster_adjunct.resources.table_backends import redis as module
from dagster_adjunct.resources.table_backends.redis import RedisTable
from dagster_adjunct.resources.table_backends.redis_eviction import (
    check_eviction,
    note_eviction,
    read_eviction_policy,
)
from dagster_adjunct.resources.tables.operation import (
    Conditions,
    Mark,
    Operation,
    OperationKind,
    RowEntries,
)
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.orchestration.table_runs import COLUMNS, TableRuns
from tests.servers.redis import RedisServerProcess, running_redis

pytestmark = pytest.mark.server
POLICIES = ["allkeys-lru", "allkeys-random", "volatile-lru", "volatile-ttl"]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServerProcess]:
    with running_redis("--rename-command", "FLUSHDB", "") as running:
        yield running


@pytest.fixture
def policy(server: RedisServerProcess) -> Iterator[Callable[..., None]]:
    """Sets the server's policy, and its limit of memory."""
    with closing(server.client()) as client:

        def set_policy(name: str, most: str = "0") -> None:
            client.config_set("maxmemory", most)
            client.config_set("maxmemory-policy", name)

        yield set_policy
        set_policy("noeviction")


def table(server: RedisServerProcess, user: str = "", **options: Any) -> RemoteTable[Any, Any, Any]:
    url = server.url() if not user else server.url().replace("://", f"://{user}@")
    store = RedisTable("evicted", "id", columns=COLUMNS, url=url)
    return RemoteTable("evicted", key="id", read_function=store, write_function=store, **options)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("most", ["0", "100mb"])
@pytest.mark.parametrize(
    "condition", [{"newest_by": "total"}, {"idempotent": True}], ids=["newest_by", "idempotent"]
)
def test_conditions_are_rejected_by_name_with_any_policy_but_noeviction(
    server: RedisServerProcess,
    policy: Callable[..., None],
    name: str,
    most: str,
    condition: dict[str, Any],
) -> None:
    policy(name, most)
    with (
        BlockingTable(table(server, **condition)) as remote,
        pytest.raises(ConfigurationError) as refused,
    ):
        remote.put("a", {"total": 1})
    assert (refused.value.argument, refused.value.setting) == (
        next(iter(condition)),
        "maxmemory-policy",
    )
    assert name in refused.value.problem
    assert "noeviction" in refused.value.next_step
    policy("noeviction", most)
    with BlockingTable(table(server, **condition)) as remote:
        remote.put("a", {"total": 1})
        assert remote.get("a") == {"id": "a", "total": 1}


def test_marked_updates_of_a_run_are_rejected_before_they_are_sent(
    server: RedisServerProcess, policy: Callable[..., None]
) -> None:
    policy("allkeys-lfu")
    store = RedisTable("marked", "id", columns=COLUMNS, url=server.url())
    entries = RowEntries(["a"], [{"total": 1}], marks=[Mark("s", "1")])
    operation = Operation(OperationKind.PUT, entries, conditions=Conditions(None, idempotent=True))

    async def send() -> None:
        await store.open()
        try:
            await store.send(operation)
        finally:
            await store.close()

    with pytest.raises(ConfigurationError):
        asyncio.run(send())
    with closing(server.client()) as client:
        assert client.keys("marked*") == []


def test_a_plain_table_is_written_and_logs_one_note(
    server: RedisServerProcess,
    policy: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_logged", set())
    policy("allkeys-lru")
    with caplog.at_level(logging.WARNING, "adjunct.table"):
        for total in range(3):
            with BlockingTable(table(server)) as remote:
                remote.put("a", {"total": total})
    assert caplog.text.count("maxmemory-policy is allkeys-lru") == 1


def test_the_policy_is_asked_once_a_connection(
    server: RedisServerProcess, policy: Callable[..., None]
) -> None:
    policy("noeviction")
    with closing(server.client()) as client, BlockingTable(table(server)) as remote:
        client.config_resetstat()
        for total in range(20):
            remote.put("a", {"total": total})
        assert client.info("commandstats")["cmdstat_info"]["calls"] == 1


@pytest.mark.parametrize("hidden", ["config", "info"])
def test_either_command_reports_the_policy_where_the_other_is_hidden(
    server: RedisServerProcess, policy: Callable[..., None], hidden: str
) -> None:
    policy("allkeys-lru")
    with closing(server.client()) as client:
        client.acl_setuser(
            "app",
            enabled=True,
            nopass=True,
            keys=["*"],
            commands=["+@all", f"-{hidden}"],
            reset=True,
        )
        with (
            BlockingTable(table(server, "app", idempotent=True)) as remote,
            pytest.raises(ConfigurationError),
        ):
            remote.put("a", {"total": 1})


def test_a_policy_that_no_command_reports_is_noted(
    server: RedisServerProcess, policy: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    policy("allkeys-lru")
    with closing(server.client()) as client:
        commands = ["+@all", "-config", "-info"]
        client.acl_setuser(
            "blind", enabled=True, nopass=True, keys=["*"], commands=commands, reset=True
        )
        with BlockingTable(table(server, "blind", idempotent=True)) as remote:
            remote.put("a", {"total": 1})
    assert "neither INFO nor CONFIG" in caplog.text


def test_managed_services_that_hide_config_are_read_by_info() -> None:
    asked = []

    async def answer(*words: str) -> object:
        asked.append(words[0])
        return (
            b"# Memory\r\nmaxmemory:0\r\nmaxmemory_policy:volatile-lru\r\n"
            if words[0] == "INFO"
            else None
        )

    assert asyncio.run(read_eviction_policy(answer)) == "volatile-lru"
    assert asked == ["INFO"]


def test_the_note_and_the_error_name_the_policy() -> None:
    assert note_eviction("t", "host:1", "noeviction") is None
    assert "volatile-lru" in (note_eviction("t", "host:1", "volatile-lru") or "")
    check_eviction("t", "host:1", "volatile-lru", Conditions())
    check_eviction("t", "host:1", "noeviction", Conditions(None, idempotent=True))
    check_eviction("t", "host:1", None, Conditions("at"))
    with pytest.raises(ConfigurationError):
        check_eviction("t", "host:1", "volatile-lru", Conditions(keeps_marks=True))


@pytest.mark.lengthy
def test_a_plan_and_a_run_say_it_and_reject_exact_tables(
    server: RedisServerProcess,
    policy: Callable[..., None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy("allkeys-lru")
    runs = TableRuns(tmp_path, lambda: RedisTable("plan", "id", columns=COLUMNS, url=server.url()))
    assert ["allkeys-lru" in note for note in read_table_notes(runs.lake, runs.app())] == [True]
    runs.send(("a", 1))
    runs.run()
    assert "maxmemory-policy is allkeys-lru" in caplog.text
    runs.options = {"idempotent": True}
    with pytest.raises(ConfigurationError):
        read_table_notes(runs.lake, runs.app())
    runs.send(("a", 1))
    with pytest.raises(ConfigurationError) as refused:
        runs.run()
    assert refused.value.argument == "idempotent"
    assert runs.lake.exists()
    runs.options = {}
    assert runs.totals() == {"a": 1}
