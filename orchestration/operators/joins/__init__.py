"""Joins with datasets and with tables that are looked up."""
