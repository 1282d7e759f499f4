"""The decoder of targets and draft models, with its configs, weights and KV cache."""
