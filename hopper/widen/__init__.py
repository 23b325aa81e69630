"""Q and K of e4m3 in 16 bits, for the FP8 kernel of an exact LSE."""
