"""Operators that write: to streams, tables, local tables and functions of users."""
