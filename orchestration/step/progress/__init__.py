"""How far an application has come, in its inputs and in the times of its records, and what a step tells of it."""
