"""What Spark's Python workers are forked from."""
