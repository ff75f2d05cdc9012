"""Columns of records between operators: what is known of them, those that are hidden, and expressions over them."""
