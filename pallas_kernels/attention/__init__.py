"""Attention over the paged KV cache: rotate queries and keys, append keys and values, attend, merge splits."""
