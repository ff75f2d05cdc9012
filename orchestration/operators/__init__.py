"""The operators, in a file each or a file by kind: how each is planned, compiled to DataFrames,
and shown in plans.
"""
