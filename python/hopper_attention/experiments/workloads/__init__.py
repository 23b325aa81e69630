"""What the benchmarks of workloads have in common: those of features, and those on a key/value cache."""
