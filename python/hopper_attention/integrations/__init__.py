"""Other packages that run on these kernels: a module or package each, imported by its own name, which needs no other."""
