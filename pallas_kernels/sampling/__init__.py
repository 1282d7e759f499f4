"""Top-k, sampling thresholds, and sampling of tokens over the vocabulary."""
