"""A key-value table as a remote table: its records are JSON, and are changed optimistically."""
