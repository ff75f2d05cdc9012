"""Key-value tables in objects alone, on a local S3 server: group commit of many writers, and a
scan.

Eight processes with eight conditional puts outstanding each write one segment, which holds few or
many keys; beside them, how often a bare client swaps an object of the size of a pointer when it is
alone. All entries in order, against reading the same objects in large pieces and taking their
blocks apart, in no order. 16 bytes of key, 100 of value.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import secrets
import tempfile
import time
import uuid
from pathlib import Path
from queue import Queue
from threading import Barrier
from unittest.mock import patch

from benchmarks.timing import alternate, show
from dagster_adjunct.resources.key_value.segment import (
    ABSENT,
    ANYTHING,
    KeyRange,
    SegmentChange,
    TableId,
    family_prefix,
    make_version,
    new_token,
    table_key,
)
from dagster_adjunct.resources.key_value_backends.objects.pointer import read_pointer
from dagster_adjunct.resources.key_value_backends.objects.runs import read_block, read_footer
from dagster_adjunct.resources.key_value_backends.objects.segment import ObjectSegments
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.objects.store import ObjectStore
from tests.servers.s3 import serve_versitygw, versitygw_binary

WRITERS, OUTSTANDING, SECONDS = 8, 8, 8.0
FEW, MANY, PAGE = 10_000, 1_000_000, 50_000
PIECE = 4 * 1024 * 1024


def run(rounds: int) -> None:
    """Print rates and ratios."""
    binary = versitygw_binary()
    if binary is None:
        raise SystemExit("versitygw is not installed: run .ci/install-versitygw.sh (needs Go).")
    with tempfile.TemporaryDirectory() as folder:
        buckets = Path(folder) / "buckets"
        buckets.mkdir()
        with serve_versitygw(binary, buckets) as server, patch.dict(os.environ, server.env):
            _compare(server.url(), rounds)


def _compare(url: str, rounds: int) -> None:
    backend, store = ObjectSegments(url), open_lake(url).store
    rates = {}
    for count in (FEW, MANY):
        table = TableId("benchmark", "table", secrets.token_hex(8))
        backend.create(table, 1)
        asyncio.run(_fill(backend, table, count))
        rates[count] = _puts(url, table)
        print(
            f"  {WRITERS} writers of {OUTSTANDING}, {count:,} keys: {rates[count]:.0f} conditional"
            " puts/s (goal: 200)"
        )
    print(
        f"  a put costs {rates[FEW] / rates[MANY]:.2f} times as much in {MANY:,} keys (goal: at"
        " most 1.5)"
    )
    print(f"  one bare client alone swaps an object of 40 kB {_bare_swaps(store):.0f} times/s")
    measured = alternate(
        rounds + 1,
        ours=lambda _: asyncio.run(_scan(backend, table)),
        bare=lambda _: _bare_scan(store, f"key-values/{table.incarnation}/0"),
    )
    show(measured, "bare", "ours", "at least 0.7")


def _key(number: int) -> bytes:
    return table_key(family_prefix("f"), b"%016d" % number)


async def _fill(backend: ObjectSegments, table: TableId, count: int) -> None:
    segment = backend.open(table, 0)
    for start in range(0, count, 5_000):
        token = new_token()
        await segment.apply(
            [
                SegmentChange(
                    _key(start + place),
                    secrets.token_bytes(100),
                    make_version(token, place),
                    ANYTHING,
                )
                for place in range(5_000)
            ],
            token,
        )
    await segment.close()


def _puts(url: str, table: TableId) -> float:
    context = multiprocessing.get_context("spawn")
    done, start = context.Queue(), context.Barrier(WRITERS)
    writers = [
        context.Process(target=_write, args=(url, table, done, start)) for _ in range(WRITERS)
    ]
    for writer in writers:
        writer.start()
    total = sum(done.get(timeout=120) for _ in writers)
    for writer in writers:
        writer.join()
    return total / SECONDS


def _write(url: str, table: TableId, done: Queue[int], start: Barrier) -> None:
    async def write() -> int:
        segment = ObjectSegments(url).open(table, 0)
        await segment.get([_key(0)])
        start.wait(60)
        end = time.monotonic() + SECONDS

        async def one() -> int:
            count = 0
            while time.monotonic() < end:
                token = new_token()
                key = _key(random.randrange(10**12, 10**15))
                await segment.apply(
                    [SegmentChange(key, b"v" * 100, make_version(token, 0), ABSENT)], token
                )
                count += 1
            return count

        return sum(await asyncio.gather(*(one() for _ in range(OUTSTANDING))))

    done.put(asyncio.run(write()))


def _bare_swaps(store: ObjectStore) -> float:
    body = secrets.token_bytes(40_000)
    etag = store.put("bare", body)
    count, end = 0, time.monotonic() + 3
    while time.monotonic() < end:
        etag = store.put_if_match("bare", body + uuid.uuid4().bytes, etag)
        count += 1
    return count / 3


async def _scan(backend: ObjectSegments, table: TableId) -> None:
    segment, left = backend.open(table, 0), KeyRange()
    while page := await segment.page(left, PAGE, values=True):
        left = left.after(page.keys[-1])


def _bare_scan(store: ObjectStore, prefix: str) -> None:
    for run in read_pointer(store.get(f"{prefix}/CURRENT").data, prefix).levels.runs:
        key = f"{prefix}/runs/{run.id}"
        index = read_footer(store.get_range(key, run.size - run.footer, run.footer), key)
        first = 0
        while first < len(index.counts):
            last = first + 1
            while (
                last < len(index.counts) and index.offsets[last + 1] - index.offsets[first] <= PIECE
            ):
                last += 1
            start = index.offsets[first]
            data = store.get_range(key, start, index.offsets[last] - start)
            for number in range(first, last):
                block = read_block(
                    data[index.offsets[number] - start : index.offsets[number + 1] - start]
                )
                list(zip(block.keys, block.versions, block.values, strict=True))
            first = last
