"""The command line: `adjunct …`."""
