"""Files, Delta and Iceberg tables as inputs, reference data and output of an application."""
