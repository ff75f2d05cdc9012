"""What is kept, held and discarded."""
