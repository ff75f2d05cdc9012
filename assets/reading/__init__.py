"""Reading one version: whole by Spark, by key from plain Python, served while new ones are
published.
"""
