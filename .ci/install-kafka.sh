#!/bin/sh
# Puts the jars of a real Kafka broker (43 MB) into .cache/kafka for the tests, by the Ivy that pyspark ships.
# Without a way to Maven Central: one line, and the tests that need the broker say so (with CI set this fails instead).
set -eu
cd "$(dirname "$0")/.."
folder=.cache/kafka
if ls "$folder"/kafka_2.13-*.jar >/dev/null 2>&1; then
    exit 0
fi
echo "fetching a Kafka broker's jars into $folder (once) …"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/ivy.xml" <<'IVY'
<ivy-module version="2.0">
  <info organisation="dagster-adjunct" module="test-broker"/>
  <configurations><conf name="default"/></configurations>
  <dependencies>
    <dependency org="org.apache.kafka" name="kafka_2.13" rev="4.4.0" conf="default->default"/>
    <dependency org="org.slf4j" name="slf4j-simple" rev="1.7.36" conf="default->default"/>
    <exclude org="org.apache.kafka" module="kafka-tools-api"/>
  </dependencies>
</ivy-module>
IVY
jars=$(.venv/bin/python -c 'import pathlib, pyspark; print(pathlib.Path(pyspark.__file__).parent / "jars")')
if ! java -cp "$(ls "$jars"/ivy-*.jar)" org.apache.ivy.Main -warn -ivy "$work/ivy.xml" -cache "$work/cache" \
    -types jar bundle -retrieve "$work/jars/[artifact]-[revision](-[classifier]).[ext]" > "$work/log" 2>&1; then
    tail -n 20 "$work/log" >&2
    echo "the Kafka broker's jars could not be fetched: the tests that need a broker will say so." >&2
    if [ -n "${CI:-}" ]; then exit 1; fi
    exit 0
fi
# One rename at the end: a fetch that was broken off leaves no half of it.
mkdir -p .cache
rm -rf "$folder"
mv "$work/jars" "$folder"
