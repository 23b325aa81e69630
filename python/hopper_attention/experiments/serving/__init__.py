"""Attention on a key/value cache as servers call it: decode, pages, chunked prefill, append, against the peers."""
