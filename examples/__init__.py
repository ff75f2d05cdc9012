"""Examples: ordinary users' modules, written with the public API only."""
