"""Attention over the paged KV cache: append, rotate, attend, merge."""
