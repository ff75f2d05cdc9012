"""States of Iceberg and Delta tables: which there are, and the rows of each."""
