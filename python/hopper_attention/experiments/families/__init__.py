"""How fast and how exact FP8 attention is on inputs as models have them."""
