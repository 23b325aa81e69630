"""What models use beyond dense attention: packed sequences and windows, against the installed peers."""
