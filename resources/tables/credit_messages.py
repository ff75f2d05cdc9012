"""Messages between a run's driver, which hands out credits, and the tasks that ask it for them.

    driver  {"nonce"}            task  {"proof", "nonce"}           driver  {"proof"}
    task    {"budget", "tag", "credits"}      driver  {"wait"} now and then, then {"granted"} or
                                                      {"error"}

A message is a line of JSON. Proofs are HMACs of the other side's nonce: the run's secret is never
sent, and a process that later gets the driver's port can't hand out anything.

`multiprocessing.connection` has a similar handshake, and is not used: its listener authenticates
one connection after the other without a time limit, so that a single silent one, such as that of a
port scan, keeps all tasks waiting; and before Python 3.12 its HMACs are of MD5, which hosts with
FIPS reject.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from dataclasses import dataclass, field
from typing import Any

_HANDSHAKE_SECONDS = 10.0


class HandshakeError(ConnectionError):
    """The other side doesn't know the run's secret, or doesn't speak the protocol."""


@dataclass(frozen=True, slots=True)
class CreditAddress:
    """The address at which a run's driver hands out credits, and the run's secret. Sent to
    tasks, never stored.
    """

    host: str
    port: int
    secret: bytes = field(repr=False)


async def send_message(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Send a message, and wait while the other side is slow to read."""
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


async def receive_message(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the next message. Raises EOFError on a closed connection, HandshakeError on invalid
    data.
    """
    try:
        line = await reader.readline()  # raises ValueError for a line of over 64 KiB
        if not line.endswith(b"\n"):
            raise EOFError
        message = json.loads(line)
    except ValueError:
        raise HandshakeError("a malformed message") from None
    if not isinstance(message, dict):
        raise HandshakeError("a malformed message")
    return message


async def authenticate_task(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
) -> None:
    """In the driver: check that the task at the other end knows the secret, and prove that the
    driver knows it.

    Raises HandshakeError.
    """
    async with asyncio.timeout(_HANDSHAKE_SECONDS):
        nonce = secrets.token_hex(16)
        await send_message(writer, {"nonce": nonce})
        answer = await receive_message(reader)
        _check_proof(answer.get("proof"), secret, "task", nonce)
        await send_message(writer, {"proof": _proof(secret, "driver", str(answer.get("nonce")))})


async def authenticate_driver(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
) -> None:
    """In a task: prove to the driver that the task knows the secret, and check that the driver
    knows it.

    Raises HandshakeError.
    """
    async with asyncio.timeout(_HANDSHAKE_SECONDS):
        greeting = await receive_message(reader)
        nonce = secrets.token_hex(16)
        await send_message(
            writer, {"proof": _proof(secret, "task", str(greeting.get("nonce"))), "nonce": nonce}
        )
        _check_proof((await receive_message(reader)).get("proof"), secret, "driver", nonce)


def _proof(secret: bytes, whose: str, nonce: str) -> str:
    """Return the text by which the driver or a task (`whose`) proves that it knows the secret."""
    return hmac.new(secret, f"{whose} {nonce}".encode(), "sha256").hexdigest()


def _check_proof(proof: object, secret: bytes, whose: str, nonce: str) -> None:
    """Raise HandshakeError unless this is the proof of the driver or a task (`whose`)."""
    expected = _proof(secret, whose, nonce)
    is_right = isinstance(proof, str) and hmac.compare_digest(proof.encode(), expected.encode())
    if not is_right:
        raise HandshakeError("a wrong proof")
