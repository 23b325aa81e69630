"""Other packages that run on these kernels, a module or package each, imported by its own name and without others."""
