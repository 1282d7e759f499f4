"""Weights by name: declarations, checkpoints' tensors, quantised forms, division over devices."""
