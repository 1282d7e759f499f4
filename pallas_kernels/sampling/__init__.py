"""Top-k, thresholds and draws over the vocabulary."""
