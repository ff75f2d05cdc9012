#!/bin/sh
# Puts a real schema registry (Apicurio, 139 MB; it speaks Confluent's interface) into .cache/registry for the tests, by
# the Ivy that pyspark ships. Version 2.6 is the last that runs on Java 17.
# Without a way to Maven Central: one line, and the tests that need it say so (with CI set this fails instead).
set -eu
cd "$(dirname "$0")/.."
folder=.cache/registry
if ls "$folder"/apicurio-registry-app-*-runner.jar >/dev/null 2>&1; then
    exit 0
fi
echo "fetching a schema registry into $folder (once) …"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/ivy.xml" <<'IVY'
<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">
  <info organisation="dagster-adjunct" module="test-registry"/>
  <configurations><conf name="default"/></configurations>
  <dependencies>
    <dependency org="io.apicurio" name="apicurio-registry-app" rev="2.6.13.Final" transitive="false" conf="default->master">
      <artifact name="apicurio-registry-app" type="tar.gz" ext="tar.gz" m:classifier="all"/>
    </dependency>
  </dependencies>
</ivy-module>
IVY
jars=$(.venv/bin/python -c 'import pathlib, pyspark; print(pathlib.Path(pyspark.__file__).parent / "jars")')
if ! java -cp "$(ls "$jars"/ivy-*.jar)" org.apache.ivy.Main -warn -ivy "$work/ivy.xml" -cache "$work/cache" \
    -retrieve "$work/[artifact].[ext]" > "$work/log" 2>&1; then
    tail -n 20 "$work/log" >&2
    echo "the schema registry could not be fetched: the tests that need one will say so." >&2
    if [ -n "${CI:-}" ]; then exit 1; fi
    exit 0
fi
mkdir -p .cache "$work/registry"
tar -xzf "$work/apicurio-registry-app.tar.gz" -C "$work/registry"
# One rename at the end: a fetch that was broken off leaves no half of it.
rm -rf "$folder"
mv "$work/registry" "$folder"
