"""What the backward kernels of every GPU have in common."""
