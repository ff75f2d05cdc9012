"""Versions compared with each other and handed to other engines."""
