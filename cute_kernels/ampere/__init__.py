"""FlashAttention-2-style kernels of cp.async, ldmatrix and mma.sync, for every NVIDIA GPU since sm_80."""
