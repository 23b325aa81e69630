"""Several tensors of 16 bits, added to one in one pass."""
