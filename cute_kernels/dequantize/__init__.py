"""The keys and values of a cache of e4m3, copied to 16 bits."""
