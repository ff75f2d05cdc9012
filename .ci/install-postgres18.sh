#!/bin/sh
# Puts the programs of PostgreSQL 18 (15 MB) into .cache/postgres18 for the tests, by the Ivy that pyspark ships.
# Without a way to Maven Central: one line, and the tests that need that version say so (with CI set this fails instead).
set -eu
cd "$(dirname "$0")/.."
folder=.cache/postgres18
if ls "$folder"/*.jar >/dev/null 2>&1; then
    exit 0
fi
case "$(uname -sm)" in
    "Linux x86_64") machine=amd64 ;;
    "Linux aarch64") machine=arm64v8 ;;
    *) echo "there are no programs of PostgreSQL 18 for $(uname -sm): the tests that need them will say so."; exit 0 ;;
esac
echo "fetching the programs of PostgreSQL 18 into $folder (once) …"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/ivy.xml" <<IVY
<ivy-module version="2.0">
  <info organisation="dagster-adjunct" module="test-postgres"/>
  <configurations><conf name="default"/></configurations>
  <dependencies>
    <dependency org="io.zonky.test.postgres" name="embedded-postgres-binaries-linux-$machine" rev="18.0.0" conf="default->default"/>
  </dependencies>
</ivy-module>
IVY
jars=$(.venv/bin/python -c 'import pathlib, pyspark; print(pathlib.Path(pyspark.__file__).parent / "jars")')
if ! java -cp "$(ls "$jars"/ivy-*.jar)" org.apache.ivy.Main -warn -ivy "$work/ivy.xml" -cache "$work/cache" \
    -types jar -retrieve "$work/jars/[artifact]-[revision](-[classifier]).[ext]" > "$work/log" 2>&1; then
    tail -n 20 "$work/log" >&2
    echo "the programs of PostgreSQL 18 could not be fetched: the tests that need them will say so." >&2
    if [ -n "${CI:-}" ]; then exit 1; fi
    exit 0
fi
# One rename at the end: a fetch that was broken off leaves no half of it.
mkdir -p .cache
rm -rf "$folder"
mv "$work/jars" "$folder"
