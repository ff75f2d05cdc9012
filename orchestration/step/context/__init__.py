"""What a step works with, and what one batch of it reads."""
