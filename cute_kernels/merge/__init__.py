"""A partial result of attention, added to a sum of such as it comes."""
