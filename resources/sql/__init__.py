"""Spark SQL expressions read without Spark: what they name, the type that they have, what is
certainly wrong.
"""
