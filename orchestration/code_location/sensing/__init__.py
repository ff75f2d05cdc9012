"""Sensors: what launches runs. Each is a thin shell, one a file, around pure decisions with a versioned cursor."""
