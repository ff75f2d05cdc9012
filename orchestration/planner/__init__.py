"""The execution planner: from a described application to a proven plan, without Spark and without I/O."""
