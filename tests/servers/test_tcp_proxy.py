"""The proxy does what its switches say, to a server that answers each line with how many lines
it has seen.
"""

from __future__ import annotations

import socket
import socketserver
import threading
import time

import pytest

from tests.servers.tcp_proxy import TcpProxy


class Counting(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self):
        self.seen: list[bytes] = []
        super().__init__(("127.0.0.1", 0), Answering)


class Answering(socketserver.StreamRequestHandler):
    server: Counting

    def handle(self):
        try:
            for line in self.rfile:
                self.server.seen.append(line)
                self.wfile.write(b"%d\n" % len(self.server.seen))
        except ConnectionError:
            pass  # cut, as ordered


@pytest.fixture
def server():
    with Counting() as server:
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        yield server
        server.shutdown()


@pytest.fixture
def proxy(server):
    with TcpProxy(server.server_address[1]).running() as proxy:
        yield proxy


class Client:
    def __init__(self, proxy: TcpProxy, patience: float = 5.0):
        self.socket = socket.create_connection(("127.0.0.1", proxy.port), timeout=patience)

    def ask(self, line: bytes = b"x\n") -> bytes:
        self.socket.sendall(line)
        answer = b""
        while not answer.endswith(b"\n"):
            piece = self.socket.recv(1 << 16)
            if not piece:
                raise ConnectionResetError
            answer += piece
        return answer


def test_without_trouble_it_forwards_both_ways(proxy, server):
    client = Client(proxy)
    assert [client.ask() for _ in range(3)] == [b"1\n", b"2\n", b"3\n"]
    assert (proxy.requests, proxy.befallen) == (3, [])


def test_a_request_lost_before_never_reaches_the_server(proxy, server):
    client = Client(proxy)
    client.ask()
    proxy.next("lost-before")
    with pytest.raises(ConnectionError):
        client.ask(b"lost\n")
    assert server.seen == [b"x\n"]
    assert Client(proxy).ask() == b"2\n"


def test_of_a_request_lost_after_the_server_has_acted_and_no_answer_comes(proxy, server):
    client = Client(proxy)
    client.ask()
    proxy.next("lost-after")
    with pytest.raises(ConnectionError):
        client.ask(b"done\n")
    assert server.seen == [b"x\n", b"done\n"]


def test_trouble_waits_for_the_request_that_holds_its_bytes(proxy, server):
    client = Client(proxy)
    proxy.next("lost-after", holding=b"COMMIT")
    assert client.ask(b"BEGIN\n") == b"1\n"
    with pytest.raises(ConnectionError):
        client.ask(b"COMMIT\n")
    assert proxy.befallen == ["lost-after"]


def test_a_request_that_hangs_is_not_answered_and_others_are(proxy, server):
    client = Client(proxy, patience=0.05)
    proxy.next("hangs")
    with pytest.raises(TimeoutError):
        client.ask()
    assert Client(proxy).ask() == b"1\n"


def test_while_it_hangs_nothing_is_forwarded_and_later_all(proxy, server):
    client = Client(proxy)
    proxy.hanging = True
    start = time.monotonic()
    threading.Timer(0.1, proxy.calm).start()
    assert client.ask() == b"1\n"
    assert time.monotonic() - start >= 0.09


def test_each_request_is_delayed(proxy):
    client = Client(proxy)
    proxy.delay = 0.05
    start = time.monotonic()
    client.ask()
    client.ask()
    assert time.monotonic() - start >= 0.1


def test_bytes_pass_no_faster_than_the_throttle(proxy):
    client = Client(proxy)
    proxy.bytes_per_second = 100_000
    start = time.monotonic()
    client.ask(b"y" * 20_000 + b"\n")
    assert time.monotonic() - start >= 0.18


def test_refused_is_refused_and_accepted_on_the_same_port(proxy):
    client = Client(proxy)
    client.ask()
    proxy.refuse()
    with pytest.raises(ConnectionError):
        client.ask()
    with pytest.raises(ConnectionRefusedError):
        Client(proxy)
    proxy.accept()
    assert Client(proxy).ask() == b"2\n"


def test_cut_ends_what_is_under_way_and_new_connections_pass(proxy):
    client = Client(proxy)
    client.ask()
    proxy.cut()
    with pytest.raises(ConnectionError):
        client.ask()
    assert Client(proxy).ask() == b"2\n"


@pytest.mark.lengthy
def test_cut_waits_for_no_client_that_connects_again_meanwhile(proxy):
    ended = threading.Event()

    def connect_again():
        while not ended.is_set():
            try:
                client = Client(proxy, patience=30)
                client.ask()
                client.socket.recv(1)  # until it is cut
            except ConnectionError:
                pass  # as ordered

    clients = [threading.Thread(target=connect_again, daemon=True) for _ in range(8)]
    for client in clients:
        client.start()
    for _ in range(50):
        proxy.cut()  # it waits for none of them, or the test would hang
    ended.set()
    while any(client.is_alive() for client in clients):
        proxy.cut()


def test_a_server_that_is_down_looks_so_through_the_proxy():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with TcpProxy(unused.getsockname()[1]).running() as proxy, pytest.raises(ConnectionError):
            Client(proxy).ask()
