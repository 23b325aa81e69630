"""The forward kernel of the GPUs without WGMMA."""
