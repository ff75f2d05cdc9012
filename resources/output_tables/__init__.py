"""Iceberg and Delta tables that applications write: a batch is one commit."""
