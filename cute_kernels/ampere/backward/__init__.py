"""The backward kernel of GPUs without WGMMA."""
