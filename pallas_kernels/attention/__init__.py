"""Kernels of attention over the paged KV cache, which also rotate queries and write keys and values to the cache."""
