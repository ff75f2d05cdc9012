#!/bin/sh
# Puts the real servers that tests start into .cache, where this machine can have them, and Spark's S3 packages
# into their own cache: two test processes that both found it empty would fill it at the same time.
set -eu
sh "$(dirname "$0")/install-versitygw.sh"
sh "$(dirname "$0")/install-kafka.sh"
sh "$(dirname "$0")/install-registry.sh"
sh "$(dirname "$0")/install-dynamodb.sh"
sh "$(dirname "$0")/install-postgres18.sh"
sh "$(dirname "$0")/install-spark-tables.sh"
cd "$(dirname "$0")/.."
if [ ! -d "${XDG_CACHE_HOME:-$HOME/.cache}/dagster-adjunct/ivy/jars" ]; then
    echo "fetching Spark's S3 packages (once) …"
    .venv/bin/python -c 'from dagster_adjunct.resources.spark.session import new_session; new_session(master="local[1]", lake_url="s3://none/none").stop()' >/dev/null 2>&1
fi
