"""The plan of a launch on packed sequences: lengths and tiles, worked out on the GPU."""
