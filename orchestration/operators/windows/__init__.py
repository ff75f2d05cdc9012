"""Windows over the times of records: tumbling, sliding and by sessions."""
