"""Time and memory by length of the sequence."""
