"""Follows a PostgreSQL table: python -m dagster_adjunct.examples.postgres_changes, again and again.

ACCOUNTS_DSN says where the database is. The first run takes a snapshot and bootstraps the dataset
`accounts` from it, in the lake `lake`; every further run applies what was committed since. --drop
ends it: a slot that nobody reads would keep PostgreSQL from deleting its log. A run after that
begins anew, and readers keep the old table until it is there. --accept-partitions goes on after
partitions were attached, detached or truncated.
"""

from __future__ import annotations

import os
import sys
from datetime import datetime
from pathlib import Path

from dagster_adjunct import (
    Lake,
    LakeStreams,
    advance_dataset,
    list_datasets,
    open_dataset,
    open_lake,
    session_scope,
    unbounded_dataset,
)
from dagster_adjunct.changes import DebeziumEnvelope
from dagster_adjunct.examples.postgres_changes.capture import TableCapture
from dagster_adjunct.examples.postgres_changes.slot import Slot
from dagster_adjunct.maintenance import rebuild_dataset
from dagster_adjunct.sources import ParquetSnapshot

COLUMNS = "id BIGINT, owner STRING, balance BIGINT"
SNAPSHOT = Path("accounts-snapshot")

accounts = unbounded_dataset(
    "accounts",
    input="lake.accounts",
    key="id",
    partitions=4,
    changes=DebeziumEnvelope(
        COLUMNS, transactions="lake.accounts-ends", collection="public.accounts"
    ),
    initial=ParquetSnapshot(str(SNAPSHOT)),
)


def main() -> None:
    dsn = os.environ.get("ACCOUNTS_DSN")
    if not dsn:
        sys.exit(
            "ACCOUNTS_DSN is not set: expected a DSN like postgresql://user:password@host/database."
        )
    lake = open_lake("lake")
    slot = Slot(dsn, "public.accounts", "adjunct_accounts")
    if "--drop" in sys.argv:
        slot.drop()
        return
    if "--accept-partitions" in sys.argv:
        slot.accept_partitions()
    capture = TableCapture(slot, lake, "accounts", COLUMNS, key=("id",), ends="accounts-ends")
    taken = capture.start_with_snapshot(SNAPSHOT)
    print("captured", capture.read())  # noqa: T201
    older = bootstrapped_before(lake, taken)
    with session_scope(lake_url=lake.url) as spark:
        systems = {"lake": LakeStreams(lake)}
        if older:
            why = "the slot was made anew"
            report = rebuild_dataset(
                accounts, lake=lake, systems=systems, spark=spark, reason=why, by="walk-through"
            )
        else:
            report = advance_dataset(
                accounts, lake=lake, systems=systems, spark=spark, by="walk-through"
            )
        print(report.action, report.counters.get("loaded", 0), report.counters.get("read", 0))  # noqa: T201
        with open_dataset(lake, accounts) as served:
            served.frame(spark()).orderBy("id").show()


def bootstrapped_before(lake: Lake, snapshot: datetime) -> bool:
    """Whether the dataset is there, and was bootstrapped from an earlier snapshot than this one."""
    if accounts.name not in list_datasets(lake):
        return False
    bootstrap = open_dataset(lake, accounts).describe()["bootstrap"]
    return bootstrap is not None and datetime.fromisoformat(bootstrap["started_at"]) < snapshot


if __name__ == "__main__":
    main()
