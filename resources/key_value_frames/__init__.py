"""Key-value tables and Spark: read as a DataFrame, and written in bulk from one."""
