#!/bin/sh
# Puts Spark 4.1 with the jars of Iceberg and Delta Lake (300 MB) into .cache/spark-tables for the tests, by the Ivy that
# pyspark ships: neither has jars for Spark 4.3 yet, and those for 4.1 do not run in it.
# Without a way to Maven Central: one line, and the tests that need them say so (with CI set this fails instead).
set -eu
cd "$(dirname "$0")/.."
folder=.cache/spark-tables
if ls "$folder"/delta-spark_*.jar >/dev/null 2>&1; then
    exit 0
fi
echo "fetching Spark 4.1 with Iceberg and Delta Lake into $folder (once, some minutes) …"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/ivy.xml" <<'IVY'
<ivy-module version="2.0">
  <info organisation="dagster-adjunct" module="test-spark-tables"/>
  <configurations><conf name="default"/></configurations>
  <dependencies>
    <dependency org="org.apache.spark" name="spark-sql_2.13" rev="4.1.3" conf="default->default"/>
    <dependency org="org.apache.iceberg" name="iceberg-spark-runtime-4.1_2.13" rev="1.12.0" conf="default->default"/>
    <dependency org="io.delta" name="delta-spark_4.1_2.13" rev="4.3.0" conf="default->default"/>
    <dependency org="org.xerial" name="sqlite-jdbc" rev="3.50.3.0" conf="default->default"/>
    <exclude org="org.rocksdb"/>
  </dependencies>
</ivy-module>
IVY
jars=$(.venv/bin/python -c 'import pathlib, pyspark; print(pathlib.Path(pyspark.__file__).parent / "jars")')
if ! java -cp "$(ls "$jars"/ivy-*.jar)" org.apache.ivy.Main -warn -ivy "$work/ivy.xml" -cache "$work/cache" \
    -types jar bundle -retrieve "$work/jars/[artifact]-[revision](-[classifier]).[ext]" > "$work/log" 2>&1; then
    tail -n 20 "$work/log" >&2
    echo "Spark's jars for tables could not be fetched: the tests that need them will say so." >&2
    if [ -n "${CI:-}" ]; then exit 1; fi
    exit 0
fi
# One rename at the end: a fetch that was broken off leaves no half of it.
mkdir -p .cache
rm -rf "$folder"
mv "$work/jars" "$folder"
