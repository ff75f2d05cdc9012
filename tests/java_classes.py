"""An archive of the classes that Spark's JVM loads, which a JVM maps in place of reading and
verifying them anew.

    python -m tests.java_classes        makes it in .cache, where it is not there yet

A session and its first query take 7 s of processor time with it in place of 14 s, and the tests
start some seventy JVMs. A JVM that finds it to be of another Java or another Spark leaves it alone,
and so do we where it is missing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ARCHIVE = Path(__file__).resolve().parents[1] / ".cache" / "spark-classes.jsa"
# A JVM that lives for some minutes would spend much of them on compiling what it then hardly uses.
# With a compiler that stops early its code has 48 MB unless told otherwise, which Spark fills: it
# is dropped then, and compiled anew.
# Its classes fill the first 20 MB of metaspace at once, and each step from there would collect all
# garbage.
SHORT_LIVED = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m -XX:MetaspaceSize=256m"
)
# A session spends a seventh of its time on collecting garbage where new objects have the third of a
# heap of 1 GB that is theirs by default, once it has grown. Spark's launcher has a heap of 128 MB.
ROOM = " -Xmn400m"


def hurry_sparks_jvms() -> None:
    """Let every JVM that Spark starts from here on, in this process or one below it, do without
    what costs time.
    """
    os.environ["SPARK_SUBMIT_OPTS"] = SHORT_LIVED + ROOM + archived()
    os.environ["SPARK_DAEMON_JAVA_OPTS"] = os.environ["SPARK_LAUNCHER_OPTS"] = SHORT_LIVED


def archived() -> str:
    """Return the options with which a JVM uses the archive, where there is one."""
    return f" -XX:SharedArchiveFile={ARCHIVE} -Xlog:cds*=off" if ARCHIVE.exists() else ""


def make_archive() -> None:
    """Run what tests do with Spark once, and keep the classes that it loaded."""
    ARCHIVE.parent.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=ARCHIVE.parent) as folder:
        made = Path(folder) / ARCHIVE.name
        os.environ["SPARK_SUBMIT_OPTS"] = (
            f"{SHORT_LIVED} -XX:ArchiveClassesAtExit={made} -Xlog:cds*=off"
        )
        _use_spark(Path(folder))
        made.replace(ARCHIVE)


def _use_spark(folder: Path) -> None:
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    from dagster_adjunct.resources.spark.session import new_session

    spark = new_session(master="local[2]")
    # PySpark keeps the process that it has started for itself.
    gateway = spark.sparkContext._gateway
    rows = spark.createDataFrame(
        [(n, f"k{n % 3}", n / 2) for n in range(10)], "n int, k string, x double"
    )
    rows.write.parquet(f"{folder}/rows")
    read = spark.read.schema("n int, k string, x double").parquet(f"{folder}/rows")
    summed = (
        read.repartition(2, "k")
        .groupBy("k")
        .agg(F.sum("n").alias("s"), F.max(F.struct("n", "x")).alias("last"))
    )
    text = F.from_json(F.to_json(F.struct("n", "x")), "n int, x double")
    ordered = F.row_number().over(Window.partitionBy("k").orderBy("n"))
    read.join(summed, "k", "left").join(F.broadcast(summed.select("k", "s")), "k").select(
        "*", text, ordered
    ).collect()
    hashed = read.withColumn("h", F.xxhash64("k")).sortWithinPartitions("k", "n")
    hashed.mapInArrow(lambda batches: batches, hashed.schema).unionByName(hashed).distinct().count()
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(120)


if __name__ == "__main__":
    if ARCHIVE.exists():
        sys.exit()
    make_archive()
