"""A rate that holds over all tasks of all runs: leased from the lake by a run's driver, handed out to its tasks."""
