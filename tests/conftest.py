"""Fixtures that all floors share. Real servers are in tests/servers, one module a kind."""

from __future__ import annotations

pytest_plugins = ["tests.servers.postgres", "tests.servers.s3"]
