"""Rotation, block quantization to e4m3 and the transpose of V, in one pass over Q, K and V on sm_90a."""
