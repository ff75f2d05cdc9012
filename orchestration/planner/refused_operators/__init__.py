"""Operators that are refused, each by the line of the user's file; some only where the application is strict."""
