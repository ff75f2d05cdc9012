"""Requests for startpoints: what they say, how they are stored, and which task each is handed to."""
