#!/bin/sh
# Puts versitygw, a real S3 server, into .cache/bin for the tests. Building it takes some minutes, once.
# Without Go: one line, and the tests that need the server say so (with CI set this fails instead).
set -eu
cd "$(dirname "$0")/.."
if [ -x .cache/bin/versitygw ]; then
    exit 0
fi
go=$(command -v go || { [ -x /usr/local/go/bin/go ] && echo /usr/local/go/bin/go; } || true)
if [ -z "$go" ]; then
    echo "versitygw is not installed and there is no Go to build it: install Go 1.24+ to run the S3 tests on it." >&2
    if [ -n "${CI:-}" ]; then exit 1; fi
    exit 0
fi
echo "building versitygw into .cache/bin (some minutes, once) …"
mkdir -p .cache/bin
GOBIN="$PWD/.cache/bin" "$go" install github.com/versity/versitygw/cmd/versitygw@v1.8.0
