"""A world for tests that are parametrised with a backend."""

from tests.end_to_end.key_values.worlds import world

__all__ = ["world"]
