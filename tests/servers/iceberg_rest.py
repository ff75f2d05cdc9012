"""An Iceberg REST catalogue on 127.0.0.1: the handlers of Iceberg's own Java library over its JDBC
catalogue, in the JVM of `tables_jvm`.

No server that is distributed as a jar can be fetched here. What is ours is the routing: which
handler a request goes to, and which status an exception is.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

TOKEN = "adjunct-test-bearer-token"
_STATUS = {
    "NoSuchTableException": 404,
    "NoSuchNamespaceException": 404,
    "NoSuchViewException": 404,
    "AlreadyExistsException": 409,
    "CommitFailedException": 409,
    "NamespaceNotEmptyException": 409,
    "CommitStateUnknownException": 500,
    "BadRequestException": 400,
    "ValidationException": 400,
    "IllegalArgumentException": 400,
}


@dataclass
class IcebergRest:
    """A server; `vended` are the settings that it gives to those who load a table, such as
    credentials of its store. `refusals` are the statuses with which the next commits are answered
    in place of committing them; `seen` has the requests: method, path and headers.
    """

    java: Any
    catalog: Any
    vended: dict[str, str] = field(default_factory=dict)
    refusals: list[int] = field(default_factory=list)
    seen: list[tuple[str, str, Mapping[str, str]]] = field(default_factory=list)
    port: int = 0

    def __post_init__(self) -> None:
        jackson = self.java.org.apache.iceberg.shaded.com.fasterxml.jackson
        mapper = jackson.databind.ObjectMapper()
        mapper.setVisibility(
            jackson.annotation.PropertyAccessor.FIELD,
            getattr(jackson.annotation, "JsonAutoDetect$Visibility").ANY,
        )
        mapper.configure(jackson.databind.DeserializationFeature.FAIL_ON_UNKNOWN_PROPERTIES, False)
        kebab = getattr(jackson.databind, "PropertyNamingStrategies$KebabCaseStrategy")
        mapper.setPropertyNamingStrategy(kebab())
        rest = self.java.org.apache.iceberg.rest
        rest.RESTSerializers.registerAll(mapper)
        self._mapper, self._rest = mapper, rest

    def answer(
        self, method: str, path: str, query: Mapping[str, list[str]], body: bytes
    ) -> tuple[int, bytes]:
        """Return the status and the body of an answer."""
        from py4j.protocol import Py4JJavaError

        try:
            made = self._handle(method, path.removeprefix("/v1/").split("/"), query, body.decode())
        except Py4JJavaError as error:
            kind = error.java_exception.getClass().getSimpleName()
            status = _STATUS.get(kind, 500)
            text = str(error.java_exception.getMessage())
            found = {"error": {"message": text, "type": kind, "code": status}}
            return status, json.dumps(found).encode()
        if made is None:
            return 204, b""
        if isinstance(made, dict):
            return 200, json.dumps(made).encode()
        answered = json.loads(self._mapper.writeValueAsString(made))
        if "metadata" in answered:
            answered["config"] = {**answered.get("config", {}), **self.vended}
        return 200, json.dumps(answered).encode()

    def _handle(
        self, method: str, parts: list[str], query: Mapping[str, list[str]], body: str
    ) -> Any:
        handlers, catalog = self._rest.CatalogHandlers, self.catalog
        if parts == ["config"]:
            return {"defaults": {}, "overrides": {}}
        names = self.java.org.apache.iceberg.catalog
        if parts == ["namespaces"]:
            if method == "GET":
                return handlers.listNamespaces(catalog, names.Namespace.empty())
            return handlers.createNamespace(
                catalog, self._parse(body, "requests.CreateNamespaceRequest")
            )
        namespace = names.Namespace.of(_strings(self.java, unquote(parts[1]).split("\x1f")))
        if len(parts) == 2:
            if method == "DELETE":
                return handlers.dropNamespace(catalog, namespace)
            if method == "HEAD":
                return handlers.namespaceExists(catalog, namespace)
            return handlers.loadNamespace(catalog, namespace)
        if parts[2:] == ["tables"]:
            if method == "GET":
                return handlers.listTables(catalog, namespace)
            request = self._parse(body, "requests.CreateTableRequest")
            if request.stageCreate():
                return handlers.stageTableCreate(catalog, namespace, request)
            return handlers.createTable(catalog, namespace, request)
        table = names.TableIdentifier.of(namespace, unquote(parts[3]))
        if parts[4:] == ["metrics"]:
            return None
        if method == "POST":
            return handlers.updateTable(
                catalog, table, self._parse(body, "requests.UpdateTableRequest")
            )
        if method == "DELETE":
            purge = query.get("purgeRequested") == ["true"]
            return (handlers.purgeTable if purge else handlers.dropTable)(catalog, table)
        if method == "HEAD":
            return handlers.tableExists(catalog, table)
        mode = getattr(self._rest, "RESTCatalogProperties$SnapshotMode")
        return handlers.loadTable(catalog, table, mode.ALL)

    def _parse(self, body: str, name: str) -> Any:
        kind = self.java.java.lang.Class.forName(f"org.apache.iceberg.rest.{name}")
        return self._mapper.readValue(body, kind)


def _strings(java: Any, texts: list[str]) -> Any:
    array = java.java.lang.reflect.Array
    kind = java.java.lang.Class.forName("java.lang.String")
    made = array.newInstance(kind, len(texts))
    for place, text in enumerate(texts):
        array.set(made, place, text)
    return made


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that a proxy has cut."""


def _handler(server: IcebergRest) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = urlsplit(self.path)
            server.seen.append((self.command, url.path, dict(self.headers.items())))
            is_commit = self.command == "POST" and "/tables/" in url.path
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                status, text = 401, b'{"error": {"message": "who?", "type": "x", "code": 401}}'
            elif is_commit and server.refusals:
                status = server.refusals.pop(0)
                refused = {"message": "refused", "type": "CommitStateUnknown", "code": status}
                text = json.dumps({"error": refused}).encode()
            else:
                status, text = server.answer(self.command, url.path, parse_qs(url.query), body)
            self.send_response_only(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            return

        do_GET = do_POST = do_HEAD = do_DELETE = _serve

    return Handler


@pytest.fixture
def iceberg_rest(tables_jvm: Any, tmp_path: Path) -> Iterator[IcebergRest]:
    """A catalogue without namespaces, whose tables are in a folder of the test."""
    java = tables_jvm
    catalog = java.org.apache.iceberg.jdbc.JdbcCatalog()
    settings = {
        "uri": f"jdbc:sqlite:{tmp_path}/rest.db",
        "warehouse": f"file://{tmp_path}/rest",
        "io-impl": "org.apache.iceberg.hadoop.HadoopFileIO",
    }
    catalog.setConf(java.org.apache.hadoop.conf.Configuration())
    catalog.initialize("rest", settings)
    made = IcebergRest(java, catalog)
    server = _Server(("127.0.0.1", 0), _handler(made))
    made.port = server.server_port
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        catalog.close()
