"""Orders, priced by a catalogue that comes in editions, with the town of each customer."""
