"""Access to stores: objects, streams, tables, key-value tables and Spark."""
