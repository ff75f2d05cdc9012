"""Real servers that tests start on loopback, one module a kind; registered in tests/conftest.py."""
