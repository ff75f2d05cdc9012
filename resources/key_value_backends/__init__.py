"""The stores that key-value tables lie in: SQLite, PostgreSQL, DynamoDB, and a lake's objects."""
