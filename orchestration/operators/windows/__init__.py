"""Windows over the event times of records: tumbling, sliding, and sessions."""
