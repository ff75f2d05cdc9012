"""Takes the place of `spark-submit` where JVMs are kept (kept_processes.py): python spark_submit.py
FOLDER ARGUMENTS…

It lends the process that asks one of the JVMs in the folder, waits until that process has ended,
however it did, and leaves a JVM without a Spark context behind.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_PLACES = 4
# As in kept_processes.py, which is not imported: this is started often, and has to be quick.
_HOME, _REAL = "SPARK_HOME", "KEPT_JVMS_SPARK_HOME"


def _main(folder: Path, arguments: list[str]) -> None:
    asked = dict(
        arguments[at + 1].split("=", 1)
        for at, argument in enumerate(arguments[:-1])
        if argument == "--conf"
    )
    real = os.environ[_REAL]
    needs_its_own = asked.get("spark.jars.packages") or not asked.get(
        "spark.master", "local"
    ).startswith("local")
    claimed = None if needs_its_own else _claimed(folder, real)
    if claimed is None:
        os.environ.pop(_HOME)
        os.execv(f"{real}/bin/spark-submit", ["spark-submit", *arguments])
    place, jvm = claimed
    gateway = _prepared(jvm, asked)
    reported = Path(os.environ["_PYSPARK_DRIVER_CONN_INFO_PATH"])
    secret = jvm["secret"].encode()
    nearby = reported.with_name("being-written")
    nearby.write_bytes(struct.pack("!ii", jvm["port"], len(secret)) + secret)
    nearby.replace(reported)
    sys.stdin.buffer.read()
    # at the end of the tests the JVM may be gone; else it is reset before it is lent again
    with suppress(Exception):
        _reset(gateway)
    place.close()


def _claimed(folder: Path, real: str) -> tuple[Any, dict[str, Any]] | None:
    """Return a place whose lock we hold from here on, and the JVM there, rather one that is there
    already.

    None where all are lent: who waited for one might wait for a process that waits for this one.
    """
    places = [folder / f"{number}.lock" for number in range(_PLACES)]
    for place in sorted(places, key=lambda place: not place.with_suffix(".jvm").exists()):
        lock = place.open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return lock, _jvm_of(place.with_suffix(".jvm"), folder, real)
    return None


def _jvm_of(file: Path, folder: Path, real: str) -> dict[str, Any]:
    if file.exists():
        jvm: dict[str, Any] = json.loads(file.read_text("utf-8"))
        with suppress(Exception):
            _reset(_connected(jvm))
            return jvm
        with suppress(ProcessLookupError):
            os.kill(jvm["pid"], signal.SIGKILL)
    reported = file.with_suffix(".told")
    reported.unlink(missing_ok=True)
    environment: dict[str, str] = json.loads((folder / "environment.json").read_text("utf-8"))
    environment["_PYSPARK_DRIVER_CONN_INFO_PATH"] = str(reported)
    process = subprocess.Popen(
        [f"{real}/bin/spark-submit", "pyspark-shell"],
        stdin=os.open(folder / "lifeline", os.O_RDONLY),
        stdout=subprocess.DEVNULL,
        stderr=file.with_suffix(".log").open("w"),
        env=environment,
        cwd=folder,
        start_new_session=True,
    )
    while not reported.exists():
        if process.poll() is not None:
            sys.exit(f"a JVM for tests did not start: see {file.with_suffix('.log')}")
        time.sleep(0.02)
    data = reported.read_bytes()
    port, length = struct.unpack("!ii", data[:8])
    jvm = {"pid": process.pid, "port": port, "secret": data[8 : 8 + length].decode()}
    file.write_text(json.dumps(jvm), "utf-8")
    return jvm


def _connected(jvm: Mapping[str, Any]) -> Any:
    from py4j.clientserver import ClientServer, JavaParameters, PythonParameters

    return ClientServer(
        java_parameters=JavaParameters(
            port=jvm["port"], auth_token=jvm["secret"], auto_convert=True
        ),
        python_parameters=PythonParameters(port=0, eager_load=False),
    )


def _prepared(jvm: Mapping[str, Any], asked: Mapping[str, str]) -> Any:
    gateway = _connected(jvm)
    system = gateway.jvm.java.lang.System
    for name, value in asked.items():
        system.setProperty(name, value)
    # Python workers get the environment that the JVM was started with; they need what this process
    # has for AWS, too.
    for name, value in os.environ.items():
        if name.startswith("AWS_"):
            system.setProperty(f"spark.executorEnv.{name}", value)
    # Paths are relative to where the process that asks was started; open file systems remember
    # another place.
    system.setProperty("user.dir", str(Path.cwd()))
    gateway.jvm.org.apache.hadoop.fs.FileSystem.closeAll()
    return gateway


def _reset(gateway: Any) -> None:
    """Leave no Spark context, no session and no configuration behind."""
    spark = gateway.jvm.org.apache.spark
    active = getattr(getattr(spark, "SparkContext$"), "MODULE$").getActive()
    if active.isDefined():
        active.get().stop()
    spark.sql.classic.SparkSession.clearActiveSession()
    spark.sql.classic.SparkSession.clearDefaultSession()
    system = gateway.jvm.java.lang.System
    for name in list(system.getProperties().stringPropertyNames()):
        if name.startswith("spark."):
            system.clearProperty(name)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2:])
