"""What each optimisation of the forward kernel is worth."""
