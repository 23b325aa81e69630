"""The forward pass on e4m3 inputs with block scales: all that is FP8's own."""
