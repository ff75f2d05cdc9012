"""What is told of a job that failed in code of the user's: operator, line and a sample record."""
