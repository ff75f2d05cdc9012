"""Versions and streams handed to other engines."""
