"""The commits of a run: where it starts; of each batch what it is going to do, its outputs, and its end."""
