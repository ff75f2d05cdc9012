"""What is known of records before anything runs: their columns, their types, and where they lie."""
