"""Softmaxes of FP8 scores."""
