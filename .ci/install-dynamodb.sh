#!/bin/sh
# Puts the jars of DynamoDB Local (51 MB) into .cache/dynamodb for the tests, by the Ivy that pyspark ships.
# Without a way to Maven Central: one line, and the tests that need the server say so (with CI set this fails instead).
set -eu
cd "$(dirname "$0")/.."
folder=.cache/dynamodb
if ls "$folder"/DynamoDBLocal-*.jar >/dev/null 2>&1; then
    exit 0
fi
echo "fetching the jars of DynamoDB Local into $folder (once) …"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/ivy.xml" <<'IVY'
<ivy-module version="2.0">
  <info organisation="dagster-adjunct" module="test-dynamodb"/>
  <configurations><conf name="default"/></configurations>
  <dependencies>
    <dependency org="com.amazonaws" name="DynamoDBLocal" rev="2.6.1" conf="default->default"/>
  </dependencies>
</ivy-module>
IVY
jars=$(.venv/bin/python -c 'import pathlib, pyspark; print(pathlib.Path(pyspark.__file__).parent / "jars")')
if ! java -cp "$(ls "$jars"/ivy-*.jar)" org.apache.ivy.Main -warn -ivy "$work/ivy.xml" -cache "$work/cache" \
    -types jar bundle so -retrieve "$work/jars/[artifact]-[revision](-[classifier]).[ext]" > "$work/log" 2>&1; then
    tail -n 20 "$work/log" >&2
    echo "the jars of DynamoDB Local could not be fetched: the tests that need it will say so." >&2
    if [ -n "${CI:-}" ]; then exit 1; fi
    exit 0
fi
# One rename at the end: a fetch that was broken off leaves no half of it.
mkdir -p .cache
rm -rf "$folder"
mv "$work/jars" "$folder"
