#!/bin/sh
# Debian packages that the tests use in CI; on a machine that has them this does nothing.
set -eu
missing=""
command -v java >/dev/null 2>&1 || missing="$missing openjdk-17-jre-headless"
command -v go >/dev/null 2>&1 || missing="$missing golang-go"
ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null 2>&1 || missing="$missing postgresql"
{ command -v chromium || command -v google-chrome; } >/dev/null 2>&1 || missing="$missing chromium fonts-dejavu-core"
command -v redis-server >/dev/null 2>&1 || missing="$missing redis-server"
python3 -c 'import venv, ensurepip' 2>/dev/null || missing="$missing python3-venv"
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # shellcheck disable=SC2086
    apt-get install -y -qq --no-install-recommends $missing
else
    echo "CI needs these packages and can't install them here:$missing" >&2
    exit 1
fi
