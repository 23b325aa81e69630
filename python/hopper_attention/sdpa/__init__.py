"""Attention by torch's own fused kernels: the backend of devices that have none of ours."""
