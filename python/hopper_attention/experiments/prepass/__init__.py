"""The FP8 pre-pass against a device copy."""
