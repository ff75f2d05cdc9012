"""Files that others write: listed and read exactly as they were listed, typed strictly by a
declared schema.
"""
