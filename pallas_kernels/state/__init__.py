"""Gathers and scatters rows of the per-slot state of sequences."""
