"""What requests would do and what is refused of them, before they are written."""
