"""Decoding over a latent (MLA): few queries, and a cache whose values are columns of its keys as well."""
