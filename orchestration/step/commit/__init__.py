"""The commits of a batch: what it is going to do, its outputs, and how far the inputs are read then."""
