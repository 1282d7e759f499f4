"""Top-k, sampling thresholds and draws over the vocabulary."""
