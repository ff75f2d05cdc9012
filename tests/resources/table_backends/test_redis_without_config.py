"""Redis servers without CONFIG, with each policy that they have."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from dagster_adjunct.errors import ConfigurationError
from dagster_adjunct.resources.table_backends.redis import RedisTable
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.orchestration.table_runs import COLUMNS
from tests.servers.redis import RedisServerProcess, running_redis

pytestmark = pytest.mark.server
NO_CONFIG = ("--rename-command", "CONFIG", "")
EVICTING = [
    f"{which}-{how}"
    for which, how in [
        *[("allkeys", how) for how in ("lru", "lfu", "random")],
        *[("volatile", how) for how in ("lru", "lfu", "random", "ttl")],
    ]
]


def table(server: RedisServerProcess, **options: Any) -> RemoteTable[Any, Any, Any]:
    store = RedisTable("rows", "id", columns=COLUMNS, url=server.url())
    return RemoteTable("rows", key="id", read_function=store, write_function=store, **options)


@pytest.mark.lengthy
@pytest.mark.parametrize("policy", EVICTING)
def test_each_policy_that_evicts_is_refused_where_config_is_renamed(policy: str) -> None:
    with running_redis(*NO_CONFIG, "--maxmemory-policy", policy) as server:
        for condition in ({"idempotent": True}, {"newest_by": "total"}):
            with (
                BlockingTable(table(server, **condition)) as remote,
                pytest.raises(ConfigurationError) as refused,
            ):
                remote.put("a", {"total": 1})
            assert refused.value.setting == "maxmemory-policy"
            assert policy in refused.value.problem
        with closing(server.client()) as client:
            assert client.dbsize() == 0, "nothing was written"


@pytest.mark.lengthy
def test_a_server_that_renamed_both_commands_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    hidden = (*NO_CONFIG, "--rename-command", "INFO", "")
    with (
        running_redis(*hidden, "--maxmemory-policy", "allkeys-lru") as server,
        BlockingTable(table(server, idempotent=True)) as remote,
    ):
        remote.put("a", {"total": 1})
        assert remote.get("a") == {"id": "a", "total": 1}
    assert "neither INFO nor CONFIG" in caplog.text
