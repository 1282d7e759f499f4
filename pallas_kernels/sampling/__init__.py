"""Kernels that sample tokens, find sampling thresholds, and find the most probable tokens of a vocabulary."""
