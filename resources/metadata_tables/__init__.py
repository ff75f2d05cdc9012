"""A lake's metadata in a key-value table: a store that keeps some keys there, and moving them there and back."""
