"""Accuracy: the error of each precision on inputs with outliers."""
