"""Spark with the jars of Iceberg and Delta Lake, one a test process, from
`.ci/install-spark-tables.sh`: another engine that reads and writes the tables that Adjunct does.

Iceberg and Delta have no jars for the Spark of this environment yet, so that this is an older
Spark, in a JVM of its own. It is driven by SQL through the gateway that it ships, and ends with
this process.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.servers.s3 import ROOT

JARS = ROOT / ".cache/spark-tables"
_OPENED = (
    "java.lang java.lang.invoke java.lang.reflect java.io java.net java.nio java.util"
    " java.util.concurrent java.util.concurrent.atomic jdk.internal.ref sun.nio.ch sun.nio.cs"
    " sun.security.action sun.util.calendar"
)
_JAVA = ("-Xmx1g", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:ReservedCodeCacheSize=240m")
_SETTINGS = {
    "spark.master": "local[1]",
    "spark.app.name": "tables",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.jsonGenerator.ignoreNullFields": "false",
    "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
    ",io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


@dataclass
class SparkTables:
    """A session; `java` is its JVM."""

    java: Any
    session: Any

    def add_catalog(self, name: str, **settings: str) -> None:
        """Let the session have an Iceberg catalogue of a name that it has not had yet."""
        set_one = self.session.conf().set
        set_one(f"spark.sql.catalog.{name}", "org.apache.iceberg.spark.SparkCatalog")
        for setting, value in settings.items():
            set_one(f"spark.sql.catalog.{name}.{setting}", value)

    def run(self, *statements: str) -> None:
        for statement in statements:
            self.session.sql(statement)

    def rows(self, query: str) -> list[dict[str, Any]]:
        """Return what a query finds. Times are texts, keys of maps too."""
        return [json.loads(row) for row in self.session.sql(query).toJSON().collectAsList()]


@pytest.fixture(scope="session")
def tables_jvm() -> Iterator[Any]:
    """A JVM with these jars; skipped where they are missing, unless CI is set."""
    if not any(JARS.glob("delta-spark_*.jar")):
        reason = (
            "no Spark with Iceberg and Delta: run .ci/install-spark-tables.sh (fetches 300 MB)."
        )
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

    folder = Path(tempfile.mkdtemp(prefix="adjunct-spark-tables-"))
    opened = [f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in _OPENED.split()]
    port, token, process = launch_gateway(
        classpath=f"{JARS}/*",
        jarpath=str(next(JARS.glob("py4j-*.jar"))),
        javaopts=[*_JAVA, *opened, f"-Djava.io.tmpdir={folder}"],
        die_on_exit=True,
        enable_auth=True,
        return_proc=True,
    )
    gateway = JavaGateway(
        gateway_parameters=GatewayParameters(port=port, auth_token=token, auto_convert=True)
    )
    try:
        java = gateway.jvm
        logged = java.org.apache.logging.log4j
        logged.core.config.Configurator.setRootLevel(logged.Level.ERROR)
        yield java
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        with suppress(OSError):
            gateway.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def spark_tables(tables_jvm: Any, tmp_path_factory: pytest.TempPathFactory) -> SparkTables:
    """The session, which ends with its JVM."""
    builder = tables_jvm.org.apache.spark.sql.SparkSession.builder()
    folder = tmp_path_factory.mktemp("spark-tables")
    for name, value in {**_SETTINGS, "spark.sql.warehouse.dir": str(folder)}.items():
        builder = builder.config(name, value)
    return SparkTables(tables_jvm, builder.getOrCreate())
