"""Ways to use the kernels from other packages. Each is imported by its own name, and needs none of the others."""
