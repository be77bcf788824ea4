"""Attention over the paged KV pool: the interface, and one file a backend."""
