"""The forward kernel for values of up to 512 columns, and for a second query that multiplies them."""
