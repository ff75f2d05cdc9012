"""What a batch has learned from outside, of tables and of functions: asked once, recorded, and told again."""
