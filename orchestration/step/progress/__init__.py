"""How far an application has come: in its inputs, and in the times of its records."""
