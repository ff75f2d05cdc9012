"""Where reading starts: requested by people, handed to tasks, resolved, applied by a commit of offsets."""
