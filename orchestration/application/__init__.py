"""What users describe: streams, tables, and the operators between them."""
