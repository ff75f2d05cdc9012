"""A TCP proxy on loopback before any server, which delays, throttles, hangs, refuses and cuts, by
switch.

It knows no protocol. A *request* is what a client sends after it got an answer, or after it
connected; what comes in further pieces before an answer belongs to it.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

T = TypeVar("T")

# Before: the connection is cut, and the server never sees the request. After: the server's answer
# came to the proxy, so it has acted, and the connection is cut in its stead. Hangs: the request
# goes nowhere, and the connection stays.
Trouble = Literal["lost-before", "lost-after", "hangs"]
Chooser = Callable[[bytes], Trouble | None]
_PIECE = 1 << 16
_PATIENCE = 60  # seconds for a switch, which a busy machine may take long to come to
_QUIET = 0.02  # seconds without a further byte, after which an answer is taken to be whole


class TcpProxy:
    """Listens on `port` and forwards to `target`, a port on loopback. The switches act on what
    comes after them.

    `delay`: seconds that each request waits. `bytes_per_second`: of each direction of each
    connection. `hanging`: while it is set nothing is forwarded; then what was held back goes on.
    `choose`: what befalls a request, by its bytes. `requests` counts those that the server was
    given, `befallen` what became of the others and of lost answers.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self.delay = 0.0
        self.bytes_per_second: float | None = None
        self.hanging = False
        self.choose: Chooser = lambda _: None
        self.requests = 0
        self.befallen: list[Trouble] = []
        self._planned: deque[tuple[Trouble | None, bytes]] = deque()
        self._connections: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._listener: asyncio.Server | None = None

    def next(self, *troubles: Trouble | None, holding: bytes = b"") -> None:
        """Let these befall the next requests whose bytes hold `holding`, in order; None lets one
        pass.
        """
        self._planned.extend((trouble, holding) for trouble in troubles)

    def cut(self) -> None:
        """Cut all connections there are, in the middle of whatever is under way; clients may
        connect again at once.
        """
        self._run(self._cut())

    def refuse(self) -> None:
        """Cut all connections and refuse new ones, until `accept`."""
        self._run(self._refuse())

    def accept(self) -> None:
        """Take connections (again), on the port that it had."""
        self._run(self._accept())

    def calm(self) -> None:
        """All switches off; what was planned is forgotten."""
        self.delay, self.bytes_per_second, self.hanging, self.choose = (
            0.0,
            None,
            False,
            lambda _: None,
        )
        self._planned.clear()

    @contextmanager
    def running(self) -> Iterator[TcpProxy]:
        thread = threading.Thread(target=self._loop.run_forever, name="tcp-proxy", daemon=True)
        thread.start()
        try:
            self.accept()
            yield self
        finally:
            self.refuse()
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
            self._loop.close()

    def trouble_of(self, request: bytes) -> Trouble | None:
        if self._planned and self._planned[0][1] in request:
            return self._planned.popleft()[0]
        return self.choose(request)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_PATIENCE)

    async def _accept(self) -> None:
        if self._listener is None:
            self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
            self.port = self._listener.sockets[0].getsockname()[1]

    async def _refuse(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        while self._connections:  # those too that were taken just before
            await self._cut()

    async def _cut(self) -> None:
        there = set(self._connections)
        for connection in there:
            connection.cut()
        while there & self._connections:
            await asyncio.sleep(0.001)

    async def _serve(
        self, client_reader: asyncio.StreamReader, client: asyncio.StreamWriter
    ) -> None:
        try:
            server_reader, server = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            _abort(client)  # the server is down, which its client may as well know
            return
        connection = _Connection(self, client, server)
        self._connections.add(connection)
        try:
            await connection.run(client_reader, server_reader)
        finally:
            self._connections.discard(connection)


class _Connection:
    def __init__(
        self, proxy: TcpProxy, client: asyncio.StreamWriter, server: asyncio.StreamWriter
    ) -> None:
        self.proxy, self.client, self.server = proxy, client, server
        self.answered = True  # what the client sends next begins a request
        self.losing = False  # the answer to this request is not to arrive

    def cut(self) -> None:
        _abort(self.client)
        _abort(self.server)

    async def run(
        self, from_client: asyncio.StreamReader, from_server: asyncio.StreamReader
    ) -> None:
        ways = [
            asyncio.create_task(self._requests(from_client)),
            asyncio.create_task(self._answers(from_server)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self.cut()

    async def _requests(self, source: asyncio.StreamReader) -> None:
        proxy = self.proxy
        while piece := await source.read(_PIECE):
            begins, self.answered = self.answered, False
            trouble = proxy.trouble_of(piece)
            if trouble is not None:
                proxy.befallen.append(trouble)
            if trouble == "lost-before":
                return
            if trouble == "hangs":
                await source.read()  # until the client has had enough
                return
            self.losing = self.losing or trouble == "lost-after"
            if begins:
                await asyncio.sleep(proxy.delay)
                proxy.requests += 1
            await self._forward(piece, self.server)

    async def _answers(self, source: asyncio.StreamReader) -> None:
        while piece := await source.read(_PIECE):
            if self.losing:
                await _until_quiet(source)
                return
            self.answered = True
            await self._forward(piece, self.client)

    async def _forward(self, piece: bytes, to: asyncio.StreamWriter) -> None:
        while self.proxy.hanging:
            await asyncio.sleep(0.002)
        rate = self.proxy.bytes_per_second
        if rate is None:
            to.write(piece)
        else:
            step = max(1, int(rate / 50))
            for start in range(0, len(piece), step):
                to.write(piece[start : start + step])
                await asyncio.sleep(len(piece[start : start + step]) / rate)
        await to.drain()


async def _until_quiet(source: asyncio.StreamReader) -> None:
    while True:
        try:
            if not await asyncio.wait_for(source.read(_PIECE), _QUIET):
                return
        except TimeoutError:
            return


def _abort(writer: asyncio.StreamWriter) -> None:
    """End it with a reset, as a machine that is gone does; what was not sent yet is lost."""
    raw = writer.get_extra_info("socket")
    if raw is not None and raw.fileno() >= 0:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    writer.transport.abort()
