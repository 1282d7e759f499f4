"""Inflation: a small trained model gets a larger shape, and its logits stay the same."""
