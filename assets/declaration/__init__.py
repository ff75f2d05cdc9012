"""What users declare about a dataset. Declarations are plain values: making one reads nothing
and writes nothing.
"""
