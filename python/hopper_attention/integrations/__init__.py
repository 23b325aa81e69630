"""Other packages that run on these kernels: a module or package each, which imports no other."""
