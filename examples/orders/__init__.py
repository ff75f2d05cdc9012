"""Orders: nested JSON from a shop, a nested catalogue in versions, and rows with JSON as the
result.
"""
