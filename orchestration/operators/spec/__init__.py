"""What an operator is: what every one says of itself, and the values that planning and compiling give it."""
