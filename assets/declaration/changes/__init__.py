"""The forms in which changes arrive on a stream, and how records in them are read."""
