"""What an application has done: intents, checkpoints, positions, and who runs it."""
