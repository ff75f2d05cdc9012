"""What must hold of a version before anybody reads it."""
