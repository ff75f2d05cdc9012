"""Testing of applications, without a lake or a server."""
