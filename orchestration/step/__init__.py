"""Running an application: its datasets first, then batch after batch of its operators on Spark."""
