"""Functions of users on their way into Spark's tasks, and what is known of their results."""
