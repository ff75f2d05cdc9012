"""What must hold of a version before anybody reads it, and of its objects afterwards."""
