#!/bin/sh
# Puts the real servers that tests start into .cache, where this machine can have them.
set -eu
exec sh "$(dirname "$0")/install-versitygw.sh"
