"""What a run's driver and its tasks say to each other about credits, and how each knows the other.

    driver  {"nonce"}            task  {"proof", "nonce"}           driver  {"proof"}
    task    {"budget", "tag", "credits"}      driver  {"wait"} now and then, then {"granted"} or {"error"}

A message is JSON after its length in four bytes. Proofs are HMACs of the other's nonce: the run's secret itself never
passes, and a process that later gets the driver's port can't hand out anything.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from dataclasses import dataclass, field
from typing import Any

_LARGEST = 64 * 1024
# So long somebody may take to say who he is.
_HANDSHAKE_SECONDS = 10.0


class NotOfThisRun(ConnectionError):
    """The other side doesn't know the run's secret, or speaks otherwise."""


@dataclass(frozen=True, slots=True)
class CreditAddress:
    """Where a run's driver hands out credits, and the secret of the run. It travels to tasks and is written nowhere."""

    host: str
    port: int
    secret: bytes = field(repr=False)


async def send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    writer.write(len(data).to_bytes(4, "big") + data)
    await writer.drain()


async def receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the next message. Raises IncompleteReadError where nobody is there any more, and NotOfThisRun."""
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > _LARGEST:
        raise NotOfThisRun(f"a message of {length} bytes")
    try:
        message = json.loads(await reader.readexactly(length))
    except ValueError as error:
        raise NotOfThisRun("what is no message") from error
    if not isinstance(message, dict):
        raise NotOfThisRun("what is no message")
    return message


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """Let a task in that knows the secret, and show that we do. Raises NotOfThisRun."""
    async with asyncio.timeout(_HANDSHAKE_SECONDS):
        nonce = secrets.token_hex(16)
        await send(writer, {"nonce": nonce})
        answer = await receive(reader)
        _check(answer.get("proof"), secret, "task", nonce)
        await send(writer, {"proof": _proof(secret, "driver", str(answer.get("nonce")))})


async def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """Show a driver that we know the secret, and see that it does. Raises NotOfThisRun."""
    async with asyncio.timeout(_HANDSHAKE_SECONDS):
        greeting = await receive(reader)
        nonce = secrets.token_hex(16)
        await send(writer, {"proof": _proof(secret, "task", str(greeting.get("nonce"))), "nonce": nonce})
        _check((await receive(reader)).get("proof"), secret, "driver", nonce)


def _proof(secret: bytes, whose: str, nonce: str) -> str:
    return hmac.new(secret, f"{whose} {nonce}".encode(), "sha256").hexdigest()


def _check(proof: object, secret: bytes, whose: str, nonce: str) -> None:
    if not isinstance(proof, str) or not hmac.compare_digest(proof.encode(), _proof(secret, whose, nonce).encode()):
        raise NotOfThisRun("a wrong proof")
