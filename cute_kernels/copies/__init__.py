"""Several tensors of 16 bits, copied in one launch."""
