"""The command line: `adjunct …`."""

from orchestration.cli.main import main

__all__ = ["main"]
