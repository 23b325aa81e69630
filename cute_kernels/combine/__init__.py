"""Attention to parts of the keys, merged into that to all of them."""
