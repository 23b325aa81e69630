"""sm_90a kernels of hopper-attention, written in the CuTe Python DSL (no torch in here)."""
