"""Applications in the tests of those who write them: planned, and run, without a lake and without a server."""
