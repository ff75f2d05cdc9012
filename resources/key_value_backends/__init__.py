"""The backends of key-value tables: SQLite, PostgreSQL, DynamoDB, and the objects of a lake."""
