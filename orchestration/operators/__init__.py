"""The operators, one file each: what one is, how it is planned, compiled to DataFrames, drawn and traced."""
