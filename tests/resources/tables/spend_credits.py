"""A process that spends credits as a task does, and tells when it got how many: `spend_credits.py
REQUEST PAUSE`.

The address comes by the standard input, and the end of that ends it.
"""

from __future__ import annotations

import asyncio
import sys
import time

from dagster_adjunct.resources.tables.credit_messages import CreditAddress
from dagster_adjunct.resources.tables.rate import Budget
from dagster_adjunct.resources.tables.shared_rate import CreditClient


async def main() -> None:
    request, pause = int(sys.argv[1]), float(sys.argv[2])
    host, port, secret, name, rate = sys.stdin.readline().split()
    source = CreditClient(CreditAddress(host, int(port), bytes.fromhex(secret)))
    budget = Budget(name, "write", float(rate))
    while True:
        await source.acquire(budget, request)
        print(time.monotonic(), request, flush=True)
        await asyncio.sleep(pause)


if __name__ == "__main__":
    asyncio.run(main())
